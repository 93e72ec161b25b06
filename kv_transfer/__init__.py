"""Moving sealed KV blocks from one worker's pool into another's.

Knows block references, bytes and digests; does not know requests' tokens, scheduling or roles.
"""
