"""What the handshakes of all transports share: a versioned map, and how a refusal is named.

Knows neither sockets nor what the fields mean.
"""

from __future__ import annotations

import msgpack

from kvferry.kv_transfer.connector import TransferFailed


class HandshakeRefused(TransferFailed):
    """A handshake did not come about; names why.

    Attributes:
        reason: the counter's key: foreign_uid, unauthenticated, malformed, oversized, slow,
            wrong_receiver, incompatible, crowded.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def pack_message(version: int, body: dict[str, object]) -> bytes:
    """A version byte, then ``body`` as msgpack."""
    return bytes([version]) + bytes(msgpack.packb(body))


def unpack_message(version: int, packet: bytes) -> dict[str, object]:
    """The inverse of ``pack_message``. Raises HandshakeRefused."""
    if not packet:
        raise HandshakeRefused("malformed", "the other end hung up without a word")
    if packet[0] != version:
        raise HandshakeRefused("malformed", f"version {packet[0]} there, {version} here")
    try:
        body = msgpack.unpackb(packet[1:])
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise HandshakeRefused("malformed", f"not one msgpack value ({error!r:.100})") from error
    if not isinstance(body, dict) or not all(isinstance(key, str) for key in body):
        raise HandshakeRefused("malformed", "not a map with text keys")
    return body


def refusal_in(body: dict[str, object]) -> str:
    """Why the other end refuses, in its own words, fit for a log: one line, 4000 characters."""
    said = str(body.get("refused"))[:4000]
    return "".join(character if character.isprintable() else "?" for character in said)


def decode_worker(data: object) -> tuple[str, int]:
    """(worker id, epoch) from a list of both. Raises HandshakeRefused."""
    if (
        not isinstance(data, list)
        or len(data) != 2
        or type(data[0]) is not str
        or type(data[1]) is not int
    ):
        raise HandshakeRefused("malformed", f"a worker is [worker_id, epoch], got {data!r:.100}")
    return data[0], data[1]
