"""How a reader gets a source's pool on one host: one message each way over a Unix socket.

The socket has a random name in the abstract namespace, so nothing is left behind by ``kill -9``::

    reader -> source   version byte, msgpack {reader: [id, epoch], source: [id, epoch]}
    source -> reader   version byte, msgpack {info: PeerInfo} and two read-only descriptors,
                       or            msgpack {refused: why}

Packets keep their bounds (SOCK_SEQPACKET), so a message is read whole or not at all. Only processes
of our own user are answered. A handshake that is malformed, oversized, slow or foreign is refused,
counted, and leaves no state. Knows nothing of blocks.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvferry.kv_cache.line_limit import LineLimit
from kvferry.kv_transfer.connector import PeerInfo, TransferFailed
from kvferry.kv_transfer.handshake import (
    HandshakeRefused,
    decode_worker,
    pack_message,
    refusal_in,
    unpack_message,
)
from kvferry.kv_transfer.peer_codec import decode_peer_info, encode_peer_info

logger = logging.getLogger(__name__)

VERSION = 1
MAX_MESSAGE_BYTES = 64 * 1024
MAX_PENDING = 32  # readers that have connected and not yet spoken
LISTEN_BACKLOG = 128
ACCEPT_RETRY_S = 0.05  # pause after a failed accept, which out of descriptors would repeat at once

PeerUid = Callable[[socket.socket], int]


@dataclass(frozen=True, slots=True)
class Hello:
    """What a reader says: who it is and whom it means, each as (worker id, epoch)."""

    reader: tuple[str, int]
    source: tuple[str, int]


def peer_uid(connection: socket.socket) -> int:
    """User id of the process at the other end of a Unix socket, as the kernel knows it."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    _pid, uid, _gid = struct.unpack("3i", credentials)
    return int(uid)


def encode_hello(hello: Hello) -> bytes:
    """``hello`` as one packet."""
    return pack_message(VERSION, {"reader": list(hello.reader), "source": list(hello.source)})


def decode_hello(packet: bytes) -> Hello:
    """The inverse of ``encode_hello``. Raises HandshakeRefused."""
    body = unpack_message(VERSION, packet)
    if set(body) != {"reader", "source"}:
        raise HandshakeRefused("malformed", f"a hello has reader and source, got {sorted(body)}")
    return Hello(decode_worker(body["reader"]), decode_worker(body["source"]))


class HandshakeServer:
    """Answers handshakes from a daemon thread of its own until ``close``.

    ``fds`` (blocks, generation words) stay the caller's. A reader is given ``timeout_s`` to speak.

    Attributes:
        info: the description that readers get: the one given, with the address chosen here; ``@``
            stands for the zero byte of the abstract namespace.
        answered: handshakes that ended with a mapped pool's descriptors sent.
        refused: refusals by reason.
    """

    def __init__(
        self,
        info: PeerInfo,
        fds: tuple[int, int],
        *,
        timeout_s: float = 2.0,
        uid_of: PeerUid = peer_uid,
    ) -> None:
        self.info = replace(info, address=f"@kvferry-{secrets.token_hex(16)}")
        self.answered = 0
        self.refused: Counter[str] = Counter()
        self._lines = LineLimit(time.monotonic)
        self._fds = fds
        self._timeout_s = timeout_s
        self._uid_of = uid_of
        self._deadlines: dict[socket.socket, float] = {}
        self._stopping = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._listener = _unix_socket()
        self._listener.setblocking(False)
        self._listener.bind(_abstract(self.info.address))
        self._listener.listen(LISTEN_BACKLOG)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="kvferry-handshake", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and release the name; idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        for connection in list(self._deadlines):
            self._drop(connection)
        self._selector.close()
        self._listener.close()
        os.close(self._wake_fd)

    def _serve(self) -> None:
        while not self._stopping.is_set():
            for key, _ in self._selector.select(self._wait_s()):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._handle(key.fileobj)
            self._refuse_slow()

    def _wait_s(self) -> float | None:
        if not self._deadlines:
            return None
        return max(0.0, min(self._deadlines.values()) - time.monotonic())

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._note("accept_failed", error)
            self._stopping.wait(ACCEPT_RETRY_S)
            return
        try:
            connection.setblocking(False)
            self._admit(connection)
        except HandshakeRefused as refusal:
            self._note(refusal.reason, refusal)
            connection.close()
        except OSError as error:
            self._note("failed", error)
            connection.close()

    def _admit(self, connection: socket.socket) -> None:
        """Wait for the hello of a process of our own user, if there is room."""
        _check_uid(self._uid_of(connection))
        if len(self._deadlines) >= MAX_PENDING:
            raise HandshakeRefused("crowded", f"{MAX_PENDING} handshakes are under way: try again")
        self._deadlines[connection] = time.monotonic() + self._timeout_s
        self._selector.register(connection, selectors.EVENT_READ)

    def _handle(self, connection: socket.socket) -> None:
        """One packet has come: answer it and hang up, whatever it was."""
        try:
            self._answer(connection)
        except HandshakeRefused as refusal:
            self._note(refusal.reason, refusal)
            self._say_refused(connection, refusal)
        except Exception as error:  # the boundary of the loop: one must not end the others
            self._note("failed", repr(error))
        finally:
            self._drop(connection)

    def _answer(self, connection: socket.socket) -> None:
        hello = decode_hello(_receive(connection))
        ourselves = (self.info.worker_id, self.info.epoch)
        if hello.source != ourselves:
            raise HandshakeRefused(
                "wrong_receiver", f"this is worker {ourselves}, not {hello.source}: ask membership"
            )
        packet = pack_message(VERSION, {"info": encode_peer_info(self.info)})
        socket.send_fds(connection, [packet], list(self._fds))
        self.answered += 1

    def _say_refused(self, connection: socket.socket, refusal: HandshakeRefused) -> None:
        try:
            connection.send(pack_message(VERSION, {"refused": str(refusal)}))
        except OSError:
            return  # it has hung up already

    def _refuse_slow(self) -> None:
        now = time.monotonic()
        for connection in [c for c, deadline in self._deadlines.items() if deadline <= now]:
            self._note("slow", "its handshake has taken too long")
            self._drop(connection)

    def _note(self, reason: str, why: object) -> None:
        """Count and log a refusal."""
        text = f"refused a reader on this host ({reason}): {why}"
        if (line := self._lines.line(reason, text)) is not None:
            logger.warning("%s", line)
        self.refused[reason] += 1

    def _drop(self, connection: socket.socket) -> None:
        del self._deadlines[connection]
        self._selector.unregister(connection)
        connection.close()


def request_pool(
    address: str, hello: Hello, *, timeout_s: float, uid_of: PeerUid = peer_uid
) -> tuple[PeerInfo, tuple[int, int]]:
    """Ask the source at ``address`` for its description and its two read-only descriptors.

    The descriptors (blocks, generation words) are the caller's to close. Blocks for ``timeout_s``
    at most per message. Raises TransferFailed naming the source and the cause.
    """
    fds: list[int] = []
    try:
        with _unix_socket() as connection:
            connection.settimeout(timeout_s)
            connection.connect(_abstract(address))
            _check_uid(uid_of(connection))
            connection.send(encode_hello(hello))
            packet, fds, flags, _ = socket.recv_fds(
                connection, MAX_MESSAGE_BYTES, 2, socket.MSG_CMSG_CLOEXEC
            )
        info = _read_reply(packet, flags)
        if len(fds) != 2:
            raise HandshakeRefused("malformed", f"two descriptors belong to a pool, got {len(fds)}")
        return info, (fds[0], fds[1])
    except (OSError, TransferFailed) as error:
        for fd in fds:
            os.close(fd)
        raise TransferFailed(
            f"no handshake with worker {hello.source} at {address} within {timeout_s} s ({error}): "
            "ask membership whether it lives"
        ) from error


def _read_reply(packet: bytes, flags: int) -> PeerInfo:
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise HandshakeRefused("oversized", f"the reply exceeds {MAX_MESSAGE_BYTES} bytes")
    body = unpack_message(VERSION, packet)
    if "refused" in body:
        raise HandshakeRefused("refused", refusal_in(body))
    return decode_peer_info(body.get("info"))


def _receive(connection: socket.socket) -> bytes:
    packet, _, flags, _ = connection.recvmsg(MAX_MESSAGE_BYTES)
    if flags & socket.MSG_TRUNC:
        raise HandshakeRefused("oversized", f"a hello has {MAX_MESSAGE_BYTES} bytes at most")
    return packet


def _check_uid(uid: int) -> None:
    if uid != os.getuid():
        raise HandshakeRefused(
            "foreign_uid",
            f"the other end runs as user {uid}, we as {os.getuid()}: run both as one user",
        )


def _unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _abstract(address: str) -> str:
    if not address.startswith("@"):
        raise TransferFailed(f"a shared-memory address begins with '@', got {address!r}")
    return "\0" + address[1:]
