"""The decode role: reserve, pull, verify, admit, emit; and its Ray actor."""
