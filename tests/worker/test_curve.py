"""With a cluster key nobody without it gets a message in; every refusal is counted and logged."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kv_transfer.authentication import NO_KEY, NoKey
from kvferry.worker import messages as m
from kvferry.worker.cluster_key import SECRET_BYTES, ClusterKey
from kvferry.worker.codec import encode
from kvferry.worker.curve import HANDSHAKE_S, UNKNOWN, Callers, DoorKeeper, _peer_of, dress
from kvferry.worker.messages import Envelope, NodeRef
from kvferry.worker.network import FRAME_BYTES, Network
from tests.worker.strangers import begun_command, call, greeting, read_to_end

A, B = NodeRef("a", 1), NodeRef("b", 2)
KEY, OTHER_KEY = (ClusterKey(bytes([byte]) * SECRET_BYTES) for byte in (1, 2))
LONG_S = 30.0  # a bound, never waited for when all is well


class Node:
    """A running network, and what has arrived there."""

    def __init__(self, key: ClusterKey | NoKey) -> None:
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
def node() -> Iterator[Callable[[ClusterKey | NoKey], Node]]:
    made: list[Node] = []

    def make(key: ClusterKey | NoKey) -> Node:
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


def assert_still_serves(node: Callable[[ClusterKey | NoKey], Node], receiver: Node) -> None:
    """A member's message is the first that arrives."""
    node(KEY).send(receiver, seq=77)
    assert receiver.arrived.get(timeout=LONG_S).seq == 77
    assert receiver.arrived.empty()


def test_members_of_a_cluster_hear_each_other_in_order(
    node: Callable[[ClusterKey | NoKey], Node],
) -> None:
    sender, receiver = node(KEY), node(KEY)
    for seq in range(500):
        sender.send(receiver, seq)
    assert [receiver.arrived.get(timeout=LONG_S).seq for _ in range(500)] == list(range(500))
    assert not receiver.network.refused.total()


@pytest.mark.parametrize("key", [NO_KEY, OTHER_KEY])
def test_who_has_no_key_or_another_s_gets_nothing_in(
    key: ClusterKey | NoKey,
    node: Callable[[ClusterKey | NoKey], Node],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    receiver, stranger = node(KEY), node(key)
    stranger.send(receiver)
    receiver.wait_refused("malformed", "failed")  # whoever of the two hangs up first
    assert_still_serves(node, receiver)
    assert any("refused a connection for messages" in r.getMessage() for r in caplog.records)


def test_who_knows_the_server_s_public_key_only_is_refused_at_the_door(
    node: Callable[[ClusterKey | NoKey], Node], raw: zmq.Socket[bytes]
) -> None:
    receiver = node(KEY)
    public, secret = zmq.curve_keypair()
    raw.curve_publickey, raw.curve_secretkey = public, secret
    raw.curve_serverkey = KEY.for_messages().public
    raw.connect(receiver.network.address)
    with contextlib.suppress(zmq.Again):  # it has been refused already
        raw.send(encode(Envelope(A, B, 1, 0, m.AuditRequest(1))), zmq.NOBLOCK)
    receiver.wait_refused("unauthenticated")
    assert_still_serves(node, receiver)


def test_bytes_that_are_no_zeromq_are_refused(node: Callable[[ClusterKey | NoKey], Node]) -> None:
    receiver = node(KEY)
    with call(receiver.network.address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64))
        read_to_end(connection)
    receiver.wait_refused("malformed", "failed")
    assert_still_serves(node, receiver)


# --- what a stranger can make a node hold -------------------------------------------------------


def test_a_frame_that_is_announced_too_long_ends_the_connection_at_once(
    node: Callable[[ClusterKey | NoKey], Node],
) -> None:
    receiver = node(KEY)
    with call(receiver.network.address) as caller, pytest.raises(ConnectionError):
        caller.sendall(greeting() + begun_command(60 << 20))
        for _ in range(50):  # as many MiB are far more than the kernel's buffers hold
            caller.sendall(bytes(1 << 20))
    receiver.wait_refused("malformed", "failed")
    assert_still_serves(node, receiver)


def test_a_handshake_that_stands_still_is_ended_and_counted_once(
    node: Callable[[ClusterKey | NoKey], Node], caplog: pytest.LogCaptureFixture
) -> None:
    receiver = node(KEY)
    with call(receiver.network.address) as caller:
        name = "{}:{}".format(*caller.getsockname())
        caller.sendall(greeting() + begun_command(FRAME_BYTES))
        read_to_end(caller)  # ZeroMQ's own patience is longer than this socket's
    receiver.wait_refused("failed")
    assert_still_serves(node, receiver)
    assert receiver.network.refused == {"failed": 1, "malformed": 0, "unauthenticated": 0}
    assert any(f"from {name} (failed)" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("key", [NO_KEY, KEY])
def test_who_took_a_dead_node_s_port_cannot_make_a_sender_hold_a_long_frame(
    key: ClusterKey | NoKey, node: Callable[[ClusterKey | NoKey], Node]
) -> None:
    sender = node(key)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LONG_S)
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        sender.network.send([(address, Envelope(A, B, 1, 0, m.AuditRequest(1)))])
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(LONG_S)
            connection.sendall(greeting(b"NULL" if key is NO_KEY else b"CURVE", key is not NO_KEY))
            connection.sendall(begun_command(60 << 20, b"READY"))
            with pytest.raises(ConnectionError):
                for _ in range(50):
                    connection.sendall(bytes(1 << 20))


@pytest.mark.parametrize("key", [NO_KEY, KEY])
def test_a_message_longer_than_a_frame_arrives_whole(
    key: ClusterKey | NoKey, node: Callable[[ClusterKey | NoKey], Node]
) -> None:
    sender, receiver = node(key), node(key)
    values = tuple(index.to_bytes(32, "big") for index in range(100_000))
    bodies: list[m.Body] = [m.AuditRequest(1), m.KVSnapshot(3, values), m.AuditRequest(2)]
    for seq, body in enumerate(bodies):
        sender.network.send([(receiver.network.address, Envelope(A, B, seq, 0, body))])
    arrived = [receiver.arrived.get(timeout=LONG_S) for _ in range(3)]
    assert [envelope.seq for envelope in arrived] == [0, 1, 2]
    assert arrived[1].body == m.KVSnapshot(3, values)
    assert not receiver.network.dropped and not sender.network.dropped


# --- whose connection it was --------------------------------------------------------------------


def test_a_member_that_leaves_while_a_stranger_shakes_hands_is_not_refused(
    node: Callable[[ClusterKey | NoKey], Node],
) -> None:
    receiver, member = node(KEY), node(KEY)
    member.send(receiver, seq=1)
    assert receiver.arrived.get(timeout=LONG_S).seq == 1
    with call(receiver.network.address) as slow:
        slow.sendall(greeting()[:10])
        slow.recv(1)
        member.network.stop()
        assert_still_serves(node, receiver)
        read_to_end(slow)
    receiver.wait_refused("failed")
    for count in (1, 2):
        with call(receiver.network.address) as junk:
            junk.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64))
            read_to_end(junk)
        deadline = time.monotonic() + LONG_S
        while receiver.network.refused.total() < 1 + count:
            assert time.monotonic() < deadline, receiver.network.refused
            time.sleep(0.005)
    assert receiver.network.refused.total() == 3


def test_a_failed_handshake_is_counted_with_its_own_address() -> None:
    callers = Callers()
    callers.came(7, "stranger", 0.0)
    callers.came(8, "member", 0.1)
    callers.decided()
    assert callers.left(8, 0.2) is None, "the youngest was let in"
    callers.failed("failed")
    assert callers.left(7, 2.0) == ("failed", "stranger")
    callers.came(7, "junk", 3.0)
    assert callers.left(7, 3.1) == ("malformed", "junk")
    assert callers.left(7, 3.2) is None, "nobody has it"
    callers.failed("malformed")
    assert callers.left(99, 3.3) == ("malformed", UNKNOWN)
    assert callers.num_open == 0


def test_a_wrong_guess_refuses_no_member() -> None:
    """The stranger came after the member, whose handshake was completed first."""
    callers = Callers()
    callers.came(7, "member", 0.0)
    callers.came(8, "stranger", 0.001)
    callers.decided()
    callers.failed("failed")
    assert callers.left(8, 2.0) == ("failed", "stranger")
    assert callers.left(7, 60.0) is None


@given(st.lists(st.sampled_from(["member", "junk", "slow", "told"]), max_size=30))
def test_each_of_many_in_a_row_is_counted_once(kinds: list[str]) -> None:
    callers, now = Callers(), 0.0
    refused, open_members = 0, []
    for descriptor, kind in enumerate(kinds):
        now += 1.0
        callers.came(descriptor, kind, now)
        if kind in ("member", "told"):
            callers.decided()
        if kind == "slow":
            now += HANDSHAKE_S
            callers.failed("failed")
        if kind == "member":
            open_members.append(descriptor)
        else:
            found = callers.left(descriptor, now)
            assert (found is None) == (kind == "told")
            refused += found is not None
    assert all(callers.left(descriptor, now) is None for descriptor in open_members)
    assert refused == sum(kind in ("junk", "slow") for kind in kinds)
    assert callers.num_open == 0


# --- who answers at the door --------------------------------------------------------------------


def test_where_nobody_answers_at_the_door_not_even_a_member_gets_in(
    raw: zmq.Socket[bytes],
) -> None:
    context = zmq.Context()
    listener: zmq.Socket[bytes] = context.socket(zmq.PULL)
    keeper = DoorKeeper(context, listener, KEY.for_messages())
    door, monitor = keeper.sockets
    door.close()
    listener.setsockopt(zmq.HANDSHAKE_IVL, 200)  # meant to be exceeded
    port = listener.bind_to_random_port("tcp://127.0.0.1")
    dress(raw, KEY.for_messages())
    raw.connect(f"tcp://127.0.0.1:{port}")
    raw.send(encode(Envelope(A, B, 1, 0, m.AuditRequest(1))), zmq.NOBLOCK)
    while not keeper.refused.total():
        assert monitor.poll(int(LONG_S * 1000)), "no word of the connection"
        keeper.attend(monitor)
        assert not listener.poll(0), "a message came in past an empty door"
    keeper.close()
    assert listener.closed and monitor.closed
    context.destroy(linger=0)


def test_a_message_says_nothing_on_the_wire(node: Callable[[ClusterKey | NoKey], Node]) -> None:
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


def test_a_descriptor_that_has_become_something_else_is_nobody_and_is_not_kept() -> None:
    other = os.eventfd(0)
    try:
        before = len(os.listdir("/proc/self/fd"))
        assert _peer_of(other) == UNKNOWN
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        os.close(other)
    assert _peer_of(1 << 20) == UNKNOWN
