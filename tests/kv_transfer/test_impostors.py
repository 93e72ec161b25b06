"""Who has taken a dead worker's port, or stands between two workers, is not taken for a source."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace

import pytest

from kvferry.kv_transfer.connector import IncompatiblePeer, PeerInfo, TransferFailed
from kvferry.kv_transfer.handshake import HandshakeRefused, pack_message
from kvferry.kv_transfer.tcp import TcpConnector
from kvferry.kv_transfer.tcp_wire import VERSION, encode_refusal, encode_welcome, frame
from tests.kv_transfer.helpers import MODEL, SOON_S
from tests.kv_transfer.tcp_ends import dial, receive_message
from tests.kv_transfer.test_tcp_handshake import make_tcp

KEY = b"k" * 32

Pass = Callable[[socket.socket, socket.socket], None]


@pytest.fixture
def live() -> Iterator[TcpConnector]:
    """A source that lives, and is not the one that the reader means."""
    with closing(make_tcp("live", 2, key=KEY)) as made:
        yield made


@pytest.fixture
def reader() -> Iterator[TcpConnector]:
    with closing(make_tcp("reader", 1, key=KEY)) as made:
        yield made


def try_through(reader: TcpConnector, wanted: PeerInfo, live: PeerInfo, relay: Pass) -> Exception:
    """What the reader says of ``wanted``, whose address an impostor has who can reach ``live``."""

    def stand_between(listener: socket.socket) -> None:
        inner, _ = listener.accept()
        with inner, dial(live) as outer, suppress(OSError):
            inner.settimeout(SOON_S)
            relay(inner, outer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SOON_S)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        impostor = threading.Thread(target=stand_between, args=(listener,))
        impostor.start()
        with pytest.raises(TransferFailed) as caught:
            reader.connect(replace(wanted, address=address))
        impostor.join()
    return caught.value


def test_a_live_source_does_not_vouch_for_a_dead_one(
    live: TcpConnector, reader: TcpConnector
) -> None:
    heard: list[bytes] = []
    dead = replace(live.local_info(), worker_id="dead", epoch=1)

    def relay(inner: socket.socket, outer: socket.socket) -> None:
        outer.sendall(frame(receive_message(inner)))
        inner.sendall(frame(receive_message(outer)))
        heard.append(inner.recv(4096))
        inner.sendall(encode_welcome(replace(dead, model=MODEL)))

    refused = try_through(reader, dead, live.local_info(), relay)
    assert not isinstance(refused, IncompatiblePeer)
    assert heard == [b""], "the reader said who it is to somebody who does not know the key"
    assert live.refused() == {"wrong_receiver": 1}


@pytest.mark.parametrize("said", ["welcome", "refusal"])
def test_the_source_s_last_word_is_its_own(
    said: str, live: TcpConnector, reader: TcpConnector
) -> None:
    """A relay that passes the proofs on cannot put in what it likes after them."""
    info = live.local_info()
    forged = encode_welcome(replace(info, num_blocks=1 << 40))
    if said == "refusal":
        forged = encode_refusal(HandshakeRefused("incompatible", "go away for good"))

    def relay(inner: socket.socket, outer: socket.socket) -> None:
        outer.sendall(frame(receive_message(inner)))
        inner.sendall(frame(receive_message(outer)))
        outer.sendall(frame(receive_message(inner)))
        inner.sendall(forged)

    refused = try_through(reader, info, info, relay)
    assert not isinstance(refused, IncompatiblePeer), "which would be believed for good"
    assert "cluster's key" in str(refused)


def test_what_an_impostor_says_is_one_short_line_of_a_log(
    live: TcpConnector, reader: TcpConnector
) -> None:
    said = pack_message(VERSION, {"refused": "x\nWARNING all is well\x1b[2J" + "y" * 50_000})

    def relay(inner: socket.socket, outer: socket.socket) -> None:
        receive_message(inner)
        inner.sendall(frame(said))

    refused = str(try_through(reader, live.local_info(), live.local_info(), relay))
    assert refused.isprintable() and len(refused) < 5000


def test_a_reader_believes_a_refusal_that_the_source_has_signed(live: TcpConnector) -> None:
    with closing(make_tcp("reader", 1, key=KEY, model="tiny@2")) as other:
        belief = replace(live.local_info(), model="tiny@2")
        with pytest.raises(IncompatiblePeer, match="model is 'tiny@2' there, 'tiny@1' here"):
            other.connect(belief)
    assert live.refused() == {"incompatible": 1}
