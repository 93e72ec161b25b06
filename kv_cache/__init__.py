"""The paged KV cache: which block holds what, who owns it, and when it is free.

Decides and never touches bytes: it knows block ids, generations, reference counts and hashes;
it does not know tensors, sockets or processes.
"""
