"""The door of a TCP source: whatever knocks, it stays open for the next, and leaves no state."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.kv_transfer import tcp_source
from kvferry.kv_transfer.authentication import NO_KEY
from kvferry.kv_transfer.connector import IncompatiblePeer, PeerInfo, TransferFailed
from kvferry.kv_transfer.handshake import HandshakeRefused, pack_message
from kvferry.kv_transfer.memory import allocate_private
from kvferry.kv_transfer.tcp import TcpConnector
from kvferry.kv_transfer.tcp_source import host_of
from kvferry.kv_transfer.tcp_wire import (
    MAGIC,
    MAX_MESSAGE_BYTES,
    PREFIX,
    VERSION,
    Hello,
    decode_hello,
    decode_reply,
    encode_hello,
    encode_refusal,
    encode_welcome,
    format_address,
    frame,
    parse_address,
    take_message,
)
from tests.kv_transfer.helpers import LAYOUT, MODEL, SOON_S, layout_with
from tests.kv_transfer.open_files import open_files
from tests.kv_transfer.tcp_ends import (
    RawReader,
    dial,
    hello_for,
    is_hung_up,
    receive,
    receive_message,
    soon,
)

QUICK_S = 0.2  # a time limit that is meant to be exceeded


def make_tcp(worker_id: str = "source", epoch: int = 7, **changes: object) -> TcpConnector:
    settings_: dict[str, object] = {
        "model": MODEL,
        "layout": LAYOUT,
        "key": NO_KEY,
        "connect_timeout_s": SOON_S,
        "handshake_timeout_s": SOON_S,
        **changes,
    }
    memory = allocate_private(2, LAYOUT.block_bytes())
    return TcpConnector(
        memory,
        worker_id=worker_id,
        epoch=epoch,
        **settings_,  # type: ignore[arg-type]
    )


@pytest.fixture
def source() -> Iterator[TcpConnector]:
    made = make_tcp()
    yield made
    made.close()


@pytest.fixture
def reader() -> Iterator[TcpConnector]:
    made = make_tcp("reader", 1)
    yield made
    made.close()


def assert_answers(connector: TcpConnector) -> None:
    RawReader(connector.local_info()).close()


def knock(connector: TcpConnector, said: bytes) -> str:
    """Say something; returns the reason with which it was refused."""
    with dial(connector.local_info()) as connection:
        connection.sendall(said)
        reply = msgpack.unpackb(receive_message(connection)[1:])
        assert is_hung_up(connection)
        return str(reply["reason"])


int64s = st.integers(-(1 << 63), (1 << 63) - 1)
packets = st.binary(max_size=200) | st.recursive(
    st.none() | int64s | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | int64s, inner),
).map(lambda body: bytes([VERSION]) + msgpack.packb(body))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(packet=packets)
def test_no_message_kills_the_door_or_opens_the_pool(source: TcpConnector, packet: bytes) -> None:
    assert knock(source, frame(packet)) == "malformed"
    assert source.source.answered == source.source.refused["failed"] == 0


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(said=st.binary(max_size=100) | st.binary(max_size=20).map(lambda rest: MAGIC + rest))
def test_no_bytes_kill_the_door(source: TcpConnector, said: bytes) -> None:
    with dial(source.local_info()) as connection:
        connection.sendall(said)
    assert_answers(source)
    assert source.source.refused["failed"] == 0


def test_the_door_answers_after_every_kind_of_bad_hello(source: TcpConnector) -> None:
    info = source.local_info()
    good = hello_for(info)
    head, body = good[: PREFIX.size], good[PREFIX.size :]
    other_model = replace(info, model="tiny@2")
    wrong_life = replace(info, epoch=8)
    bad = [
        ("malformed", b"GET / HTTP/1.1\r\n\r\n"),
        ("malformed", head + bytes([VERSION + 1]) + body[1:]),
        ("malformed", frame(pack_message(VERSION, {"source": ["source", 7]}))),
        ("malformed", frame(pack_message(VERSION, {"source": ["source", 7], "reader": 3}))),
        ("wrong_receiver", hello_for(wrong_life)),
        ("incompatible", encode_hello(Hello(("source", 7), other_model))),
        ("oversized", PREFIX.pack(MAGIC, MAX_MESSAGE_BYTES + 1)),
    ]
    for reason, said in bad:
        before = source.source.refused[reason]
        assert knock(source, said) == reason
        assert source.source.refused[reason] == before + 1
    assert_answers(source)
    soon("all have left", lambda: source.source.num_connections == 0)
    assert source.source.answered == 1


def test_a_hello_may_come_byte_by_byte(source: TcpConnector) -> None:
    with dial(source.local_info()) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in hello_for(source.local_info()):
            connection.send(bytes([byte]))
        assert decode_reply(receive_message(connection)) == source.local_info()


@pytest.mark.parametrize("part", [0, 3, 8, 100])
def test_a_reader_that_hangs_up_early_is_counted_and_forgotten(
    source: TcpConnector, part: int
) -> None:
    with dial(source.local_info()) as connection:
        connection.sendall(hello_for(source.local_info())[:part])
    soon("counted", lambda: source.source.refused["malformed"] == 1)
    soon("forgotten", lambda: source.source.num_connections == 0)


@pytest.mark.parametrize("part", [0, 3, 8, 100])
def test_a_slow_reader_is_refused_in_time_and_does_not_hold_back_others(part: int) -> None:
    source = make_tcp(handshake_timeout_s=QUICK_S)
    with dial(source.local_info()) as slow:
        slow.sendall(hello_for(source.local_info())[:part])
        assert is_hung_up(slow)  # the socket's own timeout bounds the wait
        assert source.source.refused["slow"] == 1
    source.close()


def test_a_silent_reader_does_not_hold_back_others(source: TcpConnector) -> None:
    with dial(source.local_info()):
        assert_answers(source)


def test_silent_readers_cannot_pile_up() -> None:
    source = make_tcp(max_pending_handshakes=3)
    silent = [dial(source.local_info()) for _ in range(10)]
    assert all(is_hung_up(connection) for connection in silent[3:])
    assert source.source.refused["crowded"] == 7
    assert source.source.num_connections == 3
    for connection in silent:
        connection.close()
    soon("all have left", lambda: source.source.num_connections == 0)
    assert_answers(source)
    source.close()


def test_the_silent_readers_of_one_host_leave_places_for_others() -> None:
    source = make_tcp(host="0.0.0.0", advertise_host="127.0.0.1", max_pending_per_host=3)
    port = int(source.local_info().address.rpartition(":")[2])
    silent = [dial(source.local_info()) for _ in range(5)]
    assert all(is_hung_up(connection) for connection in silent[3:])
    assert source.source.refused == {"crowded": 2}
    with socket.create_connection(
        ("127.0.0.1", port), SOON_S, source_address=("127.0.0.2", 0)
    ) as other:
        other.sendall(hello_for(source.local_info()))
        assert decode_reply(receive_message(other)) == source.local_info()
    for connection in silent:
        connection.close()
    soon("the first host has places again", lambda: source.source.num_connections == 0)
    assert_answers(source)
    source.close()


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_a_host_is_known_by_its_address_or_network(address: str, host: str) -> None:
    assert host_of(address) == host


def test_a_reader_that_resets_is_counted_and_logged_once(
    source: TcpConnector, caplog: pytest.LogCaptureFixture
) -> None:
    with dial(source.local_info()) as connection:
        name = format_address(*connection.getsockname())
        connection.sendall(hello_for(source.local_info())[:20])
        soon("it is being read", lambda: source.source.num_connections == 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    soon("counted", lambda: source.refused() == {"malformed": 1})
    soon("forgotten", lambda: source.source.num_connections == 0)
    lines = [r.getMessage() for r in caplog.records if "refused a reader" in r.getMessage()]
    assert len(lines) == 1 and f"{name} (malformed)" in lines[0]


def test_a_greeted_reader_that_resets_has_been_refused_nothing(source: TcpConnector) -> None:
    reader = RawReader(source.local_info())
    reader.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    reader.close()
    soon("forgotten", lambda: source.source.num_connections == 0)
    assert not source.refused()


@pytest.mark.parametrize("part", ["accept", "serving"])
def test_a_failure_of_our_own_is_logged_too(
    part: str,
    source: TcpConnector,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> object:
        raise OSError(24, "no descriptors left") if part == "accept" else ValueError("a fault")

    if part == "accept":
        monkeypatch.setattr(source.source, "_admit", fail)
    else:
        monkeypatch.setattr(tcp_source, "decode_hello", fail)
    with dial(source.local_info()) as connection:
        connection.sendall(hello_for(source.local_info()))
        assert is_hung_up(connection)
    soon("counted", lambda: source.refused() == {"failed": 1})
    monkeypatch.undo()
    assert_answers(source)
    assert sum("(failed)" in record.getMessage() for record in caplog.records) == 1


def test_greeted_readers_cannot_pile_up_either() -> None:
    source = make_tcp(max_connections=5)
    readers = [RawReader(source.local_info()) for _ in range(5)]
    with dial(source.local_info()) as sixth:
        assert is_hung_up(sixth)
    assert source.source.refused["crowded"] == 1
    readers.pop().close()
    soon("one has left", lambda: source.source.num_connections == 4)
    readers.append(RawReader(source.local_info()))
    for greeted in readers:
        greeted.close()
    source.close()


def test_both_sides_check_whether_the_pools_fit(source: TcpConnector, reader: TcpConnector) -> None:
    """The reader's list of members may be wrong about the source."""
    other = make_tcp("reader", 1, model="tiny@2")
    with pytest.raises(IncompatiblePeer, match="model is 'tiny@1' there, 'tiny@2' here"):
        other.connect(source.local_info())
    assert source.source.num_connections == 0, "refused before any socket was opened"
    belief = replace(source.local_info(), model="tiny@2")
    with pytest.raises(IncompatiblePeer, match="model is 'tiny@2' there, 'tiny@1' here"):
        other.connect(belief)
    assert source.source.refused["incompatible"] == 1
    other.close()


def test_workers_on_different_hosts_can_be_joined(
    source: TcpConnector, reader: TcpConnector
) -> None:
    elsewhere = replace(source.local_info(), host_id="elsewhere")
    assert reader.connect(elsewhere).is_open


REPLIES = {
    "rubbish": b"\x00" * 64,
    "too long": PREFIX.pack(MAGIC, MAX_MESSAGE_BYTES + 1),
    "unknown": frame(pack_message(VERSION, {"info": {"worker_id": 3}})),
    "refusal": encode_refusal(HandshakeRefused("crowded", "go away")),
    "half": encode_refusal(HandshakeRefused("crowded", "go away"))[:-1],
    "nothing": b"",
}


def welcomes(info: PeerInfo) -> dict[str, bytes]:
    return {
        "another life": encode_welcome(replace(info, epoch=8)),
        "another worker": encode_welcome(replace(info, worker_id="someone")),
        "another layout": encode_welcome(replace(info, layout=layout_with(block_size=8))),
    }


@pytest.mark.parametrize("kind", [*REPLIES, "another life", "another worker", "another layout"])
def test_a_rogue_source_is_refused_and_leaks_no_descriptor(
    source: TcpConnector, reader: TcpConnector, kind: str
) -> None:
    before = open_files()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SOON_S)
        info = replace(source.local_info(), address=f"127.0.0.1:{listener.getsockname()[1]}")
        said = {**REPLIES, **welcomes(info)}[kind]

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                receive_message(connection)
                connection.sendall(said)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(TransferFailed):
            reader.connect(info)
        thread.join()
    assert open_files() == before


def test_a_silent_source_does_not_hold_up_its_reader_for_long(source: TcpConnector) -> None:
    reader = make_tcp("reader", 1, connect_timeout_s=QUICK_S)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(TransferFailed, match=r"no answer within 0\.2 s"):
            reader.connect(replace(source.local_info(), address=address))
    reader.close()


def test_a_closed_source_is_gone_for_new_readers(
    source: TcpConnector, reader: TcpConnector
) -> None:
    source.close()
    with pytest.raises(TransferFailed, match="no handshake with worker"):
        reader.connect(source.local_info())


def test_a_closed_connector_reaches_nobody(source: TcpConnector, reader: TcpConnector) -> None:
    reader.close()
    with pytest.raises(TransferFailed, match="closed"):
        reader.connect(source.local_info())


def test_an_address_that_is_taken_is_a_typed_error_and_leaks_nothing(
    source: TcpConnector,
) -> None:
    port = int(source.local_info().address.rpartition(":")[2])
    before, threads = open_files(), threading.active_count()
    with pytest.raises(TransferFailed, match=f"cannot listen for readers at 127.0.0.1:{port}"):
        make_tcp(port=port)
    assert (open_files(), threading.active_count()) == (before, threads)


def test_a_source_on_all_interfaces_must_say_where_readers_find_it() -> None:
    with pytest.raises(TransferFailed, match=r"readers cannot reach 0\.0\.0\.0"):
        make_tcp(host="0.0.0.0")
    source = make_tcp(host="0.0.0.0", advertise_host="127.0.0.1")
    assert source.local_info().address.startswith("127.0.0.1:")
    assert_answers(source)
    source.close()


def test_a_host_name_is_resolved_once_by_its_owner() -> None:
    source = make_tcp(host="localhost", advertise_host="localhost")
    host, _, _ = source.local_info().address.rpartition(":")
    assert host in ("127.0.0.1", "[::1]")
    source.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3", "::1", "fe80::1"])
def test_an_address_survives_its_text(host: str) -> None:
    family, address = parse_address(format_address(host, 5051))
    assert address == (host, 5051)
    assert family == (socket.AF_INET6 if ":" in host else socket.AF_INET)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "nowhere",
        "a-name:80",
        "1.2.3.4",
        "1.2.3.4:",
        "1.2.3.4:0",
        "1.2.3.4:65536",
        "1.2.3.4:x",
        "1.2.3.4:-1",
        "1.2.3.4:²",
        ":80",
        "@abstract",
    ],
)
def test_an_address_of_another_form_is_refused(address: str) -> None:
    with pytest.raises(TransferFailed, match="a TCP address is IP:PORT"):
        parse_address(address)


def test_a_hello_survives_its_message(source: TcpConnector) -> None:
    hello = Hello(("source", 7), source.local_info())
    packet = take_message(bytearray(encode_hello(hello)))
    assert packet is not None and decode_hello(packet) == hello


@settings(max_examples=50)
@given(cut=st.integers(0, 200))
def test_a_message_is_taken_whole_and_only_once(cut: int) -> None:
    message = frame(b"x" * 100)
    received = bytearray(message + message)[:cut]
    taken = []
    while (packet := take_message(received)) is not None:
        taken.append(packet)
    assert taken == [b"x" * 100] * (cut // len(message))
    assert len(received) == cut % len(message)


def test_a_refusal_as_long_as_the_hello_that_caused_it_still_fits() -> None:
    refusal = HandshakeRefused("malformed", "ü" * MAX_MESSAGE_BYTES)
    assert len(encode_refusal(refusal)) < MAX_MESSAGE_BYTES


def test_nothing_is_sent_before_the_first_request(source: TcpConnector) -> None:
    with dial(source.local_info()) as connection:
        connection.sendall(hello_for(source.local_info()))
        assert receive(connection, len(encode_welcome(source.local_info())))
        connection.shutdown(socket.SHUT_WR)
        assert is_hung_up(connection)
