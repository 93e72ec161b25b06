"""How two ends of a connection show each other that they know the cluster's key.

A challenge each way, answered by an HMAC-SHA256; the key itself never travels::

    reader -> source   nonce, whom it means             KNOCK
    source -> reader   nonce, MAC(source, nonce)        CHALLENGE
    reader -> source   MAC(reader, hello), hello
    source -> reader   MAC(source, reply), reply        a welcome, or why there is none

Each MAC is also over all that was said before, so over both nonces and over the worker and the life
that the reader means; each side has a key of its own, made from the cluster's. A source does not
answer who means another: so no live source vouches for whoever has taken a dead one's port. The
source is known before the reader says who it is, the reader before the source says anything of its
pool, and only the source can welcome or, once it has answered, refuse. What follows on the
connection is neither encrypted nor signed: who stands between the two can then read and change it.
Pure: nonces come in; knows neither sockets nor what a hello says.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import Enum
from typing import Final

from kvferry.kv_transfer.handshake import (
    HandshakeRefused,
    decode_worker,
    pack_message,
    refusal_in,
    unpack_message,
)

NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size


class NoKey(Enum):
    """Stands where a key is wanted, and says that anybody who reaches the address gets in.

    For use inside one process, and for trials; never a default: who forgets the key must not open
    a port.
    """

    NO_KEY = "no key"


NO_KEY: Final = NoKey.NO_KEY

_PURPOSE = b"kvferry-kv-2 "
_SOURCE = b"source"
_READER = b"reader"


def encode_knock(version: int, reader_nonce: bytes, source: tuple[str, int]) -> bytes:
    """What a reader says first; ``source``: worker id and epoch of the one that it means."""
    return pack_message(version, {"nonce": reader_nonce, "source": list(source)})


class _Seals:
    """The MACs of one handshake, each over all packets so far and over what it stands before."""

    def __init__(self, key: bytes) -> None:
        self._keys = {
            side: hmac.digest(key, _PURPOSE + side, "sha256") for side in (_SOURCE, _READER)
        }
        self._said = hashlib.sha256()

    def note(self, packet: bytes) -> None:
        """``packet`` was said; its length, too, so that no two conversations read alike."""
        self._said.update(len(packet).to_bytes(8, "big") + packet)

    def proof(self, side: bytes, message: bytes) -> bytes:
        """What only ``side`` can say of ``message`` here."""
        return hmac.digest(self._keys[side], self._said.digest() + message, "sha256")

    def sealed(self, side: bytes, message: bytes) -> bytes:
        """A message behind its proof, which has been said then."""
        packet = self.proof(side, message) + message
        self.note(packet)
        return packet

    def opened(self, side: bytes, packet: bytes) -> bytes:
        """The message in a packet that ``side`` has sealed. Raises HandshakeRefused."""
        proof, message = packet[:PROOF_BYTES], packet[PROOF_BYTES:]
        if not hmac.compare_digest(proof, self.proof(side, message)):
            raise _unauthenticated()
        self.note(packet)
        return message


class SourceSide:
    """A source's half of one handshake. ``nonce``: random, for this handshake alone.

    ``ourselves``: worker id and epoch, for which alone it answers.
    """

    def __init__(self, key: bytes, nonce: bytes, ourselves: tuple[str, int]) -> None:
        self._seals = _Seals(key)
        self._nonce = nonce
        self._ourselves = ourselves
        self._has_challenged = False

    @property
    def has_challenged(self) -> bool:
        """Whether the next message must be a proof."""
        return self._has_challenged

    def challenge(self, version: int, knock: bytes) -> bytes:
        """The answer to a knock. Raises HandshakeRefused."""
        body = _body(version, knock, {"nonce", "source"})
        _bytes_of(body, "nonce", NONCE_BYTES)
        if decode_worker(body["source"]) != self._ourselves:
            # Who we are instead is nothing to tell a stranger.
            raise HandshakeRefused(
                "wrong_receiver",
                "another worker or another life of this one is here: ask membership",
            )
        self._seals.note(knock)
        proof = self._seals.proof(_SOURCE, self._nonce)
        packet = pack_message(version, {"nonce": self._nonce, "proof": proof})
        self._seals.note(packet)
        self._has_challenged = True
        return packet

    def opened(self, packet: bytes) -> bytes:
        """The hello in a message that begins with its proof. Raises HandshakeRefused."""
        assert self._has_challenged, "a proof answers a challenge"
        return self._seals.opened(_READER, packet)

    def sealed(self, reply: bytes) -> bytes:
        """A reply as the reader takes it: behind its proof once there was a challenge."""
        return self._seals.sealed(_SOURCE, reply) if self._has_challenged else reply


class ReaderSide:
    """A reader's half of one handshake. ``nonce``: random, for this handshake alone.

    ``wanted``: worker id and epoch of the source that it means.
    """

    def __init__(self, key: bytes, nonce: bytes, wanted: tuple[str, int]) -> None:
        self._seals = _Seals(key)
        self._nonce = nonce
        self._wanted = wanted
        self._has_signed = False

    @property
    def has_signed(self) -> bool:
        """Whether the next message must be the source's reply."""
        return self._has_signed

    def knock(self, version: int) -> bytes:
        """The first message, to be said once."""
        packet = encode_knock(version, self._nonce, self._wanted)
        self._seals.note(packet)
        return packet

    def signed(self, version: int, challenge: bytes, hello: bytes) -> bytes:
        """``hello`` behind its proof, once the source has shown that it knows the key.

        Raises HandshakeRefused.
        """
        body = unpack_message(version, challenge)
        if "refused" in body:
            raise HandshakeRefused("refused", refusal_in(body))
        body = _body(version, challenge, {"nonce", "proof"})
        nonce = _bytes_of(body, "nonce", NONCE_BYTES)
        proof = _bytes_of(body, "proof", PROOF_BYTES)
        if not hmac.compare_digest(proof, self._seals.proof(_SOURCE, nonce)):
            raise _unauthenticated()
        self._seals.note(challenge)
        self._has_signed = True
        return self._seals.sealed(_READER, hello)

    def opened(self, reply: bytes) -> bytes:
        """The source's reply to the hello. Raises HandshakeRefused."""
        return self._seals.opened(_SOURCE, reply)


def _body(version: int, packet: bytes, fields: set[str]) -> dict[str, object]:
    body = unpack_message(version, packet)
    if set(body) != fields:
        raise _unauthenticated()
    return body


def _bytes_of(body: dict[str, object], name: str, size: int) -> bytes:
    value = body[name]
    if not isinstance(value, bytes) or len(value) != size:
        raise HandshakeRefused("malformed", f"{name}: wanted {size} bytes")
    return value


def _unauthenticated() -> HandshakeRefused:
    return HandshakeRefused(
        "unauthenticated", "the other end has not shown that it knows this cluster's key"
    )
