"""What a worker tells routers of the KV that can be found in its pool.

Events are numbered from 0 in each life of the worker; the sender's epoch says which life. A router
that has missed one asks for a snapshot, which says everything and the number that comes next.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.kv_cache.prefix_index import KVEvent


@dataclass(frozen=True, slots=True)
class KVEvents:
    """Worker → router: changes, the first of which has number ``first``."""

    first: int
    events: tuple[KVEvent, ...]


@dataclass(frozen=True, slots=True)
class KVSnapshotRequest:
    """Router → worker: tell everything."""


@dataclass(frozen=True, slots=True)
class KVSnapshot:
    """Worker → router: every chain value that can be found; event ``next_event`` comes next."""

    next_event: int
    values: tuple[bytes, ...]
