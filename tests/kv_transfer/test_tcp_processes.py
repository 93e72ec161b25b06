"""Two real processes over TCP: kill -9 or a stop of either leaves the other whole."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from kvferry.kv_transfer.connector import BlockRef, Move, PeerInfo, ReadStatus, TransferFailed
from kvferry.kv_transfer.peer_codec import decode_peer_info, encode_peer_info
from tests.kv_transfer.helpers import LAYOUT, SOURCE_EPOCH, Host, Worker, collect, layout_with
from tests.kv_transfer.open_files import open_files
from tests.kv_transfer.tcp_ends import RawReader, dial, soon, tcp_of

NUM_BLOCKS = 16
ROOT = Path(__file__).parents[2]
BIG = layout_with(num_layers=64, num_kv_heads=8, head_dim=64)  # 1 MiB a block
# Most blocks cannot leave before their reader reads.
SMALL: dict[str, Any] = {"socket_buffer_bytes": 256 * 1024}

SOURCE = """
import resource, sys
import msgpack
from kvferry.kv_transfer.peer_codec import encode_peer_info
from tests.kv_transfer.helpers import Host, SOURCE_EPOCH
from tests.kv_transfer.test_tcp_processes import BIG, SMALL
files = int(sys.argv[1])
common = {"num_blocks": 16, "layout": BIG, "seed": 1, **SMALL}
worker = Host("tcp").worker("source", epoch=SOURCE_EPOCH, **common)
digests = [worker.connector.digest(block) for block in range(16)]
if files:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
print(msgpack.packb([encode_peer_info(worker.connector.local_info()), digests]).hex(), flush=True)
sys.stdin.read()
"""

READER = """
import sys
import msgpack
from kvferry.kv_transfer.connector import BlockRef, Move
from kvferry.kv_transfer.peer_codec import decode_peer_info
from tests.kv_transfer.helpers import Host, collect
from tests.kv_transfer.test_tcp_processes import BIG, SMALL
info = decode_peer_info(msgpack.unpackb(bytes.fromhex(sys.argv[1])))
reader = Host("tcp").worker("victim", num_blocks=16, layout=BIG, blocks_per_poll=1, **SMALL)
peer = reader.connector.connect(info)
reader.connector.start_read(peer, [Move(BlockRef(info.epoch, b, 3), b, 4, None) for b in range(16)])
print(len(collect(reader.connector, 1)), flush=True)
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


@contextmanager
def remote_source(files: int = 0) -> Iterator[tuple[subprocess.Popen[str], PeerInfo, list[int]]]:
    """A source in a process of its own, with at most ``files`` descriptors if that is not 0."""
    with process(SOURCE, str(files)) as (child, line):
        encoded, digests = msgpack.unpackb(bytes.fromhex(line))
        yield child, decode_peer_info(encoded), digests


def moves_of(info: PeerInfo, digests: list[int]) -> list[Move]:
    return [
        Move(BlockRef(info.epoch, block, 3), block, LAYOUT.block_size, digest)
        for block, digest in enumerate(digests)
    ]


def expected_blocks() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    rng = np.random.default_rng(1)
    return rng.integers(0, 256, (NUM_BLOCKS, BIG.block_bytes()), dtype=np.uint8)


@pytest.fixture
def reader() -> Iterator[Worker]:
    host = Host("tcp")
    yield host.worker("reader", num_blocks=NUM_BLOCKS, layout=BIG, blocks_per_poll=1, **SMALL)
    host.close()


def test_blocks_of_another_process_arrive_whole(reader: Worker) -> None:
    with remote_source() as (_, info, digests):
        peer = reader.connector.connect(info)
        reader.connector.start_read(peer, moves_of(info, digests))
        results = collect(reader.connector, NUM_BLOCKS)
    assert [r.status for r in results] == [ReadStatus.OK] * NUM_BLOCKS
    assert np.array_equal(reader.memory.blocks, expected_blocks())


def test_a_source_killed_in_the_middle_fails_the_rest_and_nothing_else(reader: Worker) -> None:
    with remote_source() as (child, info, digests):
        peer = reader.connector.connect(info)
        reader.connector.start_read(peer, moves_of(info, digests))
        results = collect(reader.connector, 1)
        child.send_signal(signal.SIGKILL)
        assert child.wait(30) == -signal.SIGKILL
        results += collect(reader.connector, NUM_BLOCKS - len(results))
        expected = expected_blocks()
        assert [r.index for r in results] == list(range(NUM_BLOCKS))
        assert results[0].status is ReadStatus.OK and results[-1].status is ReadStatus.FAILED
        for result in results:
            assert result.status in (ReadStatus.OK, ReadStatus.FAILED)
            if result.status is ReadStatus.OK:
                assert np.array_equal(reader.memory.blocks[result.index], expected[result.index])
        with pytest.raises(TransferFailed, match="no handshake with worker"):
            reader.connector.connect(info)


def test_a_stopped_source_leaves_the_read_open_until_it_goes_on(reader: Worker) -> None:
    with remote_source() as (child, info, digests):
        peer = reader.connector.connect(info)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        reader.connector.start_read(peer, moves_of(info, digests))
        assert [reader.connector.poll(0.0) for _ in range(100)] == [[]] * 100
        child.send_signal(signal.SIGCONT)
        results = collect(reader.connector, NUM_BLOCKS)
    assert [r.status for r in results] == [ReadStatus.OK] * NUM_BLOCKS


def test_a_source_survives_its_reader_killed_in_the_middle() -> None:
    before, threads = open_files(), threading.active_count()
    host = Host("tcp")
    source = host.worker(
        "source", epoch=SOURCE_EPOCH, num_blocks=NUM_BLOCKS, layout=BIG, seed=1, **SMALL
    )
    idle = open_files()
    packed = msgpack.packb(encode_peer_info(source.connector.local_info())).hex()
    with process(READER, packed) as (child, line):
        assert int(line) >= 1
        assert tcp_of(source).source.num_connections == 1
        child.send_signal(signal.SIGKILL)
        assert child.wait(30) == -signal.SIGKILL
    soon("given up", lambda: tcp_of(source).source.num_connections == 0)
    assert open_files() == idle
    assert threading.active_count() == threads + 1
    reader = RawReader(source.connector.local_info())
    reader.connection.sendall(reader.request(0, block_id=3))
    assert reader.answer()[2] == source.memory.blocks[3].tobytes()
    reader.close()
    host.close()
    assert open_files() == before and threading.active_count() == threads


def test_a_source_out_of_descriptors_answers_again_when_it_has_some(reader: Worker) -> None:
    with remote_source(files=24) as (_, info, digests):
        flood: list[socket.socket] = [dial(info) for _ in range(40)]
        for connection in flood:
            connection.close()

        def answers() -> bool:
            try:
                peer = reader.connector.connect(info)
            except TransferFailed:
                return False
            reader.connector.start_read(peer, moves_of(info, digests)[:2])
            return True

        soon("answers again", answers)
        assert [r.status for r in collect(reader.connector, 2)] == [ReadStatus.OK] * 2
