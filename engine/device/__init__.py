"""Where a worker computes if not on the CPU: streams, events, copies and captured graphs.

``protocol`` says what is asked of a device, ``cuda`` is a thin shell over ``torch.cuda``; runner
and graph keys know only the protocol. The CPU needs none of it.
"""
