"""The prefill role: jobs, sealing, announcements, leases and the hand-off; and its Ray actor."""
