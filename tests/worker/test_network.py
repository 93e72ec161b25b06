"""The network thread over real sockets: order, bad bytes, absent peers, and a quick end."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from kvferry.engine.request import RequestId
from kvferry.kv_transfer.authentication import NO_KEY
from kvferry.worker import messages as m
from kvferry.worker import network as network_module
from kvferry.worker.codec import encode
from kvferry.worker.messages import Body, Envelope, NodeRef
from kvferry.worker.network import Network, Outgoing
from tests.fakes import ATTEMPT

A, B = NodeRef("a", 1), NodeRef("b", 2)
LONG = 30.0  # a bound, never waited for when all is well


def envelope(seq: int, body: Body | None = None) -> Envelope:
    return Envelope(A, B, seq, 0, body or m.AuditRequest(seq))


class Node:
    """A network whose arriving envelopes can be waited for."""

    def __init__(self, beats: Callable[[], list[Outgoing]] | None = None, period: float = 0.5):
        self.arrived: queue.SimpleQueue[Envelope] = queue.SimpleQueue()
        self.network = Network("127.0.0.1", self.arrived.put, beats, period, key=NO_KEY)

    def take(self, count: int) -> list[Envelope]:
        """The next envelopes; fails rather than waits for ever."""
        return [self.arrived.get(timeout=LONG) for _ in range(count)]


@pytest.fixture
def nodes() -> Iterator[Callable[..., Node]]:
    """Makes running nodes, and stops them."""
    made: list[Node] = []

    def make(
        beats: Callable[[], list[Outgoing]] | None = None, period: float = 0.5, start: bool = True
    ) -> Node:
        node = Node(beats, period)
        made.append(node)
        if start:
            node.network.start()
        return node

    yield make
    for node in made:
        node.network.stop()


@pytest.fixture
def raw() -> Iterator[zmq.Socket[bytes]]:
    """A PUSH socket that sends whatever bytes a test likes."""
    context = zmq.Context()
    push: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    yield push
    context.destroy(linger=0)


def absent_address() -> str:
    """An address where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def test_messages_arrive_whole_and_in_the_order_in_which_they_were_sent(
    nodes: Callable[..., Node],
) -> None:
    sender, receiver = nodes(), nodes()
    address = receiver.network.address
    sent = [envelope(seq) for seq in range(2000)]
    for first in range(0, 2000, 100):
        sender.network.send((address, each) for each in sent[first : first + 100])
    assert receiver.take(2000) == sent
    assert not sender.network.dropped and not receiver.network.dropped


def test_each_of_several_senders_keeps_its_order(nodes: Callable[..., Node]) -> None:
    receiver = nodes()
    names = ["x", "y", "z"]

    def send(name: str) -> None:
        node = nodes()
        for seq in range(300):
            body = m.AuditRequest(seq)
            node.network.send(
                [(receiver.network.address, Envelope(NodeRef(name, 1), B, 0, 0, body))]
            )

    threads = [threading.Thread(target=send, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    arrived = receiver.take(300 * len(names))
    for thread in threads:
        thread.join(LONG)
    for name in names:
        bodies = [e.body for e in arrived if e.sender.node_id == name]
        assert bodies == [m.AuditRequest(seq) for seq in range(300)]


def test_messages_from_many_threads_of_one_node_all_arrive(nodes: Callable[..., Node]) -> None:
    sender, receiver = nodes(), nodes()

    def send(first: int) -> None:
        for seq in range(first, first + 200):
            sender.network.send([(receiver.network.address, envelope(seq))])

    threads = [threading.Thread(target=send, args=(first,)) for first in range(0, 800, 200)]
    for thread in threads:
        thread.start()
    arrived = receiver.take(800)
    for thread in threads:
        thread.join(LONG)
    assert sorted(e.seq for e in arrived) == list(range(800))


def test_bad_bytes_are_counted_and_what_comes_after_them_arrives(
    nodes: Callable[..., Node], raw: zmq.Socket[bytes]
) -> None:
    receiver = nodes()
    raw.connect(receiver.network.address)
    bad = [b"", b"\x00", b"\x01", b"GET / HTTP/1.1\r\n\r\n", encode(envelope(1))[:-1], b"\xff" * 99]
    for data in bad:
        raw.send(data)
    raw.send(encode(envelope(7)))
    assert receiver.take(1) == [envelope(7)]
    assert receiver.network.dropped == {"bad message": len(bad)}


def test_bytes_that_are_no_zeromq_do_not_disturb(nodes: Callable[..., Node]) -> None:
    sender, receiver = nodes(), nodes()
    host, _, port = receiver.network.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=LONG) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(4096))
        sender.network.send([(receiver.network.address, envelope(1))])
        assert receiver.take(1) == [envelope(1)]


def test_a_peer_that_does_not_exist_holds_nobody_up(nodes: Callable[..., Node]) -> None:
    sender, receiver = nodes(), nodes()
    absent = absent_address()
    for seq in range(500):
        sender.network.send([(absent, envelope(seq)), (receiver.network.address, envelope(seq))])
    assert [e.seq for e in receiver.take(500)] == list(range(500))


def test_a_peer_that_takes_nothing_costs_a_bounded_number_of_messages_and_no_time(
    nodes: Callable[..., Node],
) -> None:
    """More than any socket holds: the rest is dropped and counted, and others are served."""
    sender, receiver = nodes(), nodes()
    absent = absent_address()
    more_than_a_socket_holds = 25_000
    sender.network.send((absent, envelope(0)) for _ in range(more_than_a_socket_holds))
    sender.network.send([(receiver.network.address, envelope(1))])
    assert receiver.take(1) == [envelope(1)]
    assert 0 < sender.network.dropped["socket full"] < more_than_a_socket_holds


def test_a_full_outbox_drops_and_counts_and_never_blocks(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_module, "OUTBOX_LIMIT", 10)
    sender, receiver = nodes(start=False), nodes()
    sender.network.send((receiver.network.address, envelope(seq)) for seq in range(25))
    assert sender.network.dropped == {"outbox full": 15}
    sender.network.start()
    assert [e.seq for e in receiver.take(10)] == list(range(10))


@pytest.mark.parametrize("address", ["", "r", "tcp://", "tcp://127.0.0.1:x", "nonsense://x"])
def test_an_impossible_address_is_counted_and_others_are_served(
    nodes: Callable[..., Node], address: str
) -> None:
    sender, receiver = nodes(), nodes()
    sender.network.send([(address, envelope(1)), (receiver.network.address, envelope(2))])
    assert receiver.take(1) == [envelope(2)]
    assert sender.network.dropped == {"send failed": 1}


@pytest.mark.parametrize(
    "body",
    [
        m.AuditRequest(2**64),
        m.LegFailed(RequestId("\ud800"), ATTEMPT, m.Leg.DECODE, m.FailureCause.STEP, ""),
    ],
    ids=["integer", "text"],
)
def test_a_message_that_cannot_be_encoded_is_counted_and_others_are_served(
    nodes: Callable[..., Node], body: Body
) -> None:
    sender, receiver = nodes(), nodes()
    address = receiver.network.address
    sender.network.send([(address, envelope(1, body)), (address, envelope(2))])
    assert receiver.take(1) == [envelope(2)]
    assert sender.network.dropped == {"cannot be encoded": 1}


def test_heartbeats_go_out_by_themselves_between_other_messages(
    nodes: Callable[..., Node],
) -> None:
    receiver = nodes()
    beats = 0

    def beat() -> list[Outgoing]:
        nonlocal beats
        beats += 1
        return [(receiver.network.address, Envelope(A, B, 0, 0, m.AuditRequest(beats)))]

    nodes(beat, 0.01)
    assert [e.body for e in receiver.take(5)] == [m.AuditRequest(n) for n in range(1, 6)]


def test_what_was_sent_before_the_end_still_arrives(nodes: Callable[..., Node]) -> None:
    sender, receiver = nodes(), nodes()
    sender.network.send((receiver.network.address, envelope(seq)) for seq in range(200))
    sender.network.stop()
    assert [e.seq for e in receiver.take(200)] == list(range(200))


def test_what_was_sent_before_a_start_that_ends_at_once_still_arrives(
    nodes: Callable[..., Node],
) -> None:
    sender, receiver = nodes(start=False), nodes()
    sender.network.send([(receiver.network.address, envelope(1))])
    sender.network.start()
    sender.network.stop()
    assert receiver.take(1) == [envelope(1)]


def test_the_end_is_quick_even_with_messages_for_nobody_and_may_come_twice(
    nodes: Callable[..., Node],
) -> None:
    sender = nodes()
    absent = absent_address()
    sender.network.send((absent, envelope(seq)) for seq in range(1000))
    began = time.monotonic()
    sender.network.stop()
    sender.network.stop()
    # lingering is 0.2 s; without a limit ZeroMQ would wait for ever
    assert time.monotonic() - began < 10.0


def test_a_network_that_never_started_can_be_stopped() -> None:
    node = Node()
    node.network.stop()
    assert not node.network.dropped


def test_what_is_sent_after_the_end_is_counted_and_touches_nothing() -> None:
    """The wake-up descriptor is closed by then; its number may be somebody else's."""
    node = Node()
    node.network.start()
    node.network.stop()
    left, right = socket.socketpair()
    with left, right:
        node.network.send([(absent_address(), envelope(1))])
        right.setblocking(False)
        with pytest.raises(BlockingIOError):
            right.recv(1)
    assert node.network.dropped == {"stopped": 1}


def test_two_networks_never_share_an_address(nodes: Callable[..., Node]) -> None:
    assert len({nodes(start=False).network.address for _ in range(5)}) == 5
