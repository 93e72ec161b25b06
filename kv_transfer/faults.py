"""Fault injection around any one-sided connector, for users and the simulator.

Owns which faults strike, drawn from a seed; the same seed and calls give the same faults. It never
touches a source's memory, and with nothing to inject it changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.kv_cache.errors import KVFerryError
from kvferry.kv_transfer.connector import (
    BlockResult,
    KVConnector,
    Move,
    Peer,
    PeerInfo,
    ReadId,
)
from kvferry.kv_transfer.read_queue import Tamper

PROBABILITIES = ("drop", "duplicate", "reorder", "corrupt", "stall", "die")


class InvalidFaultPlan(KVFerryError):
    """A fault setting is out of range; names it."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What goes wrong, and how often. Names as under ``transfer.faults`` in the configuration.

    Attributes:
        seed: of the generator that draws the faults.
        delay: seconds at most by which a block's result is held back, drawn evenly.
        drop: probability, per block, that its result is never reported, so that the read does not
            end until it is cancelled.
        duplicate: probability, per block, that its result is reported twice.
        reorder: probability, per poll, that its results come in a random order.
        corrupt: probability, per block, that one byte of the copy is flipped before it is verified.
            Without a digest the damage goes unseen, as it would in truth.
        stall: probability, per poll with unfinished reads, that all reads stand still for
            ``stall_s``.
        die: probability, per poll with unfinished reads, that the connection to one peer breaks.
        stall_s: seconds that a stall lasts.
    """

    seed: int = 0
    delay: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    stall: float = 0.0
    die: float = 0.0
    stall_s: float = 1.0

    def __post_init__(self) -> None:
        for name in PROBABILITIES:
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise InvalidFaultPlan(f"transfer.faults.{name} must be 0 to 1, got {value}")
        for name in ("delay", "stall_s"):
            value = getattr(self, name)
            if not value >= 0.0:
                raise InvalidFaultPlan(f"transfer.faults.{name} must be 0 s or more, got {value}")


class TamperableConnector(KVConnector, Protocol):
    """A connector that lets a caller change a copied block before it is verified."""

    tamper: Tamper | None


@dataclass(frozen=True, slots=True)
class _Held:
    """A result and the time from which it may be reported."""

    due: float
    result: BlockResult


class FaultyConnector:
    """``inner`` with faults. It takes over ``inner.tamper`` and, on ``close``, closes ``inner``.

    A fault strikes what is reported, the bytes copied, or the connection, and never the contract:
    a cancelled read stays fenced, and no result is OK whose block was not verified.

    Attributes:
        injected: faults so far, by name.
    """

    def __init__(
        self, inner: TamperableConnector, plan: FaultPlan, rng: Random | None = None
    ) -> None:
        """``rng`` replaces the generator seeded with ``plan.seed``."""
        self.injected: Counter[str] = Counter()
        self._inner = inner
        self._plan = plan
        self._rng = Random(plan.seed) if rng is None else rng
        self._peers: list[Peer] = []
        self._unfinished: dict[ReadId, int] = {}
        self._held: list[_Held] = []
        self._stalled_until = float("-inf")
        self._corrupt_next = 0
        inner.tamper = self._tamper

    def corrupt_next(self, num_blocks: int) -> None:
        """Flip one byte of each of the next ``num_blocks`` blocks copied, whatever the plan."""
        self._corrupt_next += num_blocks

    def local_info(self) -> PeerInfo:
        """The inner connector's description."""
        return self._inner.local_info()

    def refused(self) -> Counter[str]:
        """The inner connector's refusals."""
        return self._inner.refused()

    def digest(self, block_id: int) -> int:
        """Digest of an own block, never falsified."""
        return self._inner.digest(block_id)

    def connect(self, info: PeerInfo) -> Peer:
        """Open a source; it may break later."""
        peer = self._inner.connect(info)
        self._peers.append(peer)
        return peer

    def start_read(self, peer: Peer, moves: Sequence[Move]) -> ReadId:
        """Queue the copies."""
        read_id = self._inner.start_read(peer, moves)
        if moves:
            self._unfinished[read_id] = len(moves)
        return read_id

    def poll(self, now: float) -> list[BlockResult]:
        """Progress as the faults allow; returns the results that are due."""
        self._strike(now)
        if now >= self._stalled_until:
            for result in self._inner.poll(now):
                self._take(result, now)
        due = [held for held in self._held if held.due <= now]
        self._held = [held for held in self._held if held.due > now]
        results = [held.result for held in sorted(due, key=lambda held: held.due)]
        if len(results) > 1 and self._hits("reorder"):
            self._rng.shuffle(results)
        return results

    def cancel(self, read_id: ReadId) -> None:
        """Fence a read, its held results included."""
        self._inner.cancel(read_id)
        self._unfinished.pop(read_id, None)
        self._held = [held for held in self._held if held.result.read_id != read_id]

    def withdraw(self, block_ids: Sequence[int]) -> None:
        """Tell the inner connector."""
        self._inner.withdraw(block_ids)

    def close(self) -> None:
        """Close the inner connector; idempotent."""
        self._held.clear()
        self._unfinished.clear()
        self._peers.clear()
        self._inner.close()

    def _hits(self, name: str) -> bool:
        """Draw a fault, and count it. A fault that is off draws nothing."""
        probability: float = getattr(self._plan, name)
        hit = probability > 0.0 and self._rng.random() < probability
        if hit:
            self.injected[name] += 1
        return hit

    def _strike(self, now: float) -> None:
        """Faults of the whole transport: only while there is something to harm."""
        if not self._unfinished or now < self._stalled_until:
            return
        if self._hits("stall"):
            self._stalled_until = now + self._plan.stall_s
        if self._peers and self._hits("die"):
            self._peers.pop(self._rng.randrange(len(self._peers))).close()

    def _take(self, result: BlockResult, now: float) -> None:
        """Lose, hold or repeat one result of the inner connector."""
        self._unfinished[result.read_id] -= 1
        if not self._unfinished[result.read_id]:
            del self._unfinished[result.read_id]
        if self._hits("drop"):
            return
        for _ in range(2 if self._hits("duplicate") else 1):
            self._held.append(_Held(now + self._draw_delay(), result))

    def _draw_delay(self) -> float:
        if self._plan.delay <= 0.0:
            return 0.0
        self.injected["delay"] += 1
        return self._rng.uniform(0.0, self._plan.delay)

    def _tamper(self, move: Move, target: NDArray[np.uint8]) -> None:
        """Flip one byte of a block that was just copied, if it is that block's turn."""
        if self._corrupt_next > 0:
            self._corrupt_next -= 1
            self.injected["corrupt"] += 1
        elif not self._hits("corrupt"):
            return
        target[self._rng.randrange(target.size)] ^= 0xFF
