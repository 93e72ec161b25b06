"""Blocks of a pool that lies in a device's memory, on their way through pinned host memory.

The connectors move bytes of host memory and know no device. So between a device pool and them lies
a small pool of *slots* in host memory, of the same layout: ``publisher`` copies sealed blocks out
into slots that peers read, ``connector`` reads peers' blocks into slots and copies them in. What
peers see of this worker is the pool of slots, generation words and all.
"""
