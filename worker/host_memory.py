"""Moves blocks between a pool, the host's memory and a disk, as the host tier says.

Owns the host's slots. Called by the engine thread between steps, so that nobody writes to the pool
meanwhile but reads, which have blocks of their own. Knows neither sequences nor what is kept why.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.kv_cache.errors import KVFerryError
from kvferry.kv_cache.host_tier import (
    Forget,
    HostKey,
    Load,
    Move,
    Read,
    Save,
    Spill,
    TailKey,
)
from kvferry.kv_transfer.memory import PoolMemoryUnavailable, allocate_private
from kvferry.worker.disk_folder import DiskFolder


class HostMemoryUnavailable(KVFerryError):
    """The host tier's memory cannot be had; names its size and what to change."""


class HostMemory:
    """See the module.

    Args:
        pool: the pool's bytes, uint8 ``[num_blocks, block_bytes]``.
        num_slots: blocks kept in memory.
        disk: where the others go; None for no disk.
    """

    def __init__(
        self, pool: NDArray[np.uint8], num_slots: int, disk: DiskFolder | None = None
    ) -> None:
        self._pool = pool
        self._disk = disk
        try:
            self._slots = allocate_private(num_slots, self.block_bytes).blocks
        except PoolMemoryUnavailable as error:
            raise HostMemoryUnavailable(
                f"cannot get {num_slots * self.block_bytes} bytes of memory for the host tier: "
                f"lower cache.host_tier.memory ({error})"
            ) from error

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return int(self._pool.shape[1])

    def move(self, moves: Sequence[Move]) -> list[Move]:
        """Make the moves in order; returns those that failed."""
        return [move for move in moves if not self._make(move)]

    def close(self) -> None:
        """Remove the files; idempotent. Memory goes with the object."""
        if self._disk is not None:
            self._disk.close()

    def _make(self, move: Move) -> bool:
        match move:
            case Save(_, block_id, slot):
                self._slots[slot] = self._pool[block_id]
            case Load(_, slot, block_id):
                self._pool[block_id] = self._slots[slot]
            case Spill(key, slot, file):
                return self._folder.write(file, key_bytes(key), self._slots[slot])
            case Read(key, file, block_id):
                return self._folder.read(file, key_bytes(key), self._pool[block_id])
            case Forget(file):
                self._folder.forget(file)
        return True

    @property
    def _folder(self) -> DiskFolder:
        assert self._disk is not None, "a move to a disk, where there is none"
        return self._disk


def key_bytes(key: HostKey) -> bytes:
    """A key as what a file's digest covers."""
    if isinstance(key, TailKey):
        return f"{key.owner}/{key.block_index}".encode()
    return key
