"""The bytes of a block pool and, beside them, its table of generation words.

Owns how both are allocated, shared with peers and given back. Knows neither what a block holds nor
who owns it. The owner raises a block's generation word *before* the first write of the block's next
life; a reader copies first and reads the word afterwards. Both orders are kept by a ``Fence``.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from kvferry.kv_cache.errors import KVFerryError

WORD_BYTES = 8  # one generation word
# fcntl has no name for it before Python 3.13: no new writable mapping, the existing one stays.
F_SEAL_FUTURE_WRITE = 0x10

CGROUP = Path("/sys/fs/cgroup")  # of this process, in a container with version 2

Fallocate = Callable[[int, int, int], None]


class PoolMemoryUnavailable(KVFerryError):
    """The pool's memory cannot be had or mapped; names the size and what to change."""


class Fence:
    """Keeps loads and stores of one thread in program order on every processor.

    A lock that is given back and taken again: what came before the release is complete before the
    release, what follows the acquisition starts after it.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        """Complete all earlier memory accesses before any later one."""
        self._lock.release()
        self._lock.acquire()


class PoolMemory:
    """A pool's bytes and generation words, as arrays.

    Attributes:
        blocks: uint8 ``[num_blocks, block_bytes]``; read-only in a peer's mapping.
        generations: uint64 ``[num_blocks]``; likewise.
        num_blocks, block_bytes: the shape of ``blocks``.
        closed: whether ``close`` was called.

    Memory goes back to the system when ``close`` was called *and* the last array that views it is
    gone, so that closing is safe while a tensor still looks into the pool.
    """

    def __init__(self, blocks: NDArray[np.uint8], generations: NDArray[np.uint64]) -> None:
        self.num_blocks, self.block_bytes = blocks.shape
        self._blocks: NDArray[np.uint8] | None = blocks
        self._generations: NDArray[np.uint64] | None = generations
        self._fence = Fence()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._blocks is None

    @property
    def blocks(self) -> NDArray[np.uint8]:
        """The bytes: uint8 ``[num_blocks, block_bytes]``. PoolMemoryUnavailable if closed."""
        if self._blocks is None:
            raise PoolMemoryUnavailable("the pool's memory was closed: open a new one")
        return self._blocks

    @property
    def generations(self) -> NDArray[np.uint64]:
        """The words: uint64 ``[num_blocks]``. PoolMemoryUnavailable if closed."""
        if self._generations is None:
            raise PoolMemoryUnavailable("the pool's memory was closed: open a new one")
        return self._generations

    def raise_generation(self, block_id: int, generation: int) -> None:
        """Publish a block's next life; call it before the first write of that life.

        When this returns every reader that sees a byte of the new life also sees the word.
        """
        self.generations[block_id] = generation
        self._fence()

    def close(self) -> None:
        """Drop the arrays; idempotent, never fails, and safe while views of them live."""
        self._blocks = None
        self._generations = None


class SharedPoolMemory(PoolMemory):
    """A pool in two nameless memory files, so that nothing is left behind by ``kill -9``.

    Attributes:
        blocks_fd, generations_fd: read-only descriptors to hand to peers; owned by this object.
    """

    def __init__(
        self,
        blocks: NDArray[np.uint8],
        generations: NDArray[np.uint64],
        blocks_fd: int,
        generations_fd: int,
    ) -> None:
        super().__init__(blocks, generations)
        self.blocks_fd = blocks_fd
        self.generations_fd = generations_fd

    def close(self) -> None:
        """Close the descriptors and drop the arrays; peers keep what they mapped."""
        if not self.closed:
            os.close(self.blocks_fd)
            os.close(self.generations_fd)
        super().close()


def available_bytes(cgroup: Path = CGROUP) -> int:
    """Bytes that this process could take now without swapping or being killed, roughly."""
    available: int = psutil.virtual_memory().available
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        return available if limit == "max" else min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        return available  # no such limit here


def allocate_private(num_blocks: int, block_bytes: int) -> PoolMemory:
    """Zeroed memory of this process alone. Raises PoolMemoryUnavailable."""
    _check_shape(num_blocks, block_bytes)
    _check_available(num_blocks * block_bytes)
    try:
        blocks = np.zeros((num_blocks, block_bytes), dtype=np.uint8)
        return PoolMemory(blocks, np.zeros(num_blocks, dtype=np.uint64))
    except MemoryError as error:
        raise _unavailable(num_blocks * block_bytes, error) from error


def allocate_shared(
    num_blocks: int, block_bytes: int, *, fallocate: Fallocate = os.posix_fallocate
) -> SharedPoolMemory:
    """Zeroed memory that peers on this host can map read-only.

    All of it is allocated here, so that a lack of memory is PoolMemoryUnavailable now and no
    SIGBUS at the first write. ``fallocate(fd, offset, length)`` is replaced in tests.
    """
    _check_shape(num_blocks, block_bytes)
    _check_available(num_blocks * block_bytes)
    blocks_map, blocks_fd = _allocate_file("kvferry-blocks", num_blocks * block_bytes, fallocate)
    try:
        words_map, words_fd = _allocate_file(
            "kvferry-generations", num_blocks * WORD_BYTES, fallocate
        )
    except PoolMemoryUnavailable:
        os.close(blocks_fd)
        raise
    blocks, generations = _as_arrays(blocks_map, words_map, num_blocks, block_bytes)
    return SharedPoolMemory(blocks, generations, blocks_fd, words_fd)


def map_readonly(
    blocks_fd: int, generations_fd: int, num_blocks: int, block_bytes: int
) -> PoolMemory:
    """Map a peer's pool. The descriptors stay the caller's and may be closed afterwards.

    Raises PoolMemoryUnavailable if a file is smaller than the shape says or could be shrunk under
    the mapping, either of which would make a later read a SIGBUS.
    """
    _check_shape(num_blocks, block_bytes)
    blocks_map = _map_file_readonly(blocks_fd, num_blocks * block_bytes)
    words_map = _map_file_readonly(generations_fd, num_blocks * WORD_BYTES)
    return PoolMemory(*_as_arrays(blocks_map, words_map, num_blocks, block_bytes))


def _allocate_file(name: str, num_bytes: int, fallocate: Fallocate) -> tuple[mmap.mmap, int]:
    """A sealed memory file of ``num_bytes``: its writable mapping and a read-only descriptor."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _unavailable(num_bytes, error) from error
    try:
        fallocate(fd, 0, num_bytes)
        mapping = mmap.mmap(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        _seal_future_writes(fd)
        return mapping, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _unavailable(num_bytes, error) from error
    finally:
        os.close(fd)


def _seal_future_writes(fd: int) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    except OSError:
        # Older kernels lack this seal. It only hardens: peers get read-only descriptors anyway.
        return


def _map_file_readonly(fd: int, num_bytes: int) -> mmap.mmap:
    try:
        size = os.fstat(fd).st_size
        if size < num_bytes:
            raise PoolMemoryUnavailable(
                f"the peer's memory file has {size} bytes and its description says {num_bytes}: "
                "start both workers with the same version"
            )
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise PoolMemoryUnavailable(
                "the peer's memory file is not sealed against shrinking, so reading it may end "
                "this process: refuse the peer and start it with the same version"
            )
        return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError as error:
        raise _unavailable(num_bytes, error) from error


def _as_arrays(
    blocks: mmap.mmap, words: mmap.mmap, num_blocks: int, block_bytes: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    return (
        np.frombuffer(blocks, dtype=np.uint8).reshape(num_blocks, block_bytes),
        np.frombuffer(words, dtype=np.uint64),
    )


def _check_shape(num_blocks: int, block_bytes: int) -> None:
    if num_blocks < 1 or block_bytes < 1:
        raise PoolMemoryUnavailable(
            f"a pool needs at least one block of at least one byte, got {num_blocks} blocks of "
            f"{block_bytes} bytes: raise cache.num_blocks or cache.memory"
        )


def _check_available(num_bytes: int) -> None:
    """Refuse what the kernel would promise and then kill somebody for."""
    available = available_bytes()
    if num_bytes > available:
        raise _unavailable(num_bytes, f"the host has {available} available")


def _unavailable(num_bytes: int, cause: object) -> PoolMemoryUnavailable:
    return PoolMemoryUnavailable(
        f"cannot get {num_bytes} bytes of pool memory ({cause}): lower cache.num_blocks or "
        "cache.memory, or give this process more memory"
    )
