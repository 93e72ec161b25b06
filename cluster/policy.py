"""Placement: which workers serve a request, from a snapshot. Pure.

``LeastLoaded`` takes the decode worker whose pool is least promised (tokens placed there over
its capacity), of those that have room now if any has, and the prefill worker with the fewest
tokens outstanding. A worker that has not reported its load is never taken for idle: it is not
eligible. A decode worker where a request already waits for blocks is not eligible either, so that
nobody overtakes it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.worker.messages import NodeRef, Role


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A live worker as placement sees it.

    Attributes:
        capacity_tokens: positions that its pool holds; 0 while its load is unknown.
        free_tokens: positions that its free blocks hold, when it last told.
        prefill_tokens: tokens of prefills placed there and not done.
        decode_tokens: positions of requests placed there and not ended.
        has_waiting: a request there waits for blocks.
        connected_to: sources that its connector has opened.
        draining: it takes nothing new.
    """

    ref: NodeRef
    roles: tuple[Role, ...]
    capacity_tokens: int
    prefill_tokens: int
    decode_tokens: int
    has_waiting: bool
    connected_to: frozenset[NodeRef]
    free_tokens: int = 0
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes. ``prefill`` None: the decode worker computes the prompt itself."""

    decode: NodeRef
    prefill: NodeRef | None
    reason: str


class Policy(Protocol):
    """A placement policy. Deterministic: the same snapshot gives the same answer."""

    name: str

    def place(self, num_tokens: int, workers: Sequence[WorkerView]) -> Placement | None:
        """Choose for a prompt of ``num_tokens``; None: it waits."""
        ...

    def choose_prefill(
        self, num_tokens: int, decode: NodeRef, workers: Sequence[WorkerView], windowed: bool
    ) -> NodeRef | None:
        """Choose a prefill worker that ``decode`` can read from, within the window if asked."""
        ...


class LeastLoaded:
    """See the module. ``prefill_window``: tokens a prefill worker may hold beyond what it runs."""

    name = "least_loaded"

    def __init__(self, prefill_window: int) -> None:
        self.prefill_window = prefill_window

    def place(self, num_tokens: int, workers: Sequence[WorkerView]) -> Placement | None:
        """Least promised decode worker that some prefill worker can serve."""
        candidates = [
            w
            for w in workers
            if Role.DECODE in w.roles and w.capacity_tokens and not w.has_waiting and not w.draining
        ]
        for decode in sorted(
            candidates,
            key=lambda w: (
                w.free_tokens < num_tokens,
                w.decode_tokens / w.capacity_tokens,
                w.ref.node_id,
            ),
        ):
            if Role.PREFILL in decode.roles:
                if self._has_room(decode, num_tokens, windowed=True):
                    return Placement(decode.ref, None, "colocated worker with the least load")
                continue
            prefill = self.choose_prefill(num_tokens, decode.ref, workers, windowed=True)
            if prefill is not None:
                return Placement(decode.ref, prefill, "least loaded pair")
        return None

    def choose_prefill(
        self, num_tokens: int, decode: NodeRef, workers: Sequence[WorkerView], windowed: bool
    ) -> NodeRef | None:
        """Fewest outstanding tokens; ties by name."""
        reader = next((w for w in workers if w.ref == decode), None)
        candidates = [
            w
            for w in workers
            if Role.PREFILL in w.roles
            and w.capacity_tokens
            and not w.draining
            and reader is not None
            and w.ref in reader.connected_to
            and self._has_room(w, num_tokens, windowed)
        ]
        best = min(candidates, key=lambda w: (w.prefill_tokens, w.ref.node_id), default=None)
        return best.ref if best is not None else None

    def _has_room(self, worker: WorkerView, num_tokens: int, windowed: bool) -> bool:
        outstanding = worker.prefill_tokens
        return not windowed or not outstanding or outstanding + num_tokens <= self.prefill_window
