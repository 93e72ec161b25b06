"""With a cluster key nobody without it gets a message in; every refusal is counted and logged."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from kvferry.worker import messages as m
from kvferry.worker.cluster_key import SECRET_BYTES, ClusterKey
from kvferry.worker.codec import encode
from kvferry.worker.messages import Envelope, NodeRef
from kvferry.worker.network import Network

A, B = NodeRef("a", 1), NodeRef("b", 2)
KEY, OTHER_KEY = (ClusterKey(bytes([byte]) * SECRET_BYTES) for byte in (1, 2))
LONG_S = 30.0  # a bound, never waited for when all is well


class Node:
    """A running network, and what has arrived there."""

    def __init__(self, key: ClusterKey | None) -> None:
        self.arrived: queue.SimpleQueue[Envelope] = queue.SimpleQueue()
        self.network = Network("127.0.0.1", self.arrived.put, key=key)
        self.network.start()

    def send(self, to: Node, seq: int = 1) -> None:
        body = m.AuditRequest(seq)
        self.network.send([(to.network.address, Envelope(A, B, seq, 0, body))])

    def wait_refused(self, *reasons: str) -> None:
        """Until a connection is refused for one of these reasons."""
        deadline = time.monotonic() + LONG_S
        while not any(self.network.refused[reason] for reason in reasons):
            assert time.monotonic() < deadline, f"{reasons}: {self.network.refused}"
            time.sleep(0.005)


@pytest.fixture
def node() -> Iterator[Callable[[ClusterKey | None], Node]]:
    made: list[Node] = []

    def make(key: ClusterKey | None) -> Node:
        made.append(Node(key))
        return made[-1]

    yield make
    for each in made:
        each.network.stop()


@pytest.fixture
def raw() -> Iterator[zmq.Socket[bytes]]:
    """A PUSH socket that a test dresses as it likes."""
    context = zmq.Context()
    push: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    yield push
    context.destroy(linger=0)


def assert_still_serves(node: Callable[[ClusterKey | None], Node], receiver: Node) -> None:
    """A member's message is the first that arrives."""
    node(KEY).send(receiver, seq=77)
    assert receiver.arrived.get(timeout=LONG_S).seq == 77
    assert receiver.arrived.empty()


def test_members_of_a_cluster_hear_each_other_in_order(
    node: Callable[[ClusterKey | None], Node],
) -> None:
    sender, receiver = node(KEY), node(KEY)
    for seq in range(500):
        sender.send(receiver, seq)
    assert [receiver.arrived.get(timeout=LONG_S).seq for _ in range(500)] == list(range(500))
    assert not receiver.network.refused.total()


@pytest.mark.parametrize("key", [None, OTHER_KEY])
def test_who_has_no_key_or_another_s_gets_nothing_in(
    key: ClusterKey | None,
    node: Callable[[ClusterKey | None], Node],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    receiver, stranger = node(KEY), node(key)
    stranger.send(receiver)
    receiver.wait_refused("malformed", "failed")  # whoever of the two hangs up first
    assert_still_serves(node, receiver)
    assert any("refused a connection for messages" in r.getMessage() for r in caplog.records)


def test_who_knows_the_server_s_public_key_only_is_refused_at_the_door(
    node: Callable[[ClusterKey | None], Node], raw: zmq.Socket[bytes]
) -> None:
    receiver = node(KEY)
    public, secret = zmq.curve_keypair()
    raw.curve_publickey, raw.curve_secretkey = public, secret
    raw.curve_serverkey = KEY.for_messages().public
    raw.connect(receiver.network.address)
    raw.send(encode(Envelope(A, B, 1, 0, m.AuditRequest(1))), zmq.NOBLOCK)
    receiver.wait_refused("unauthenticated")
    assert_still_serves(node, receiver)


def test_bytes_that_are_no_zeromq_are_refused(node: Callable[[ClusterKey | None], Node]) -> None:
    receiver = node(KEY)
    host, _, port = receiver.network.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=LONG_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64))
        with contextlib.suppress(ConnectionError):
            while connection.recv(4096):
                pass
    receiver.wait_refused("malformed", "failed")
    assert_still_serves(node, receiver)


def test_a_message_says_nothing_on_the_wire(node: Callable[[ClusterKey | None], Node]) -> None:
    receiver, sender = node(KEY), node(KEY)
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LONG_S)
        # A wire-tap between the two: it passes bytes on both ways.
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        body = m.AuditRequest(1)
        sender.network.send([(address, Envelope(NodeRef("secret-name", 1), B, 5, 0, body))])
        inner, _ = listener.accept()
        host, _, port = receiver.network.address.removeprefix("tcp://").rpartition(":")
        with inner, socket.create_connection((host, int(port))) as outer:
            _relay(inner, outer, heard, receiver.arrived)
    assert b"secret-name" not in heard and len(heard) > 200


def _relay(
    inner: socket.socket,
    outer: socket.socket,
    heard: bytearray,
    arrived: queue.SimpleQueue[Envelope],
) -> None:
    """Until the message has arrived."""
    for each in (inner, outer):
        each.settimeout(0.01)
    deadline = time.monotonic() + LONG_S
    while arrived.empty():
        assert time.monotonic() < deadline
        for here, there in ((inner, outer), (outer, inner)):
            try:
                said = here.recv(4096)
            except TimeoutError:
                continue
            heard += said
            there.sendall(said)


def test_a_key_is_shown_nowhere() -> None:
    for shown in (repr(KEY), repr(KEY.for_messages()), str(KEY)):
        assert KEY.secret.hex() not in shown and repr(KEY.secret) not in shown
        assert KEY.for_messages().secret.decode() not in shown


def test_keys_of_the_two_channels_are_not_each_other_s() -> None:
    assert KEY.for_blocks() != OTHER_KEY.for_blocks()
    assert KEY.for_messages() != OTHER_KEY.for_messages()
    assert KEY.for_blocks() not in (KEY.secret, KEY.for_messages().secret)
    assert ClusterKey(KEY.secret).for_messages() == KEY.for_messages(), "every node finds the same"
