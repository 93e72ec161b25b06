"""The secret of one cluster, and what is made from it for each kind of channel.

Whoever starts a cluster makes it and hands it to the processes that it starts, through Ray, which
may keep it beside them; on a Ray that was joined it is in Ray's store for the next launcher. Knows
no sockets.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from kvferry.kv_transfer.authentication import NoKey

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A CURVE key pair as ZeroMQ takes it, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """``secret``: 32 random bytes, never shown.

    All nodes have the same CURVE keys: a peer is who knows the cluster's secret, and which of the
    nodes it is, messages say.
    """

    secret: bytes = field(repr=False)

    def for_blocks(self) -> bytes:
        """What readers and sources of KV blocks prove to each other."""
        return self._derived(b"blocks")

    def for_messages(self) -> CurveKeys:
        """What messages between nodes are encrypted and authenticated with."""
        secret = z85.encode(self._derived(b"messages"))
        return CurveKeys(zmq.curve_public(secret), secret)

    def _derived(self, purpose: bytes) -> bytes:
        return hashlib.blake2b(self.secret, digest_size=32, person=b"kvferry-" + purpose).digest()


def for_blocks(key: ClusterKey | NoKey) -> bytes | NoKey:
    """What is made for blocks from a key; without one, nothing is wanted of readers either."""
    return key if isinstance(key, NoKey) else key.for_blocks()


def new_key() -> ClusterKey:
    """A key that nobody has had."""
    return ClusterKey(secrets.token_bytes(SECRET_BYTES))
