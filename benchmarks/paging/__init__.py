"""Contiguous reservation against paging: requests that a KV memory holds, and what is wasted."""
