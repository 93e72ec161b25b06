"""Who does not know the cluster's key gets neither a block nor a word about the pool."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.kv_transfer.authentication import (
    NO_KEY,
    NONCE_BYTES,
    PROOF_BYTES,
    NoKey,
    ReaderSide,
    SourceSide,
    encode_knock,
)
from kvferry.kv_transfer.connector import BlockRef, Move, PeerInfo, ReadStatus, TransferFailed
from kvferry.kv_transfer.handshake import HandshakeRefused, pack_message, unpack_message
from kvferry.kv_transfer.tcp import TcpConnector
from kvferry.kv_transfer.tcp_wire import (
    VERSION,
    Hello,
    Kind,
    Request,
    encode_welcome,
    frame,
    hello_packet,
)
from tests.kv_transfer.helpers import LAYOUT, MODEL, SOON_S, collect
from tests.kv_transfer.tcp_ends import dial, hello_for, is_hung_up, receive_message, soon
from tests.kv_transfer.test_tcp_handshake import make_tcp

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
NONCE = b"n" * NONCE_BYTES
SOURCE = ("source", 7)

nonces = st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES)


@pytest.fixture
def source() -> Iterator[TcpConnector]:
    made = make_tcp(key=KEY)
    yield made
    made.close()


@pytest.fixture
def reader() -> Iterator[Callable[[bytes | NoKey], TcpConnector]]:
    made: list[TcpConnector] = []

    def make(key: bytes | NoKey) -> TcpConnector:
        made.append(make_tcp("reader", 1, key=key))
        return made[-1]

    yield make
    for each in made:
        each.close()


def hello_of(info: PeerInfo) -> bytes:
    return hello_packet(Hello((info.worker_id, info.epoch), replace(info, worker_id="reader")))


# --- the two halves -----------------------------------------------------------------------------


@given(key=st.binary(min_size=16), mine=nonces, theirs=nonces, hello=st.binary(max_size=200))
def test_both_who_know_the_key_agree(key: bytes, mine: bytes, theirs: bytes, hello: bytes) -> None:
    reader, source = ReaderSide(key, mine, SOURCE), SourceSide(key, theirs, SOURCE)
    challenge = source.challenge(VERSION, reader.knock(VERSION))
    assert source.opened(reader.signed(VERSION, challenge, hello)) == hello
    assert reader.opened(source.sealed(hello)) == hello


@given(
    change=st.sampled_from(
        ["key of the reader", "key of the source", "hello", "proof", "nonce", "welcome", "seal"]
    ),
    place=st.integers(0, 31),
    flip=st.integers(1, 255),
)
def test_one_changed_byte_is_refused(change: str, place: int, flip: int) -> None:
    def changed(data: bytes, here: bool) -> bytes:
        if not here:
            return data
        return data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :]

    reader = ReaderSide(changed(KEY, change == "key of the reader"), b"r" * NONCE_BYTES, SOURCE)
    source = SourceSide(changed(KEY, change == "key of the source"), NONCE, SOURCE)
    body = unpack_message(VERSION, source.challenge(VERSION, reader.knock(VERSION)))
    assert isinstance(body["nonce"], bytes)
    body["nonce"] = changed(body["nonce"], change == "nonce")
    with pytest.raises(HandshakeRefused) as caught:
        signed = reader.signed(VERSION, pack_message(VERSION, body), b"h" * 32)
        proof, hello = signed[:PROOF_BYTES], signed[PROOF_BYTES:]
        source.opened(changed(proof, change == "proof") + changed(hello, change == "hello"))
        sealed = source.sealed(b"w" * 32)
        seal, welcome = sealed[:PROOF_BYTES], sealed[PROOF_BYTES:]
        reader.opened(changed(seal, change == "seal") + changed(welcome, change == "welcome"))
    assert caught.value.reason == "unauthenticated"
    assert KEY.decode() not in str(caught.value)


def test_a_proof_is_good_for_one_challenge_only() -> None:
    reader = ReaderSide(KEY, NONCE, SOURCE)
    first = SourceSide(KEY, b"1" * NONCE_BYTES, SOURCE)
    signed = reader.signed(VERSION, first.challenge(VERSION, reader.knock(VERSION)), b"hello")
    assert first.opened(signed) == b"hello"
    second = SourceSide(KEY, b"2" * NONCE_BYTES, SOURCE)
    second.challenge(VERSION, reader.knock(VERSION))
    with pytest.raises(HandshakeRefused):
        second.opened(signed)


@pytest.mark.parametrize("meant", [("another", 7), ("source", 8)])
def test_a_source_answers_only_who_means_it(meant: tuple[str, int]) -> None:
    """In another's knock, and with the name changed on the way to it."""
    reader = ReaderSide(KEY, NONCE, meant)
    source = SourceSide(KEY, NONCE, SOURCE)
    with pytest.raises(HandshakeRefused) as caught:
        source.challenge(VERSION, reader.knock(VERSION))
    assert caught.value.reason == "wrong_receiver" and not source.has_challenged
    assert "source" not in str(caught.value), "a stranger is not told who is here"
    challenge = source.challenge(VERSION, encode_knock(VERSION, NONCE, SOURCE))
    with pytest.raises(HandshakeRefused) as caught:
        reader.signed(VERSION, challenge, b"hello")
    assert caught.value.reason == "unauthenticated"


def test_a_reply_to_one_hello_is_none_to_another() -> None:
    """A welcome of an earlier handshake, or the challenge's own proof, does not do."""
    sides = [
        (ReaderSide(KEY, bytes([each]) * 32, SOURCE), SourceSide(KEY, NONCE, SOURCE))
        for each in (1, 2)
    ]
    replies = []
    for reader, source in sides:
        challenge = source.challenge(VERSION, reader.knock(VERSION))
        source.opened(reader.signed(VERSION, challenge, b"hello"))
        replies.append(source.sealed(b"welcome"))
    proof = unpack_message(VERSION, challenge)["proof"]
    assert isinstance(proof, bytes)
    for reply in (replies[0], proof + NONCE, b"welcome", b""):
        with pytest.raises(HandshakeRefused):
            sides[1][0].opened(reply)
    assert sides[1][0].opened(replies[1]) == b"welcome"


def test_a_source_s_own_proof_does_not_open_it() -> None:
    """Reflection: who sends a source's words back has not shown that it knows the key."""
    source = SourceSide(KEY, NONCE, SOURCE)
    body = unpack_message(VERSION, source.challenge(VERSION, encode_knock(VERSION, NONCE, SOURCE)))
    assert isinstance(body["proof"], bytes)
    with pytest.raises(HandshakeRefused):
        source.opened(body["proof"])


# --- over TCP -----------------------------------------------------------------------------------


def test_a_pair_that_knows_the_key_joins_and_reads(
    source: TcpConnector, reader: Callable[[bytes | NoKey], TcpConnector]
) -> None:
    peer = reader(KEY).connect(source.local_info())
    assert peer.is_open and peer.info == source.local_info()
    assert source.source.answered == 1 and not source.refused()


@pytest.mark.parametrize("key", [OTHER_KEY, NO_KEY])
def test_a_reader_without_the_key_is_refused_counted_and_logged(
    key: bytes | NoKey,
    source: TcpConnector,
    reader: Callable[[bytes | NoKey], TcpConnector],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        with pytest.raises(TransferFailed, match="key"):
            reader(key).connect(source.local_info())
        soon("it is counted", lambda: source.refused() == {"unauthenticated": 1})
    assert any("(unauthenticated)" in record.getMessage() for record in caplog.records)
    assert source.source.answered == 0
    assert source.served.blocks_sent == 0


def test_a_reader_does_not_answer_a_source_that_does_not_know_the_key() -> None:
    reader, impostor = ReaderSide(KEY, NONCE, SOURCE), SourceSide(OTHER_KEY, NONCE, SOURCE)
    challenge = impostor.challenge(VERSION, reader.knock(VERSION))
    with pytest.raises(HandshakeRefused) as caught:
        reader.signed(VERSION, challenge, b"hello")
    assert caught.value.reason == "unauthenticated"


def test_a_source_without_the_key_learns_nothing_of_the_reader(
    reader: Callable[[bytes | NoKey], TcpConnector],
) -> None:
    heard: list[bytes] = []

    def pretend(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(SOON_S)
            knock = receive_message(connection)
            challenge = SourceSide(OTHER_KEY, NONCE, ("source", 1)).challenge(VERSION, knock)
            connection.sendall(frame(challenge))
            heard.append(knock)
            while said := connection.recv(4096):
                heard.append(said)

    ours = reader(KEY)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SOON_S)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        impostor = threading.Thread(target=pretend, args=(listener,))
        impostor.start()
        with pytest.raises(TransferFailed, match="key"):
            ours.connect(replace(ours.local_info(), worker_id="source", address=address))
        impostor.join()
    assert len(heard) == 1, "nothing was said after the challenge"
    assert b"reader" not in heard[0] and MODEL.encode() not in heard[0]


def _packed(body: Mapping[str, object]) -> bytes:
    try:
        return pack_message(VERSION, dict(body))
    except OverflowError:
        return b""


packets = st.one_of(
    st.binary(max_size=200),
    st.dictionaries(
        st.sampled_from(["nonce", "proof", "source", "reader", "x"]),
        st.none() | st.binary(max_size=40) | st.integers() | st.text(max_size=5),
        max_size=3,
    ).map(_packed),
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(first=packets, then=packets | st.just(b"right"), knocks=st.booleans())
def test_no_message_without_the_key_opens_the_door_or_tells_of_the_pool(
    source: TcpConnector, first: bytes, then: bytes, knocks: bool
) -> None:
    info = source.local_info()
    then = b"p" * PROOF_BYTES + hello_of(info) if then == b"right" else then
    first = encode_knock(VERSION, NONCE, SOURCE) if knocks else first
    with dial(info) as connection:
        connection.sendall(frame(first))
        said = receive_message(connection)
        if "proof" in unpack_message(VERSION, said):
            connection.sendall(frame(then))
            said += receive_message(connection)
        assert is_hung_up(connection)
    assert source.source.answered == source.source.refused["failed"] == 0
    for secret in (b"layout", b"num_blocks", MODEL.encode(), info.host_id.encode(), KEY):
        assert secret not in said


def test_a_hello_of_the_days_without_a_key_is_refused_as_unauthenticated(
    source: TcpConnector,
) -> None:
    for said in (hello_for(source.local_info()), encode_welcome(source.local_info())):
        with dial(source.local_info()) as connection:
            connection.sendall(said)
            reply = unpack_message(VERSION, receive_message(connection))
            assert is_hung_up(connection)
        assert reply["reason"] == "unauthenticated"
    assert source.refused() == {"unauthenticated": 2}


def test_blocks_asked_for_before_the_proof_are_not_sent(source: TcpConnector) -> None:
    request = Request(Kind.READ, 0, 1, source.local_info().epoch, 0, 0).pack()
    with dial(source.local_info()) as connection:
        connection.sendall(frame(encode_knock(VERSION, NONCE, SOURCE)))
        receive_message(connection)
        connection.sendall(request)
        reply = unpack_message(VERSION, receive_message(connection)[PROOF_BYTES:])
        assert reply["reason"] == "malformed"
        assert is_hung_up(connection)
    assert source.served.blocks_sent == 0


def test_a_broken_connection_is_made_again_with_the_key(
    source: TcpConnector, reader: Callable[[bytes | NoKey], TcpConnector]
) -> None:
    ours = reader(KEY)
    peer = ours.connect(source.local_info())
    assert peer._connection is not None
    peer._connection.shutdown(socket.SHUT_RDWR)
    source._memory.generations[:] = 3
    move = Move(BlockRef(source.local_info().epoch, 0, 3), 0, LAYOUT.block_size, None)
    ours.start_read(peer, [move])
    assert [result.status for result in collect(ours, 1)] == [ReadStatus.OK]
    assert source.source.answered == 2
