"""A reader's way to a source: connect, say whom it means, hear who answers; never blocking.

Owns a connection until it is greeted. With a cluster key both ends prove that they know it, the
source first. Knows nothing of blocks.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.kv_transfer.authentication import NONCE_BYTES, NoKey, ReaderSide
from kvferry.kv_transfer.compatibility import check_compatible, check_identity
from kvferry.kv_transfer.connector import IncompatiblePeer, PeerInfo, TransferFailed
from kvferry.kv_transfer.handshake import HandshakeRefused
from kvferry.kv_transfer.tcp_wire import (
    MAX_MESSAGE_BYTES,
    VERSION,
    Hello,
    decode_reply,
    frame,
    hello_packet,
    parse_address,
    take_message,
    tune,
)


@dataclass(frozen=True, slots=True)
class DialOptions:
    """How a reader reaches its sources.

    Attributes:
        connect_timeout_s: for connection and handshake together.
        silence_timeout_s: after which a source whose host does not answer is given up.
        socket_buffer_bytes: fixed kernel buffers; None lets them size themselves.
        key: the cluster's, which both ends must know.
    """

    connect_timeout_s: float = 1.0
    silence_timeout_s: float = 20.0
    socket_buffer_bytes: int | None = None
    clock: Callable[[], float] = time.monotonic
    key: bytes | NoKey = field(kw_only=True, repr=False)


class Dial:
    """One attempt to reach ``wanted``. Call ``advance`` until it returns a description; from then
    on ``connection`` is the caller's. Raises TransferFailed from construction on.
    """

    def __init__(self, wanted: PeerInfo, ours: PeerInfo, options: DialOptions) -> None:
        self._wanted = wanted
        self._ours = ours
        self._options = options
        self._deadline = options.clock() + options.connect_timeout_s
        meant = (wanted.worker_id, wanted.epoch)
        self._hello = hello_packet(Hello(meant, ours))
        key = options.key
        self._proving = None
        if not isinstance(key, NoKey):
            self._proving = ReaderSide(key, os.urandom(NONCE_BYTES), meant)
        first = self._hello if self._proving is None else self._proving.knock(VERSION)
        self._unsent = frame(first)
        self._received = bytearray()
        family, address = parse_address(wanted.address)
        self.connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            tune(self.connection, options.silence_timeout_s, options.socket_buffer_bytes)
            code = self.connection.connect_ex(address)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except OSError as error:
            raise self._failed(error) from error
        self._connecting = True

    def advance(self) -> PeerInfo | None:
        """Go on as far as is possible at once; the source's description when it has greeted.

        Raises IncompatiblePeer or TransferFailed, having closed the connection.
        """
        try:
            return self._advance()
        except IncompatiblePeer:
            self.close()
            raise
        except (OSError, TransferFailed) as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Block until ``advance`` can go on, at most until the attempt's deadline."""
        left_s = max(0.0, self._deadline - self._options.clock())
        self._poll(left_s)

    def close(self) -> None:
        """Give the attempt up; idempotent."""
        self.connection.close()

    def _advance(self) -> PeerInfo | None:
        if self._options.clock() >= self._deadline:
            raise TimeoutError(f"no answer within {self._options.connect_timeout_s:g} s")
        if self._connecting:
            if not self._poll(0.0):
                return None
            code = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            self._connecting = False
        try:
            self._send()
            if self._proving is not None and not self._proving.has_signed:
                signed = self._proving.signed(VERSION, self._hear(), self._hello)
                self._unsent = frame(signed)
                self._send()
            reply = self._hear()
            return self._greeting(reply if self._proving is None else self._proving.opened(reply))
        except BlockingIOError:
            return None

    def _send(self) -> None:
        while self._unsent:
            self._unsent = self._unsent[self.connection.send(self._unsent) :]

    def _hear(self) -> bytes:
        """The next message; BlockingIOError while it is not complete."""
        while (packet := take_message(self._received)) is None:
            data = self.connection.recv(MAX_MESSAGE_BYTES)
            if not data:
                raise HandshakeRefused("malformed", "the other end hung up without a word")
            self._received += data
        if self._received:
            raise HandshakeRefused("malformed", "the source spoke before it was asked")
        return packet

    def _greeting(self, packet: bytes) -> PeerInfo:
        info = decode_reply(packet)
        check_identity(self._wanted, info)
        check_compatible(self._ours, info, same_host=False)
        return info

    def _poll(self, timeout_s: float) -> bool:
        """Whether the connection is ready for what it waits for, within ``timeout_s``."""
        waiter = select.poll()
        to_send = self._connecting or self._unsent
        waiter.register(self.connection, select.POLLOUT if to_send else select.POLLIN)
        return bool(waiter.poll(timeout_s * 1000))

    def _failed(self, cause: Exception) -> TransferFailed:
        self.close()
        wanted = self._wanted
        return TransferFailed(
            f"no handshake with worker ({wanted.worker_id!r}, {wanted.epoch}) at "
            f"{wanted.address} ({cause}): ask membership whether it lives"
        )
