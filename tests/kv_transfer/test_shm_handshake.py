"""The door of a shared-memory source: whatever knocks, it stays open for the next."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.kv_transfer.connector import TransferFailed
from kvferry.kv_transfer.handshake import HandshakeRefused
from kvferry.kv_transfer.memory import allocate_shared
from kvferry.kv_transfer.peer_codec import (
    MalformedPeerInfo,
    decode_peer_info,
    encode_peer_info,
)
from kvferry.kv_transfer.shm import ShmConnector, host_id
from kvferry.kv_transfer.shm_handshake import (
    MAX_MESSAGE_BYTES,
    MAX_PENDING,
    VERSION,
    Hello,
    decode_hello,
    encode_hello,
    peer_uid,
    request_pool,
)
from tests.kv_transfer.helpers import LAYOUT, MODEL, Host
from tests.kv_transfer.open_files import open_files

HELLO = Hello(reader=("reader", 1), source=("source", 7))


def make_source(**changes: object) -> ShmConnector:
    memory = allocate_shared(2, LAYOUT.block_bytes())
    settings_: dict[str, object] = {"handshake_timeout_s": 30.0, **changes}
    return ShmConnector(
        memory,
        worker_id="source",
        epoch=7,
        model=MODEL,
        layout=LAYOUT,
        **settings_,  # type: ignore[arg-type]
    )


@pytest.fixture
def source() -> Iterator[ShmConnector]:
    made = make_source()
    yield made
    made.close()


def dial(connector: ShmConnector) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(30.0)
    connection.connect("\0" + connector.local_info().address[1:])
    return connection


def knock(connector: ShmConnector, packet: bytes) -> tuple[bytes, int]:
    """Send one packet; returns the answer and the number of descriptors that came with it."""
    with dial(connector) as connection:
        connection.send(packet)
        answer, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 2)
        for fd in fds:
            os.close(fd)
        return answer, len(fds)


def assert_answers(connector: ShmConnector) -> None:
    address = connector.local_info().address
    info, fds = request_pool(address, HELLO, timeout_s=30.0)
    for fd in fds:
        os.close(fd)
    assert info == connector.local_info()


int64s = st.integers(-(1 << 63), (1 << 63) - 1)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    packet=st.binary(max_size=200)
    | st.binary(max_size=200).map(lambda body: bytes([VERSION]) + body)
    | st.recursive(
        st.none() | int64s | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | int64s, inner),
    ).map(lambda body: bytes([VERSION]) + msgpack.packb(body))
)
def test_no_packet_kills_the_door_or_opens_the_pool(source: ShmConnector, packet: bytes) -> None:
    answer, num_fds = knock(source, packet)
    assert num_fds == 0
    assert "refused" in msgpack.unpackb(answer[1:])
    assert source.server.answered == source.server.refused["failed"] == 0


def test_the_door_answers_after_every_kind_of_bad_handshake(source: ShmConnector) -> None:
    bad = {
        "malformed": bytes([VERSION + 1]) + encode_hello(HELLO)[1:],
        "wrong_receiver": encode_hello(replace(HELLO, source=("source", 8))),
        "oversized": bytes([VERSION]) + bytes(MAX_MESSAGE_BYTES),
    }
    for reason, packet in bad.items():
        answer, num_fds = knock(source, packet)
        assert num_fds == 0 and "refused" in msgpack.unpackb(answer[1:])
        assert source.server.refused[reason] == 1
    assert_answers(source)


def test_a_reader_that_hangs_up_is_counted_and_forgotten(source: ShmConnector) -> None:
    dial(source).close()
    assert_answers(source)  # served in order of arrival, so the one before is done with
    assert source.server.refused["malformed"] == 1


def test_a_silent_reader_is_refused_in_time_and_does_not_hold_back_others() -> None:
    source = make_source(handshake_timeout_s=0.2)
    with dial(source) as silent:
        assert_answers(source)
        assert silent.recv(1) == b""  # hung up on; the socket's own timeout bounds the wait
    assert source.server.refused["slow"] == 1
    source.close()


def test_silent_readers_cannot_pile_up(source: ShmConnector) -> None:
    silent = []
    for _ in range(MAX_PENDING + 1):
        silent.append(dial(source))
    assert silent[-1].recv(1) == b""
    assert source.server.refused["crowded"] == 1
    for connection in silent:
        connection.close()


def test_the_kernel_names_our_own_user_at_the_other_end() -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        assert peer_uid(here) == os.getuid()


def test_a_reader_of_another_user_is_refused_and_counted() -> None:
    source = make_source(uid_of=lambda _: os.getuid() + 1)
    with pytest.raises(TransferFailed):
        assert_answers(source)
    assert source.server.refused["foreign_uid"] == 1
    assert source.server.answered == 0
    source.close()


def test_credentials_that_cannot_be_read_refuse_one_reader_and_not_the_next() -> None:
    answers: Iterator[OSError | int] = iter([OSError("no credentials"), os.getuid()])

    def read(_connection: socket.socket) -> int:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    source = make_source(uid_of=read)
    with pytest.raises(TransferFailed):
        assert_answers(source)
    assert source.server.refused["failed"] == 1
    assert_answers(source)
    source.close()


def test_a_source_of_another_user_is_refused(source: ShmConnector) -> None:
    """An abstract name can be taken by anyone once its owner is dead."""
    with pytest.raises(TransferFailed, match="run both as one user"):
        request_pool(
            source.local_info().address, HELLO, timeout_s=5.0, uid_of=lambda _: os.getuid() + 1
        )


@pytest.mark.parametrize("num_fds", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["rubbish", "unknown", "silent"])
def test_a_rogue_source_is_refused_and_leaks_no_descriptor(kind: str, num_fds: int) -> None:
    answers = {
        "rubbish": b"\x00\x01\x02",
        "unknown": bytes([VERSION]) + msgpack.packb({"info": {"worker_id": 3}}),
        "silent": b"",
    }
    before = open_files()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.settimeout(30.0)
    listener.bind("")  # the kernel picks a free abstract name
    listener.listen(1)
    address = "@" + listener.getsockname()[1:].decode()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1024)
            if kind != "silent":
                socket.send_fds(connection, [answers[kind]], [0] * num_fds)

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(TransferFailed, match="no handshake with worker"):
        request_pool(address, HELLO, timeout_s=30.0)
    thread.join()
    listener.close()
    assert open_files() == before


def test_connecting_and_closing_leave_no_descriptor() -> None:
    before = open_files()
    host = Host("shm")
    source, reader = host.worker("source"), host.worker("reader")
    for _ in range(3):
        peer = reader.connector.connect(source.connector.local_info())
        assert peer.setup_s > 0.0
        peer.close()
    reader.connector.connect(source.connector.local_info())
    host.close()
    del peer
    assert open_files() == before


def test_a_closed_source_is_gone_for_new_readers() -> None:
    host = Host("shm")
    source, reader = host.worker("source"), host.worker("reader")
    info = source.connector.local_info()
    source.connector.close()
    with pytest.raises(TransferFailed, match="no handshake with worker"):
        reader.connector.connect(info)
    host.close()


def test_a_source_on_another_host_is_refused_before_any_socket_is_opened(
    source: ShmConnector,
) -> None:
    elsewhere = replace(source.local_info(), host_id="elsewhere")
    with pytest.raises(TransferFailed, match="host_id is 'elsewhere' there"):
        source.connect(elsewhere)


def test_the_host_id_is_stable() -> None:
    assert host_id() == host_id() and len(host_id()) > 8


def test_a_hello_survives_its_packet() -> None:
    assert decode_hello(encode_hello(HELLO)) == HELLO


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"reader": ["r", 1]},
        {"reader": ["r", 1], "source": ["s"]},
        {"reader": ["r", 1], "source": ["s", True]},
        {"reader": ["r", 1], "source": [b"s", 1]},
        {"reader": ["r", 1], "source": ["s", 1], "more": 1},
    ],
)
def test_a_hello_of_another_shape_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(HandshakeRefused):
        decode_hello(bytes([VERSION]) + msgpack.packb(body))


def test_a_description_survives_its_packet(source: ShmConnector) -> None:
    info = source.local_info()
    packed = msgpack.packb(encode_peer_info(info))
    assert decode_peer_info(msgpack.unpackb(packed)) == info


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("worker_id",), 3),
        (("epoch",), -1),
        (("epoch",), 1.0),
        (("num_blocks",), 0),
        (("num_blocks",), True),
        (("layout",), []),
        (("layout", "groups"), []),
        (("layout", "groups", 0, "dtype"), "complex"),
        (("layout", "groups", 0, "scales"), "complex"),
        (("layout", "groups", 0, "scales"), 4),
        (("layout", "groups", 0, "head_dim"), 0),
        (("layout", "groups", 0, "head_dim"), 1 << 63),
        (("layout", "groups", 0), None),
    ],
)
def test_a_description_with_a_bad_field_is_refused(
    source: ShmConnector, path: tuple[str | int, ...], value: object
) -> None:
    data: dict[str, object] = encode_peer_info(source.local_info())
    inner: dict[str | int, object] = data  # type: ignore[assignment]
    for step in path[:-1]:
        inner = inner[step]  # type: ignore[assignment]
    inner[path[-1]] = value
    with pytest.raises(MalformedPeerInfo):
        decode_peer_info(data)


@pytest.mark.parametrize("data", [None, [], {"worker_id": "w"}, {1: 2}])
def test_a_description_of_another_shape_is_refused(data: object) -> None:
    with pytest.raises(MalformedPeerInfo):
        decode_peer_info(data)
