"""``make peers``: KVFerry and vLLM on the CPU, one after the other, under one load generator."""
