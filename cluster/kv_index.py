"""The KV index: what the router knows of the KV in each worker's pool, fed by events. Pure.

Events of one life of a worker are numbered. One that is missing shows by the number of the next,
or by the worker's own count in its heartbeats; from then on what is known is not believed until a
snapshot has come. A worker's death takes its entries along, and its successor begins with none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.kv_cache.hashing import HashChain, root_hash
from kvferry.kv_cache.prefix_index import KVEventKind
from kvferry.worker.messages import KVEvents, KVSnapshot, NodeRef


@dataclass(slots=True)
class _Known:
    """One worker's values; ``behind_at`` is the next event's number when it was last late."""

    values: set[bytes] = field(default_factory=set)
    next_event: int = 0
    has_gap: bool = False
    behind_at: int | None = None


class KVIndex:
    """See the module."""

    def __init__(self) -> None:
        self._known: dict[NodeRef, _Known] = {}

    def drop(self, worker: NodeRef) -> None:
        """A worker is dead."""
        self._known.pop(worker, None)

    def apply(self, worker: NodeRef, message: KVEvents) -> None:
        """Take events; what was taken before is skipped."""
        known = self._known.setdefault(worker, _Known())
        if message.first > known.next_event:
            known.has_gap = True
        if known.has_gap:
            return
        for event in message.events[known.next_event - message.first :]:
            known.next_event += 1
            if event.kind is KVEventKind.STORED:
                known.values.update(event.values)
            elif event.kind is KVEventKind.REMOVED:
                known.values.difference_update(event.values)
            else:
                known.values.clear()

    def load(self, worker: NodeRef, snapshot: KVSnapshot) -> None:
        """Take a snapshot, unless later events are known already."""
        known = self._known.setdefault(worker, _Known())
        if snapshot.next_event < known.next_event and not known.has_gap:
            return
        known.values = set(snapshot.values)
        known.next_event = snapshot.next_event
        known.has_gap = False

    def wants_snapshot(self, worker: NodeRef, num_events: int) -> bool:
        """Whether to ask for one, called once per period with the worker's own count.

        Events may be on their way: a worker is behind if it was already, at the same event.
        """
        known = self._known.setdefault(worker, _Known())
        late = known.next_event if known.next_event < num_events else None
        was, known.behind_at = known.behind_at, late
        return known.has_gap or (late is not None and was == late)

    def num_values(self, worker: NodeRef) -> int:
        """Chain values that can be found at a worker, as far as is known."""
        known = self._known.get(worker)
        return 0 if known is None or known.has_gap else len(known.values)

    def cached_tokens(self, worker: NodeRef, chain: HashChain, token_ids: Sequence[int]) -> int:
        """How many leading tokens' KV can be found at a worker, in whole units of the chain."""
        known = self._known.get(worker)
        if known is None or known.has_gap or not known.values:
            return 0
        found = 0
        for end in range(chain.unit, len(token_ids) + 1, chain.unit):
            if chain.value_at(end, token_ids) not in known.values:
                break
            found = end
        return found


def chain_for(model: str, salt: str, unit: int) -> HashChain:
    """The chain of a tenant's tokens with one value per ``unit``."""
    return HashChain(root_hash(model, salt), unit)
