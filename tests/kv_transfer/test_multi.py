"""Which connector a pair uses and why, and several connectors over one pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from kvferry.kv_transfer.choosing import Choice, choose, through
from kvferry.kv_transfer.connector import Endpoint, IncompatiblePeer, PeerInfo, ReadStatus
from kvferry.kv_transfer.memory import PoolMemoryUnavailable
from kvferry.kv_transfer.multi import MultiConnector, MultiPeer
from kvferry.kv_transfer.peer_codec import (
    MAX_ENDPOINTS,
    MalformedPeerInfo,
    decode_peer_info,
    encode_peer_info,
)
from tests.kv_transfer.helpers import LAYOUT, Host, collect
from tests.kv_transfer.open_files import open_files

BOTH = (Endpoint("shm", "@here"), Endpoint("tcp", "127.0.0.1:5"))


def remote(host_id: str = "here", endpoints: tuple[Endpoint, ...] = BOTH) -> PeerInfo:
    first = endpoints[0]
    return PeerInfo("source", 7, first.connector, first.address, host_id, "m", LAYOUT, 8, endpoints)


@pytest.mark.parametrize(
    ("configured", "info", "ours", "expected"),
    [
        ("auto", remote(), ("shm", "tcp"), Choice("shm", "same host")),
        ("auto", remote("there"), ("shm", "tcp"), Choice("tcp", "the worker is on another host")),
        (
            "auto",
            remote(endpoints=BOTH[1:]),
            ("shm", "tcp"),
            Choice("tcp", "same host, but the worker does not serve shared memory"),
        ),
        (
            "auto",
            remote(),
            ("tcp",),
            Choice("tcp", "same host, but this worker does not use shared memory"),
        ),
        ("tcp", remote(), ("shm", "tcp"), Choice("tcp", "transfer.connector is tcp")),
        ("shm", remote(), ("shm", "tcp"), Choice("shm", "transfer.connector is shm")),
    ],
)
def test_the_choice_and_its_reason(
    configured: str, info: PeerInfo, ours: tuple[str, ...], expected: Choice
) -> None:
    assert choose("here", ours, configured, info) == expected


@pytest.mark.parametrize(
    ("configured", "info", "ours"),
    [
        ("auto", remote("there", BOTH[:1]), ("shm", "tcp")),
        ("auto", remote("there"), ("shm",)),
        ("tcp", remote(endpoints=BOTH[:1]), ("shm", "tcp")),
        ("shm", remote(endpoints=BOTH[1:]), ("shm", "tcp")),
        ("nixl", remote(), ("shm", "tcp")),
    ],
)
def test_a_pair_that_nothing_joins_is_refused_with_what_either_has(
    configured: str, info: PeerInfo, ours: tuple[str, ...]
) -> None:
    theirs = ", ".join(sorted(e.connector for e in info.endpoints))
    with pytest.raises(IncompatiblePeer, match=f"it serves {theirs}, this worker has {ours[0]}"):
        choose("here", ours, configured, info)


def test_a_worker_with_one_connector_needs_no_endpoints() -> None:
    info = replace(remote(), connector="tcp", address="127.0.0.1:9", endpoints=())
    assert choose("there", ("shm", "tcp"), "auto", info).connector == "tcp"
    assert through(info, "tcp") == info


def test_a_connector_sees_its_own_address_only() -> None:
    seen = through(remote(), "tcp")
    assert (seen.connector, seen.address, seen.endpoints) == ("tcp", "127.0.0.1:5", ())


def test_a_description_with_endpoints_survives_its_message() -> None:
    packed = msgpack.packb(encode_peer_info(remote()))
    assert decode_peer_info(msgpack.unpackb(packed)) == remote()


@pytest.mark.parametrize(
    "endpoints",
    [
        None,
        {},
        ["shm"],
        [{"connector": "shm"}],
        [{"connector": "shm", "address": 3}],
        [{"connector": "shm", "address": "@", "more": 1}],
        [{"connector": "shm", "address": "@"}] * (MAX_ENDPOINTS + 1),
    ],
)
def test_bad_endpoints_are_refused(endpoints: object) -> None:
    with pytest.raises(MalformedPeerInfo):
        decode_peer_info({**encode_peer_info(remote()), "endpoints": endpoints})


@pytest.fixture
def auto_host() -> Iterator[Host]:
    made = Host("auto")
    yield made
    made.close()


def test_a_worker_describes_every_way_to_its_pool(auto_host: Host) -> None:
    info = auto_host.worker("source").connector.local_info()
    assert [e.connector for e in info.endpoints] == ["shm", "tcp"]
    assert info.endpoints[0] == Endpoint(info.connector, info.address)


def test_one_reader_uses_both_ways_at_once_and_the_same_bytes_come(auto_host: Host) -> None:
    """The ids of the two connectors do not get mixed up, whichever is ahead."""
    source = auto_host.worker("source", seed=1)
    reader = auto_host.worker("reader", seed=2)
    info = source.connector.local_info()
    near = reader.connector.connect(info)
    far = reader.connector.connect(replace(info, host_id="elsewhere"))
    assert isinstance(near, MultiPeer) and isinstance(far, MultiPeer)
    assert (near.connector, near.reason) == ("shm", "same host")
    assert (far.connector, far.reason) == ("tcp", "the worker is on another host")
    reads = [
        reader.connector.start_read(peer, [source.move(block, block)])
        for block, peer in enumerate([near, far, far, near, near, far])
    ]
    reader.connector.cancel(reads[1])
    reader.connector.cancel(reads[4])
    results = collect(reader.connector, 4)
    assert sorted((r.read_id, r.move.target) for r in results) == [
        (reads[block], block) for block in (0, 2, 3, 5)
    ]
    assert {r.status for r in results} == {ReadStatus.OK}
    kept = [0, 2, 3, 5]
    assert np.array_equal(reader.memory.blocks[kept], source.memory.blocks[kept])


def test_a_reader_with_one_connector_can_read_a_source_with_several(auto_host: Host) -> None:
    source = auto_host.worker("source", seed=1)
    single = Host("tcp").worker("reader", seed=2)
    peer = single.connector.connect(through(source.connector.local_info(), "tcp"))
    single.connector.start_read(peer, [source.move(2, 2)])
    assert [r.status for r in collect(single.connector, 1)] == [ReadStatus.OK]
    single.connector.close()


def test_the_shared_pool_outlives_either_connector_and_is_closed_last() -> None:
    before = open_files()
    host = Host("auto")
    worker = host.worker("source")
    assert isinstance(worker.connector, MultiConnector)
    parts = worker.connector.parts
    parts[0].close()
    assert not worker.memory.closed
    parts[1].close()
    assert not worker.memory.closed
    worker.connector.close()
    with pytest.raises(PoolMemoryUnavailable):
        _ = worker.memory.blocks
    assert open_files() == before
