"""Files of blocks: whole or a miss, within their folder, gone with their process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kv_cache.hashing import BlockHash
from kvferry.kv_cache.host_tier import (
    Forget,
    Load,
    Move,
    Read,
    Save,
    Spill,
    TailKey,
)
from kvferry.kv_transfer.authentication import NO_KEY
from kvferry.kv_transfer.memory import allocate_private
from kvferry.worker.build import HostTierTooSmall, WorkerSettings, host_tier
from kvferry.worker.disk_folder import HEADER_BYTES, DiskFolder, DiskUnavailable
from kvferry.worker.host_memory import HostMemory, HostMemoryUnavailable
from kvferry.worker.messages import NodeRef
from kvferry.worker.worker import WorkerTimes

SIZE = 64
KEY = b"k" * 16


def block(seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)


def files(folder: DiskFolder) -> list[str]:
    return sorted(path.name for path in folder.folder.iterdir() if path.name != "lock")


def test_a_block_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    disk = DiskFolder(tmp_path / "new" / "folder", SIZE)
    target = np.zeros(SIZE, dtype=np.uint8)
    for seed in (1, 2):  # a file is written again
        assert disk.write(7, KEY, block(seed))
        assert disk.read(7, KEY, target)
        assert (target == block(seed)).all()
    assert files(disk) == ["00000007.block"], "nothing else is left lying"
    assert (disk.folder / "00000007.block").stat().st_size == HEADER_BYTES + SIZE
    disk.close()
    disk.close()
    assert list(tmp_path.glob("new/folder/*/")) == []


@pytest.mark.parametrize("at", [0, len(b"KVFERRY1"), HEADER_BYTES, HEADER_BYTES + SIZE - 1])
def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, at: int) -> None:
    disk = DiskFolder(tmp_path, SIZE)
    disk.write(0, KEY, block(1))
    path = disk.folder / "00000000.block"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert not disk.read(0, KEY, np.zeros(SIZE, dtype=np.uint8))
    disk.close()


@pytest.mark.parametrize("change", ["short", "long", "empty", "gone", "other key", "a folder"])
def test_a_file_that_is_not_whole_is_a_miss(tmp_path: Path, change: str) -> None:
    disk = DiskFolder(tmp_path, SIZE)
    disk.write(0, KEY, block(1))
    path, key = disk.folder / "00000000.block", KEY
    data = path.read_bytes()
    match change:
        case "short":
            path.write_bytes(data[:-1])
        case "long":
            path.write_bytes(data + b"x")
        case "empty":
            path.write_bytes(b"")
        case "gone":
            disk.forget(0)
            disk.forget(0)
        case "other key":
            key = b"o" * 16
        case _:
            path.unlink()
            path.mkdir()
    assert not disk.read(0, key, np.zeros(SIZE, dtype=np.uint8))
    disk.close()


def test_a_write_that_fails_leaves_no_older_block_under_its_name(tmp_path: Path) -> None:
    disk = DiskFolder(tmp_path, SIZE)
    disk.write(0, KEY, block(1))
    (disk.folder / "writing").mkdir()  # in the way of the next one
    assert not disk.write(0, KEY, block(2))
    assert not disk.read(0, KEY, np.zeros(SIZE, dtype=np.uint8))
    disk.close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskUnavailable, match=r"file.*cache\.host_tier\.disk_path"):
        DiskFolder(tmp_path / "file", SIZE)


LEAVE = """
import os, sys
from pathlib import Path
import numpy as np
from kvferry.worker.disk_folder import DiskFolder
disk = DiskFolder(Path(sys.argv[1]), 64)
disk.write(3, b"k" * 16, np.zeros(64, dtype=np.uint8))
print(disk.folder.name, flush=True)
sys.stdin.read() if sys.argv[2] == "live" else os._exit(9)
"""


def test_what_a_dead_process_has_left_is_removed_and_a_living_one_s_is_not(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("not ours")
    (tmp_path / "folder").mkdir()
    dead = subprocess.run(
        [sys.executable, "-c", LEAVE, str(tmp_path), "die"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    name = dead.stdout.strip()
    assert (tmp_path / name / "00000003.block").exists()
    with subprocess.Popen(
        [sys.executable, "-c", LEAVE, str(tmp_path), "live"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    ) as living:
        assert living.stdout is not None and living.stdin is not None
        other = living.stdout.readline().strip()
        assert not (tmp_path / name).exists(), "swept by the next to start"
        disk = DiskFolder(tmp_path, SIZE)
        assert disk.num_swept == 0
        assert (tmp_path / other / "00000003.block").exists()
        assert disk.folder.name not in (name, other)
        living.stdin.close()
    assert living.returncode == 0
    disk.close()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"mine.txt", "folder", "kvferry-kv-lock", other}
    again = DiskFolder(tmp_path, SIZE)
    assert again.num_swept == 1
    again.close()


# --- memory and disk together -------------------------------------------------------------------


def test_moves_are_made_in_order_and_a_bad_file_is_told(tmp_path: Path) -> None:
    pool = allocate_private(6, SIZE).blocks
    for number in range(6):
        pool[number] = block(number)
    disk = DiskFolder(tmp_path, SIZE)
    host = HostMemory(pool, 1, disk)
    one, two = BlockHash(KEY), TailKey("r", 3)
    moves: list[Move] = [
        Save(one, 0, 0),
        Spill(one, 0, 0),
        Save(two, 1, 0),
        Load(two, 0, 4),
        Read(one, 0, 5),
    ]
    assert host.move(moves) == []
    assert (pool[4] == block(1)).all() and (pool[5] == block(0)).all()
    assert host.move([Spill(two, 0, 1), Read(one, 1, 5), Forget(0)]) == [Read(one, 1, 5)]
    assert files(disk) == ["00000001.block"]
    host.close()
    assert not disk.folder.exists()


def test_memory_that_cannot_be_had_is_named() -> None:
    with pytest.raises(HostMemoryUnavailable, match=r"cache\.host_tier\.memory"):
        HostMemory(allocate_private(1, SIZE).blocks, 1 << 50)


def settings(**more: Any) -> WorkerSettings:
    ref = NodeRef("decode-0", 1)
    return WorkerSettings(
        ref, "model", "float32", "float32", SchedulerConfig(), WorkerTimes(), key=NO_KEY, **more
    )


def test_a_worker_s_host_tier_has_the_sizes_that_were_asked_for(tmp_path: Path) -> None:
    pool = allocate_private(2, SIZE).blocks
    assert host_tier(settings(), pool) is None
    plain = host_tier(settings(host_bytes=4 * SIZE + 1), pool)
    assert plain is not None and (plain.tier.num_slots, plain.tier.num_files) == (4, 0)
    disk: dict[str, Any] = {"disk_path": str(tmp_path), "disk_bytes": 3 * (SIZE + HEADER_BYTES)}
    both = host_tier(settings(host_bytes=SIZE, prefix_caching=False, **disk), pool)
    assert both is not None and (both.tier.num_slots, both.tier.num_files) == (1, 3)
    assert not both.tier.caching
    (folder,) = tmp_path.glob("*/")
    both.close()
    assert not folder.exists()


@pytest.mark.parametrize(("memory", "disk"), [(SIZE - 1, None), (SIZE, SIZE)])
def test_a_tier_without_room_for_a_block_is_refused(
    tmp_path: Path, memory: int, disk: int | None
) -> None:
    path = str(tmp_path) if disk else None
    given = settings(host_bytes=memory, disk_path=path, disk_bytes=disk or 0)
    with pytest.raises(HostTierTooSmall, match=rf"{memory} bytes of memory.* has {SIZE}"):
        host_tier(given, allocate_private(2, SIZE).blocks)
    assert not list(tmp_path.iterdir())
