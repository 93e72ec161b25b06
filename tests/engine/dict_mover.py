"""What stands for the host's memory, its disk, and the decision to use them, in engine tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvferry.kv_cache.host_tier import Forget, HostKey, Load, Move, Read, Save, Spill


@dataclass(frozen=True)
class FixedCosts:
    """Decides as it was told."""

    offload: bool

    def prefers_offload(self, num_tokens: int, bytes_out: int, bytes_in: int) -> bool:
        return self.offload

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Learns nothing."""

    def offloaded(self, num_bytes: int, seconds: float) -> None:
        """Learns nothing."""

    def restored(self, num_bytes: int, seconds: float) -> None:
        """Learns nothing."""


@dataclass
class WaveringCosts:
    """Decides as the list says, over and over."""

    decisions: list[bool]
    asked: int = 0
    log: list[bool] = field(default_factory=list)

    def prefers_offload(self, num_tokens: int, bytes_out: int, bytes_in: int) -> bool:
        assert num_tokens > 0 and 0 <= bytes_out <= bytes_in > 0
        self.asked += 1
        self.log.append(self.decisions[self.asked % len(self.decisions)])
        return self.log[-1]

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Learns nothing."""
        assert num_tokens > 0 and seconds >= 0

    def offloaded(self, num_bytes: int, seconds: float) -> None:
        """Learns nothing."""
        assert num_bytes >= 0 and seconds >= 0

    def restored(self, num_bytes: int, seconds: float) -> None:
        """Learns nothing."""
        assert num_bytes >= 0 and seconds >= 0


@dataclass
class DictMover:
    """Copies blocks to dictionaries; what is in ``damaged`` cannot be read or written."""

    slots: NDArray[np.int64]
    spoilt: set[int]
    memory: dict[int, tuple[HostKey, NDArray[np.int64]]] = field(default_factory=dict)
    disk: dict[int, tuple[HostKey, NDArray[np.int64]]] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)
    moves: list[Move] = field(default_factory=list)
    closed: bool = False

    @property
    def block_bytes(self) -> int:
        return int(self.slots.shape[1]) * 8

    def move(self, moves: Sequence[Move]) -> list[Move]:
        self.moves.extend(moves)
        return [move for move in moves if not self.make(move)]

    def make(self, move: Move) -> bool:
        match move:
            case Save(key, block_id, slot):
                self.memory[slot] = key, self.slots[block_id].copy()
            case Spill(key, slot, file):
                assert self.memory[slot][0] == key, "another content lies there"
                if file in self.damaged:
                    self.disk.pop(file, None)
                    return False
                self.disk[file] = self.memory[slot]
            case Load(key, slot, block_id):
                assert self.memory[slot][0] == key, "another content lies there"
                self.fill(block_id, self.memory[slot][1])
            case Read(key, file, block_id):
                if file in self.damaged or file not in self.disk:
                    return False
                assert self.disk[file][0] == key, "another content lies there"
                self.fill(block_id, self.disk[file][1])
            case Forget(file):
                self.disk.pop(file, None)
        return True

    def fill(self, block_id: int, content: NDArray[np.int64]) -> None:
        self.slots[block_id] = content
        self.spoilt.discard(block_id)

    def close(self) -> None:
        self.closed = True
