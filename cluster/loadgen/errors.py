"""What a plan of load cannot be made of."""

from __future__ import annotations

from kvferry.kv_cache.errors import KVFerryError


class BadLoad(KVFerryError):
    """A setting or a file that no load can be made from; names it and what is wanted."""

    exit_code = 2
