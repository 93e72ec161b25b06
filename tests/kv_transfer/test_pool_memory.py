"""Pool memory: shared read-only, allocated whole at start, and given back."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvferry.kv_transfer.memory import (
    PoolMemory,
    PoolMemoryUnavailable,
    allocate_private,
    allocate_shared,
    available_bytes,
    map_readonly,
)
from tests.kv_transfer.open_files import open_files


@pytest.mark.parametrize("allocate", [allocate_shared, allocate_private])
def test_new_memory_is_zeroed_writable_and_has_the_shape_asked_for(
    allocate: Callable[[int, int], PoolMemory],
) -> None:
    memory = allocate(3, 5000)
    assert memory.blocks.shape == (3, 5000) and memory.blocks.dtype == np.uint8
    assert memory.generations.shape == (3,) and memory.generations.dtype == np.uint64
    assert not memory.blocks.any() and not memory.generations.any()
    memory.blocks[2] = 7
    memory.raise_generation(2, 1 << 63)
    assert memory.blocks[2].sum() == 35000 and int(memory.generations[2]) == 1 << 63
    memory.close()


def test_a_mapping_sees_the_owners_writes_and_cannot_write() -> None:
    memory = allocate_shared(2, 4096)
    peer = map_readonly(memory.blocks_fd, memory.generations_fd, 2, 4096)
    memory.blocks[1] = 9
    memory.raise_generation(1, 4)
    assert (peer.blocks[1] == 9).all() and int(peer.generations[1]) == 4
    assert not peer.blocks.flags.writeable and not peer.generations.flags.writeable
    for fd in (memory.blocks_fd, memory.generations_fd):
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    memory.close()
    assert (peer.blocks[1] == 9).all(), "a mapping outlives its owner"
    peer.close()


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (-1, 16)])
@pytest.mark.parametrize("allocate", [allocate_shared, allocate_private])
def test_a_pool_without_bytes_is_refused(
    allocate: Callable[[int, int], PoolMemory], shape: tuple[int, int]
) -> None:
    with pytest.raises(PoolMemoryUnavailable, match="at least one block"):
        allocate(*shape)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_lack_of_memory_is_a_typed_error_at_start_and_leaves_nothing_open(fails_at: int) -> None:
    calls = 0

    def full(fd: int, offset: int, length: int) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, offset, length)

    before = open_files()
    with pytest.raises(PoolMemoryUnavailable, match="No space left"):
        allocate_shared(2, 4096, fallocate=full)
    assert open_files() == before


@pytest.mark.parametrize("allocate", [allocate_private, allocate_shared])
def test_more_than_the_host_has_is_refused_before_any_of_it_is_taken(
    allocate: Callable[[int, int], PoolMemory],
) -> None:
    with pytest.raises(PoolMemoryUnavailable, match=rf"cannot get {1 << 50} bytes.*available"):
        allocate(1 << 20, 1 << 30)


@pytest.mark.parametrize(
    ("limit", "used", "expected"), [("1000", "300", 700), ("1000", "1300", 0), ("max", "1", None)]
)
def test_a_container_s_limit_counts(
    limit: str, used: str, expected: int | None, tmp_path: Path
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    found = available_bytes(tmp_path)
    assert found == expected if expected is not None else found > 1 << 20


def test_a_limit_of_the_system_is_the_same_typed_error() -> None:
    """Nothing injected: the kernel itself refuses, in a process of its own."""
    script = """
import resource, sys
from kvferry.kv_transfer.memory import PoolMemoryUnavailable, allocate_shared
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    allocate_shared(1024, 1 << 16)
except PoolMemoryUnavailable as error:
    sys.exit(0 if str(1 << 26) in str(error) else 4)
sys.exit(3)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_all_pages_are_there_from_the_start() -> None:
    memory = allocate_shared(64, 1 << 16)
    assert os.fstat(memory.blocks_fd).st_blocks * 512 >= 64 << 16
    memory.close()


def test_a_file_that_is_too_small_is_refused_before_it_is_read() -> None:
    memory = allocate_shared(2, 4096)
    with pytest.raises(PoolMemoryUnavailable, match="8192 bytes"):
        map_readonly(memory.blocks_fd, memory.generations_fd, 3, 4096)
    with pytest.raises(PoolMemoryUnavailable, match="16 bytes"):
        map_readonly(memory.blocks_fd, memory.generations_fd, 4, 2048)
    memory.close()


def test_a_file_that_could_shrink_under_the_mapping_is_refused() -> None:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(PoolMemoryUnavailable, match="not sealed"):
        map_readonly(fd, fd, 1, 4096)
    os.close(fd)


@pytest.mark.parametrize("allocate", [allocate_shared, allocate_private])
def test_closing_is_safe_while_views_live_and_idempotent(
    allocate: Callable[[int, int], PoolMemory],
) -> None:
    memory = allocate(2, 4096)
    view = memory.blocks[1]
    view[:] = 3
    memory.close()
    memory.close()
    assert memory.closed and view.sum() == 3 * 4096
    with pytest.raises(PoolMemoryUnavailable, match="closed"):
        _ = memory.blocks
    with pytest.raises(PoolMemoryUnavailable, match="closed"):
        _ = memory.generations


def test_closing_leaves_no_descriptor() -> None:
    before = open_files()
    memory = allocate_shared(2, 4096)
    peer = map_readonly(memory.blocks_fd, memory.generations_fd, 2, 4096)
    assert open_files() > before
    memory.close()
    peer.close()
    assert open_files() == before
