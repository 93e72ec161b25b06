"""Two real processes: each survives the other's kill -9 and what it has read stays true."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import numpy as np
import pytest

from kvferry.kv_transfer.connector import (
    BlockRef,
    BlockResult,
    Move,
    PeerInfo,
    ReadStatus,
    TransferFailed,
)
from kvferry.kv_transfer.digest import block_digest
from kvferry.kv_transfer.peer_codec import decode_peer_info, encode_peer_info
from tests.kv_transfer.helpers import LAYOUT, SOURCE_EPOCH, Host, Worker
from tests.kv_transfer.open_files import open_files

NUM_BLOCKS = 16
ROOT = Path(__file__).parents[2]

SOURCE = """
import sys
import msgpack
from kvferry.kv_transfer.peer_codec import encode_peer_info
from tests.kv_transfer.helpers import Host, SOURCE_EPOCH
worker = Host("shm").worker("source", epoch=SOURCE_EPOCH, num_blocks=16, seed=1)
digests = [worker.connector.digest(block) for block in range(16)]
print(msgpack.packb([encode_peer_info(worker.connector.local_info()), digests]).hex(), flush=True)
sys.stdin.read()
"""

READER = """
import sys
import msgpack
from kvferry.kv_transfer.connector import BlockRef, Move
from kvferry.kv_transfer.peer_codec import decode_peer_info
from tests.kv_transfer.helpers import Host
info = decode_peer_info(msgpack.unpackb(bytes.fromhex(sys.argv[1])))
reader = Host("shm").worker("victim", num_blocks=16, blocks_per_poll=4)
peer = reader.connector.connect(info)
reader.connector.start_read(peer, [Move(BlockRef(info.epoch, b, 3), b, 4, None) for b in range(16)])
print([result.status.value for result in reader.connector.poll(0.0)], flush=True)
sys.stdin.read()
"""


@contextmanager
def process(script: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A child running ``script``, and the first line that it printed."""
    child = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with child:
        assert child.stdout is not None
        try:
            yield child, child.stdout.readline()
        finally:
            child.kill()


def kill_9(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGKILL)
    assert child.wait(30) == -signal.SIGKILL


@contextmanager
def remote_source() -> Iterator[tuple[subprocess.Popen[str], PeerInfo, list[int]]]:
    with process(SOURCE) as (child, line):
        encoded, digests = msgpack.unpackb(bytes.fromhex(line))
        yield child, decode_peer_info(encoded), digests


def moves_of(info: PeerInfo, digests: list[int]) -> list[Move]:
    return [
        Move(BlockRef(info.epoch, block, 3), block, LAYOUT.block_size, digest)
        for block, digest in enumerate(digests)
    ]


def expected_blocks() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    rng = np.random.default_rng(1)
    return rng.integers(0, 256, (NUM_BLOCKS, LAYOUT.block_bytes()), dtype=np.uint8)


@pytest.fixture
def reader(shm_host: Host) -> Worker:
    return shm_host.worker("reader", num_blocks=NUM_BLOCKS, blocks_per_poll=6)


def statuses(results: list[BlockResult]) -> list[ReadStatus]:
    return [result.status for result in results]


def test_blocks_of_another_process_arrive_whole(reader: Worker) -> None:
    with remote_source() as (_, info, digests):
        peer = reader.connector.connect(info)
        reader.connector.start_read(peer, moves_of(info, digests))
        results = [r for _ in range(3) for r in reader.connector.poll(0.0)]
    assert statuses(results) == [ReadStatus.OK] * NUM_BLOCKS
    assert np.array_equal(reader.memory.blocks, expected_blocks())


def test_a_reader_survives_its_source_killed_in_the_middle(reader: Worker) -> None:
    with remote_source() as (child, info, digests):
        peer = reader.connector.connect(info)
        reader.connector.start_read(peer, moves_of(info, digests))
        first = reader.connector.poll(0.0)
        assert 0 < len(first) < NUM_BLOCKS
        kill_9(child)
        rest = [r for _ in range(3) for r in reader.connector.poll(1.0)]
        assert statuses(first + rest) == [ReadStatus.OK] * NUM_BLOCKS
        assert np.array_equal(reader.memory.blocks, expected_blocks())
        with pytest.raises(TransferFailed, match="no handshake with worker"):
            reader.connector.connect(info)
    peer.close()


def test_a_source_survives_its_reader_killed_in_the_middle() -> None:
    before = open_files()
    host = Host("shm")
    source = host.worker("source", epoch=SOURCE_EPOCH, num_blocks=NUM_BLOCKS, seed=1)
    packed = msgpack.packb(encode_peer_info(source.connector.local_info())).hex()
    with process(READER, packed) as (child, line):
        assert line.strip() == str(["ok"] * 4)
        kill_9(child)
    source.memory.blocks[0] = 1
    reader = host.worker("reader", num_blocks=NUM_BLOCKS)
    peer = reader.connector.connect(source.connector.local_info())
    reader.connector.start_read(peer, [source.move(block, block) for block in range(6)])
    assert statuses(reader.connector.poll(0.0)) == [ReadStatus.OK] * 6
    assert block_digest(reader.memory.blocks[0]) == source.connector.digest(0)
    host.close()
    assert open_files() == before, "nothing is kept for a reader, so nothing is left of it"
