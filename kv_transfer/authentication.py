"""How two ends of a connection show each other that they know the cluster's key.

A challenge each way, answered by an HMAC-SHA256 over both nonces; the key itself never travels::

    reader -> source   nonce                                   KNOCK
    source -> reader   nonce, HMAC(key, "source" | nonces)     CHALLENGE
    reader -> source   HMAC(key, "reader" | nonces | hello), hello

So the source is known before the reader says who it is, and the reader before the source says
anything of its pool. What follows on the connection is neither encrypted nor signed. Pure: nonces
come in; knows neither sockets nor what a hello says.
"""

from __future__ import annotations

import hashlib
import hmac

from kvferry.kv_transfer.handshake import HandshakeRefused, pack_message, unpack_message

NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size

_PURPOSE = b"kvferry-kv-1"
_SOURCE = b"source"
_READER = b"reader"


def encode_knock(version: int, reader_nonce: bytes) -> bytes:
    """What a reader says first."""
    return pack_message(version, {"nonce": reader_nonce})


class SourceSide:
    """A source's half of one handshake. ``nonce``: random, for this handshake alone."""

    def __init__(self, key: bytes, nonce: bytes) -> None:
        self._key = key
        self._nonce = nonce
        self._reader_nonce: bytes | None = None

    @property
    def has_challenged(self) -> bool:
        """Whether the next message must be a proof."""
        return self._reader_nonce is not None

    def challenge(self, version: int, knock: bytes) -> bytes:
        """The answer to a knock. Raises HandshakeRefused."""
        self._reader_nonce = _bytes_of(_body(version, knock, {"nonce"}), "nonce", NONCE_BYTES)
        proof = _proof(self._key, _SOURCE, self._reader_nonce, self._nonce)
        return pack_message(version, {"nonce": self._nonce, "proof": proof})

    def opened(self, packet: bytes) -> bytes:
        """The hello in a message that begins with its proof. Raises HandshakeRefused."""
        assert self._reader_nonce is not None, "a proof answers a challenge"
        proof, hello = packet[:PROOF_BYTES], packet[PROOF_BYTES:]
        wanted = _proof(self._key, _READER, self._reader_nonce, self._nonce, hello)
        if not hmac.compare_digest(proof, wanted):
            raise _unauthenticated()
        return hello


class ReaderSide:
    """A reader's half of one handshake. ``nonce``: random, for this handshake alone."""

    def __init__(self, key: bytes, nonce: bytes) -> None:
        self._key = key
        self._nonce = nonce

    def knock(self, version: int) -> bytes:
        """The first message."""
        return encode_knock(version, self._nonce)

    def signed(self, version: int, challenge: bytes, hello: bytes) -> bytes:
        """``hello`` behind its proof, once the source has shown that it knows the key.

        Raises HandshakeRefused.
        """
        body = unpack_message(version, challenge)
        if "refused" in body:
            raise HandshakeRefused("refused", str(body["refused"]))
        body = _body(version, challenge, {"nonce", "proof"})
        nonce = _bytes_of(body, "nonce", NONCE_BYTES)
        proof = _bytes_of(body, "proof", PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(self._key, _SOURCE, self._nonce, nonce)):
            raise _unauthenticated()
        return _proof(self._key, _READER, self._nonce, nonce, hello) + hello


def _proof(
    key: bytes, side: bytes, reader_nonce: bytes, source_nonce: bytes, message: bytes = b""
) -> bytes:
    """All parts but the last have a fixed length, so that no two lists of parts read alike."""
    parts = _PURPOSE + side + reader_nonce + source_nonce + message
    return hmac.digest(key, parts, "sha256")


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
