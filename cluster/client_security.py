"""How a client sees whom it talks to and shows who it is: TLS, and a bearer token.

Loads neither torch nor ray. Knows no calls.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

import grpc

from kvferry.cluster.access.secret_files import UnusableSecret, read_public, read_secret
from kvferry.cluster.access.tls import load_pair
from kvferry.cluster.ports import is_loopback
from kvferry.kv_cache.errors import KVFerryError

Metadata = tuple[tuple[str, str], ...]


class TokenInTheClear(KVFerryError):
    """A token would go to another machine without TLS; names the endpoint."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """Nothing given: plaintext, and no token.

    Attributes:
        tls_ca: PEM file of the authorities that may have signed the server's certificate; TLS is
            spoken where it is given.
        tls_cert, tls_key: PEM files of the client's own, for a server that asks for one.
        token: what the server knows the client by.
    """

    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UnusableSecret("tls-cert and tls-key: one is given without the other")
        if self.tls_cert is not None and self.tls_ca is None:
            raise UnusableSecret("tls-cert is given without tls-ca: it is shown over TLS only")

    def channel_credentials(self, endpoint: str) -> grpc.ChannelCredentials | None:
        """For gRPC; None for plaintext. Raises UnusableSecret and TokenInTheClear."""
        if self.tls_ca is None:
            if self.token is not None:
                check_way(endpoint, "give --tls-ca FILE, or no token")
            return None
        authorities = read_public("tls-ca", self.tls_ca)
        if self.tls_cert is None or self.tls_key is None:
            return grpc.ssl_channel_credentials(authorities)
        key = read_secret("tls-key", self.tls_key)
        return grpc.ssl_channel_credentials(
            authorities, key, read_public("tls-cert", self.tls_cert)
        )

    def metadata(self) -> Metadata:
        """What goes with every call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def ssl_context(self) -> ssl.SSLContext | None:
        """For HTTP; None for what the URL and the system say. Raises UnusableSecret."""
        if self.tls_ca is None:
            return None
        try:
            read_public("tls-ca", self.tls_ca)
            context = ssl.create_default_context(cafile=self.tls_ca)
            if self.tls_cert is not None and self.tls_key is not None:
                key = read_secret("tls-key", self.tls_key)
                load_pair(context, read_public("tls-cert", self.tls_cert), key)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise UnusableSecret(f"tls-ca, tls-cert or tls-key cannot be used: {error}") from error
        return context


PLAIN = ClientSecurity()


def check_way(endpoint: str, remedy: str) -> None:
    """Raise TokenInTheClear unless HOST:PORT is of this machine; elsewhere a token needs TLS."""
    if not is_loopback(endpoint):
        raise TokenInTheClear(
            f"the token would go to {endpoint} without TLS, for everybody on the way to read: "
            f"{remedy}"
        )
