"""What travels on a TCP connection between a reader and a source: sizes, order, nothing else.

::

    (where there is a cluster key: the two messages of ``authentication``, then, behind proofs:)
    reader -> source   one message: whom it means, and its own description
    source -> reader   one message: the source's description, or why it refuses
    reader -> source   REQUEST, REQUEST, …              one per block, as many at once as it likes
    source -> reader   HEADER [bytes TRAILER], …        one per request, in the order of requests

A message is a PREFIX (magic, length) and a versioned map. Everything is little-endian. A header
whose status is VALID is followed by the whole block and by a trailer; only the trailer says whether
the bytes are those that were asked for.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

from kvferry.kv_transfer.connector import IncompatiblePeer, PeerInfo, TransferFailed
from kvferry.kv_transfer.handshake import (
    HandshakeRefused,
    decode_worker,
    pack_message,
    refusal_in,
    unpack_message,
)
from kvferry.kv_transfer.peer_codec import MalformedPeerInfo, decode_peer_info, encode_peer_info

MAGIC = b"KVFT"
VERSION = 1
MAX_MESSAGE_BYTES = 64 * 1024
PREFIX = struct.Struct("<4sI")  # magic, bytes of the message
REQUEST = struct.Struct("<B3xIQQqQ")  # kind, index, read id, epoch, block id, generation
HEADER = struct.Struct("<B3xIQQQQ")  # status, index, read id, generation, length, digest
TRAILER = struct.Struct("<B3xI")  # status, index

WORD = 1 << 64  # epochs, generations and read ids are below it
MAX_IN_FLIGHT_BLOCKS = 1024  # requests of one connection that a source need take in advance


class Kind(IntEnum):
    """What a request asks for."""

    READ = 1
    READ_WITH_DIGEST = 2  # the header carries the digest of the block's bytes


class BlockStatus(IntEnum):
    """A source's word on one block."""

    VALID = 0
    STALE = 1
    REFUSED = 2  # not a block of this pool


class BrokenStream(TransferFailed):
    """The other end sent what does not belong there; the connection cannot be used further."""


@dataclass(frozen=True, slots=True)
class Request:
    """One block that a reader asks for."""

    kind: Kind
    index: int
    read_id: int
    epoch: int
    block_id: int
    generation: int

    def pack(self) -> bytes:
        """The request as bytes; every field must be in range."""
        return REQUEST.pack(
            self.kind, self.index, self.read_id, self.epoch, self.block_id, self.generation
        )


@dataclass(frozen=True, slots=True)
class Hello:
    """What a reader says: the source that it means as (worker id, epoch), and who it is."""

    source: tuple[str, int]
    reader: PeerInfo


def frame(packet: bytes) -> bytes:
    """A message as it travels."""
    return PREFIX.pack(MAGIC, len(packet)) + packet


def take_message(received: bytearray) -> bytes | None:
    """Remove and return the message at the front of ``received``; None until all of it is there.

    Raises HandshakeRefused as soon as the beginning is not that of a message.
    """
    if bytes(received[: len(MAGIC)]) != MAGIC[: len(received)]:
        raise HandshakeRefused("malformed", f"not our protocol: {bytes(received[:16])!r}")
    if len(received) < PREFIX.size:
        return None
    _, length = PREFIX.unpack_from(received)
    if length > MAX_MESSAGE_BYTES:
        raise HandshakeRefused("oversized", f"{length} bytes, {MAX_MESSAGE_BYTES} at most")
    end = PREFIX.size + length
    if len(received) < end:
        return None
    packet = bytes(received[PREFIX.size : end])
    del received[:end]
    return packet


def hello_packet(hello: Hello) -> bytes:
    """``hello`` as a message that is not framed yet."""
    reader = encode_peer_info(hello.reader)
    return pack_message(VERSION, {"source": list(hello.source), "reader": reader})


def encode_hello(hello: Hello) -> bytes:
    """``hello`` as it travels where there is no key."""
    return frame(hello_packet(hello))


def decode_hello(packet: bytes) -> Hello:
    """A message as a hello. Raises HandshakeRefused."""
    body = unpack_message(VERSION, packet)
    if set(body) != {"reader", "source"}:
        raise HandshakeRefused("malformed", f"a hello has reader and source, got {sorted(body)}")
    try:
        return Hello(decode_worker(body["source"]), decode_peer_info(body["reader"]))
    except MalformedPeerInfo as error:
        raise HandshakeRefused("malformed", str(error)) from error


def welcome_packet(info: PeerInfo) -> bytes:
    """The source's description as a message that is not framed yet."""
    return pack_message(VERSION, {"info": encode_peer_info(info)})


def encode_welcome(info: PeerInfo) -> bytes:
    """The source's description as it travels where there is no key."""
    return frame(welcome_packet(info))


def refusal_packet(refusal: HandshakeRefused) -> bytes:
    """A refusal that is not framed yet; what the reader said may be in it, so it is cut to fit."""
    body: dict[str, object] = {"refused": str(refusal)[:4000], "reason": refusal.reason}
    return pack_message(VERSION, body)


def encode_refusal(refusal: HandshakeRefused) -> bytes:
    """A refusal as it travels where there is no key, or before a challenge."""
    return frame(refusal_packet(refusal))


def decode_reply(packet: bytes) -> PeerInfo:
    """The source's description. Raises IncompatiblePeer or HandshakeRefused if it refused."""
    body = unpack_message(VERSION, packet)
    if body.get("reason") == "incompatible":
        raise IncompatiblePeer(refusal_in(body))
    if "refused" in body:
        raise HandshakeRefused("refused", refusal_in(body))
    return decode_peer_info(body.get("info"))


def format_address(host: str, port: int) -> str:
    """``host:port``; an IPv6 host stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(address: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Family, host and port. Numeric only, so that no name look-up can block the caller.

    Raises TransferFailed.
    """
    host, _, port = address.rpartition(":")
    try:
        parsed = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        if not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ValueError("the port must be 1 to 65535")
    except ValueError as error:
        raise TransferFailed(
            f"a TCP address is IP:PORT, got {address!r} ({error}): ask membership"
        ) from error
    family = socket.AF_INET6 if parsed.version == 6 else socket.AF_INET
    return family, (str(parsed), int(port))


def tune(connection: socket.socket, silence_timeout_s: float, buffer_bytes: int | None) -> None:
    """Make a connection non-blocking and prompt, and have the kernel notice a vanished host.

    ``silence_timeout_s`` bounds both an idle connection (keepalive) and sent bytes that nobody
    takes (user timeout). ``buffer_bytes`` fixes the kernel's buffers, which otherwise size
    themselves.
    """
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    quarter = max(1, int(silence_timeout_s / 4))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, quarter)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, quarter)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    user_timeout_ms = max(1, int(silence_timeout_s * 1000))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, user_timeout_ms)
    if buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
