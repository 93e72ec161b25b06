"""The source's side of TCP: one thread that answers handshakes and serves all readers.

Owns the listener and the connections; ``tcp_sender`` decides what each of them sends. Whatever
knocks, the door stays open for the next: a handshake that is malformed, oversized, slow, meant for
another life or from an incompatible pool is refused, counted, and leaves no state. With a cluster
key, who does not show that it knows it is refused before it is told or asked anything. Readers
that are not greeted yet have so many places for each host, and so many in all: one host alone
cannot take all of them.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from kvferry.kv_cache.line_limit import LineLimit
from kvferry.kv_transfer.authentication import NONCE_BYTES, NoKey, SourceSide
from kvferry.kv_transfer.compatibility import check_compatible
from kvferry.kv_transfer.connector import IncompatiblePeer, PeerInfo, TransferFailed
from kvferry.kv_transfer.handshake import HandshakeRefused
from kvferry.kv_transfer.tcp_sender import BlockSender, ServedPool
from kvferry.kv_transfer.tcp_wire import (
    VERSION,
    BrokenStream,
    decode_hello,
    format_address,
    frame,
    refusal_packet,
    take_message,
    tune,
    welcome_packet,
)

logger = logging.getLogger(__name__)

LISTEN_BACKLOG = 128
ACCEPT_RETRY_S = 0.05  # pause after a failed accept, which out of descriptors would repeat at once
RECEIVE_BYTES = 64 * 1024
SEND_QUANTUM_BYTES = 1 << 20  # then the next reader has its turn


@dataclass(frozen=True, slots=True)
class SourceLimits:
    """Bounds of a source.

    Attributes:
        handshake_timeout_s: how long a reader has for its hello, however it spreads it.
        silence_timeout_s: after which a reader whose host does not answer is given up.
        max_pending: readers that have connected and not yet been greeted.
        max_pending_per_host: those of one host; of IPv6, of one network of 64 bits.
        max_connections: all connections.
        socket_buffer_bytes: fixed kernel buffers; None lets them size themselves.
    """

    handshake_timeout_s: float = 2.0
    silence_timeout_s: float = 20.0
    max_pending: int = 256
    max_pending_per_host: int = 32
    max_connections: int = 256
    socket_buffer_bytes: int | None = None


@dataclass(slots=True, eq=False)
class _Reader:
    """A connection. ``deadline`` ends its handshake; None once it is greeted. ``proving``: its
    proofs, where there is a key.
    """

    connection: socket.socket
    name: str
    host: str
    sender: BlockSender
    deadline: float | None
    proving: SourceSide | None
    interest: int = selectors.EVENT_READ
    received: bytearray = field(default_factory=bytearray)


class TcpSource:
    """Serves ``pool`` from a daemon thread until ``close``. The pool's memory stays the caller's.

    Attributes:
        info: the description that readers get: the one given, with the address chosen here.
        answered: handshakes that ended with a greeting.
        refused: refused handshakes and broken connections by reason.
        num_connections: open connections.
    """

    def __init__(
        self,
        info: PeerInfo,
        pool: ServedPool,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise_host: str | None = None,
        limits: SourceLimits,
        key: bytes | NoKey,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.answered = 0
        self.refused: Counter[str] = Counter()
        self._lines = LineLimit(clock)
        self._pool = pool
        self._limits = limits
        self._key = key
        self._clock = clock
        self._readers: list[_Reader] = []
        self._accept_again_at: float | None = None
        reachable = _reachable(host if advertise_host is None else advertise_host)
        self._listener = _listen(host, port)
        self.info = replace(
            info, address=format_address(reachable, self._listener.getsockname()[1])
        )
        self._stopping = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="kvferry-tcp-source", daemon=True)
        self._thread.start()

    @property
    def num_connections(self) -> int:
        """Open connections, greeted or not."""
        return len(self._readers)

    def close(self) -> None:
        """Hang up on everybody and end the thread; idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        for reader in list(self._readers):
            self._drop(reader)
        self._selector.close()
        self._listener.close()
        os.close(self._wake_fd)

    def _serve(self) -> None:
        while not self._stopping.is_set():
            for key, events in self._selector.select(self._wait_s()):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Reader):
                    self._handle(key.data, events)
            self._refuse_slow()
            self._resume_accepting()

    def _wait_s(self) -> float | None:
        """Seconds until the next deadline, if there is one."""
        due = [reader.deadline for reader in self._readers if reader.deadline is not None]
        if self._accept_again_at is not None:
            due.append(self._accept_again_at)
        return max(0.0, min(due) - self._clock()) if due else None

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._note("an unknown address", "accept_failed", str(error))
            self._selector.unregister(self._listener)
            self._accept_again_at = self._clock() + ACCEPT_RETRY_S
            return
        name = format_address(*address[:2])
        try:
            self._admit(connection, name, host_of(address[0]))
        except HandshakeRefused as refusal:
            self._note(name, refusal.reason, str(refusal))
            connection.close()
        except OSError as error:
            self._note(name, "failed", str(error))
            connection.close()

    def _admit(self, connection: socket.socket, name: str, host: str) -> None:
        """Wait for a reader's hello, if there is room."""
        pending = [reader.host for reader in self._readers if reader.deadline is not None]
        limits = self._limits
        if len(pending) >= limits.max_pending or len(self._readers) >= limits.max_connections:
            raise HandshakeRefused("crowded", "too many connections are open: try again")
        if pending.count(host) >= limits.max_pending_per_host:
            raise HandshakeRefused("crowded", f"{host} has not completed its others: try again")
        tune(connection, limits.silence_timeout_s, limits.socket_buffer_bytes)
        deadline = self._clock() + limits.handshake_timeout_s
        proving = None
        if not isinstance(self._key, NoKey):
            ourselves = (self.info.worker_id, self.info.epoch)
            proving = SourceSide(self._key, os.urandom(NONCE_BYTES), ourselves)
        reader = _Reader(connection, name, host, BlockSender(self._pool), deadline, proving)
        self._selector.register(connection, reader.interest, reader)
        self._readers.append(reader)

    def _handle(self, reader: _Reader, events: int) -> None:
        """Take what has come and send what can go; a reader that breaks the rules is dropped."""
        with self._dropping_on_error(reader):
            if events & selectors.EVENT_READ:
                self._receive(reader)
            if reader.deadline is None:
                reader.sender.send(reader.connection, SEND_QUANTUM_BYTES)
            self._update_interest(reader)

    @contextmanager
    def _dropping_on_error(self, reader: _Reader) -> Iterator[None]:
        try:
            yield
        except HandshakeRefused as refusal:
            self._note(reader.name, refusal.reason, str(refusal))
            self._say_refused(reader, refusal)
            self._drop(reader)
        except BrokenStream as error:
            self._note(reader.name, "malformed", str(error))
            self._drop(reader)
        except OSError as error:  # it has hung up or is gone
            if reader.deadline is not None:
                self._note(reader.name, _reason_of_early_end(reader), str(error))
            self._drop(reader)
        except Exception as error:  # the boundary of the loop: one reader must not end the others
            self._note(reader.name, "failed", repr(error))
            self._drop(reader)

    def _receive(self, reader: _Reader) -> None:
        try:
            data = reader.connection.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not data and reader.deadline is not None:
            raise HandshakeRefused(
                _reason_of_early_end(reader), "the reader hung up before its hello was complete"
            )
        if not data:
            raise ConnectionResetError("the reader hung up")
        reader.received += data
        if reader.deadline is not None:
            self._greet(reader)
        if reader.deadline is None:
            reader.sender.feed(reader.received)

    def _greet(self, reader: _Reader) -> None:
        """Answer the next message of the handshake once all of it is there."""
        packet = take_message(reader.received)
        if packet is None:
            return
        if reader.proving is not None:
            if not reader.proving.has_challenged:
                _say(reader, reader.proving.challenge(VERSION, packet))
                return
            packet = reader.proving.opened(packet)
        hello = decode_hello(packet)
        ourselves = (self.info.worker_id, self.info.epoch)
        if hello.source != ourselves:
            raise HandshakeRefused(
                "wrong_receiver", f"this is worker {ourselves}, not {hello.source}: ask membership"
            )
        try:
            check_compatible(self.info, hello.reader, same_host=False)
        except IncompatiblePeer as error:
            raise HandshakeRefused("incompatible", str(error)) from error
        reader.sender.say(_sealed(reader, welcome_packet(self.info)))
        reader.deadline = None
        self.answered += 1

    def _update_interest(self, reader: _Reader) -> None:
        """Read while there is room for requests, write while there is something to send."""
        interest = 0 if reader.sender.is_full else selectors.EVENT_READ
        if reader.sender.has_output:
            interest |= selectors.EVENT_WRITE
        if interest != reader.interest:
            self._selector.modify(reader.connection, interest, reader)
            reader.interest = interest

    def _say_refused(self, reader: _Reader, refusal: HandshakeRefused) -> None:
        try:
            reader.connection.send(_sealed(reader, refusal_packet(refusal)))
        except OSError:
            return  # it has hung up already

    def _refuse_slow(self) -> None:
        now = self._clock()
        for reader in list(self._readers):
            if reader.deadline is not None and reader.deadline <= now:
                self._note(reader.name, "slow", "its handshake has taken too long")
                self._drop(reader)

    def _note(self, name: str, reason: str, why: str) -> None:
        """Count and log a refusal; the only place where this port does either."""
        text = f"refused a reader at {name} ({reason}): {why}"
        if (line := self._lines.line(reason, text)) is not None:
            logger.warning("%s", line)
        self.refused[reason] += 1

    def _resume_accepting(self) -> None:
        if self._accept_again_at is not None and self._accept_again_at <= self._clock():
            self._accept_again_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _drop(self, reader: _Reader) -> None:
        self._readers.remove(reader)
        self._selector.unregister(reader.connection)
        reader.connection.close()


def _say(reader: _Reader, packet: bytes) -> None:
    """A message of a handshake, which a fresh connection takes whole."""
    said = frame(packet)
    if reader.connection.send(said) != len(said):
        raise BrokenStream("the reader does not take the challenge")


def _sealed(reader: _Reader, reply: bytes) -> bytes:
    """A reply as it travels to this reader."""
    return frame(reply if reader.proving is None else reader.proving.sealed(reply))


def _reason_of_early_end(reader: _Reader) -> str:
    """Who was asked for a proof and leaves has none."""
    challenged = reader.proving is not None and reader.proving.has_challenged
    return "unauthenticated" if challenged else "malformed"


def host_of(address: str) -> str:
    """Whose places a connection from this numeric address takes.

    One host may have as many addresses of an IPv6 network as it likes.
    """
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is None:
            return str(ipaddress.ip_network((parsed, 64), strict=False))
        return str(parsed.ipv4_mapped)
    return str(parsed)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
        listener.setblocking(False)
        return listener
    except OSError as error:
        listener.close()
        raise TransferFailed(
            f"cannot listen for readers at {format_address(host, port)} ({error}): "
            "choose another address, or port 0 for a free one"
        ) from error


def _reachable(host: str) -> str:
    """``host`` as a numeric address that readers can use. Raises TransferFailed."""
    try:
        address = ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0])
    except OSError as error:
        raise TransferFailed(f"cannot resolve the own host name {host!r} ({error})") from error
    if address.is_unspecified:
        raise TransferFailed(
            f"readers cannot reach {host}: give the address of this host that they should use"
        )
    return str(address)
