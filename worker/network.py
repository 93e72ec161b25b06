"""The network thread: the one place that touches ZeroMQ.

Owns a PULL socket that every other node pushes to, and one PUSH socket per address it sends to.
Sending never blocks the caller: messages go through a bounded outbox, and what a full socket does
not take is dropped and counted (the lists heal it). With a cluster key both are encrypted and
authenticated (``worker.curve``). Knows envelopes only as bytes with a destination; does not know
what any message means.

A long message travels in frames, because ZeroMQ's bound on a frame holds for strangers too: it
takes memory for what a peer announces before it knows who that is.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

import zmq

from kvferry.kv_transfer.authentication import NoKey
from kvferry.worker.cluster_key import ClusterKey
from kvferry.worker.codec import BadMessage, decode, encode
from kvferry.worker.curve import HANDSHAKE_S, DoorKeeper, dress
from kvferry.worker.messages import Envelope

logger = logging.getLogger(__name__)

Outgoing = tuple[str, Envelope]  # address, message

OUTBOX_LIMIT = 100_000
IDLE_SOCKET_S = 60.0
FRAME_BYTES = 64 * 1024
ENCRYPTION_BYTES = 64  # at least what CURVE adds to a frame


class Network:
    """See the module.

    Args:
        bind_host: interface to listen on.
        on_envelope: called on the network thread for every message that decodes.
        beats: asked every ``beat_period`` seconds for heartbeats to send.
        key: what every peer must know.
    """

    def __init__(
        self,
        bind_host: str,
        on_envelope: Callable[[Envelope], None],
        beats: Callable[[], Iterable[Outgoing]] | None = None,
        beat_period: float = 0.5,
        *,
        key: ClusterKey | NoKey,
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self._on_envelope = on_envelope
        self._beats = beats
        self._beat_period = beat_period
        self._outbox: deque[Outgoing] = deque()
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._pull.setsockopt(zmq.LINGER, 0)
        _bound(self._pull)
        self._keys = None if isinstance(key, NoKey) else key.for_messages()
        self._keeper: DoorKeeper | None = None
        if self._keys is not None:
            self._keeper = DoorKeeper(self._context, self._pull, self._keys)
        port = self._pull.bind_to_random_port(f"tcp://{bind_host}")
        self.address = f"tcp://{bind_host}:{port}"
        self._push: dict[str, tuple[zmq.Socket[bytes], float]] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._ending = threading.Lock()  # nobody writes to ``_wake`` once it may be closed
        self._thread = threading.Thread(target=self._run, name="kvferry-network", daemon=True)

    @property
    def refused(self) -> Counter[str]:
        """Connections that were refused since the start, by reason."""
        return Counter() if self._keeper is None else self._keeper.refused.copy()

    def start(self) -> None:
        """Begin to receive and send."""
        self._thread.start()

    def send(self, messages: Iterable[Outgoing]) -> None:
        """Queue messages, in order; any thread; never blocks. After ``stop`` they are dropped."""
        fresh = list(messages)
        with self._ending:
            if self._stopping:
                self.dropped["stopped"] += len(fresh)
                return
            room = max(0, OUTBOX_LIMIT - len(self._outbox))
            self._outbox.extend(fresh[:room])
            if len(fresh) > room:
                self.dropped["outbox full"] += len(fresh) - room
            os.eventfd_write(self._wake, 1)

    def stop(self, timeout: float = 2.0) -> None:
        """Send what is queued, then close every socket."""
        with self._ending:
            if self._stopping:
                return
            self._stopping = True
        if self._thread.ident is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join(timeout)
        if self._keeper is not None:
            self._keeper.close()
        self._context.destroy(linger=200)
        if not self._thread.is_alive():
            os.close(self._wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._pull, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        guards = () if self._keeper is None else self._keeper.sockets
        for guard in guards:
            poller.register(guard, zmq.POLLIN)
        next_beat = 0.0
        while not self._stopping:
            now = time.monotonic()
            wait = max(0.0, next_beat - now) if self._beats else 1.0
            ready = dict(poller.poll(int(wait * 1000) + 1))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            for guard in guards:
                if guard in ready and self._keeper is not None:
                    self._keeper.attend(guard)
            if self._pull in ready:
                self._receive_all()
            if self._beats is not None and time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._beat_period
                self._outbox.extend(self._beats())
                self._close_idle()
            self._send_all()
        self._send_all()

    def _receive_all(self) -> None:
        for _ in range(256):
            try:
                data = b"".join(self._pull.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            try:
                self._on_envelope(decode(data))
            except BadMessage as error:
                self.dropped["bad message"] += 1
                logger.warning("refused a message: %s", error)

    def _send_all(self) -> None:
        while self._outbox:
            address, envelope = self._outbox.popleft()
            try:
                data = encode(envelope)
            except (TypeError, ValueError, OverflowError) as error:
                self.dropped["cannot be encoded"] += 1
                logger.error("cannot encode a message to %s: %s", address, error)
                continue
            try:
                self._socket(address).send_multipart(_frames_of(data), zmq.NOBLOCK)
            except zmq.Again:
                self.dropped["socket full"] += 1
            except zmq.ZMQError as error:
                self.dropped["send failed"] += 1
                logger.warning("cannot send to %s: %s", address, error)

    def _socket(self, address: str) -> zmq.Socket[bytes]:
        found = self._push.get(address)
        if found is None:
            socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 200)
            socket.setsockopt(zmq.SNDHWM, 10_000)
            _bound(socket)
            if self._keys is not None:
                dress(socket, self._keys)
            try:
                socket.connect(address)
            except zmq.ZMQError:
                socket.close()
                raise
        else:
            socket = found[0]
        self._push[address] = (socket, time.monotonic())
        return socket

    def _close_idle(self) -> None:
        """Sockets to addresses that nobody has sent to for a while (their nodes are gone)."""
        now = time.monotonic()
        for address, (socket, used_at) in list(self._push.items()):
            if now - used_at > IDLE_SOCKET_S:
                socket.close()
                del self._push[address]


def _bound(socket: zmq.Socket[bytes]) -> None:
    """What a stranger can make ZeroMQ hold, and for how long; at either end of a connection, for
    a dead node's port may be anybody's.
    """
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES + ENCRYPTION_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))


def _frames_of(data: bytes) -> list[bytes]:
    """A message, which is never empty, in frames that the other end takes."""
    if len(data) <= FRAME_BYTES:
        return [data]
    return [data[at : at + FRAME_BYTES] for at in range(0, len(data), FRAME_BYTES)]
