"""TLS at the doors: certificates read and checked once, then given to each library in its form.

With a client CA both sides show a certificate (mutual TLS). What becomes of a handshake is the
servers' to tell; gRPC's own core does not.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from kvferry.cluster.access.secret_files import UnusableSecret, read_public, read_secret


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files. ``client_ca`` (None: clients need none) signs clients' certificates."""

    cert: str
    key: str
    client_ca: str | None = None


class ServerTls:
    """What the files hold, having seen that it fits together. Raises UnusableSecret."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._cert = read_public("server.tls.cert", files.cert)
        self._key = read_secret("server.tls.key", files.key)
        self._client_ca = (
            None
            if files.client_ca is None
            else read_public("server.tls.client_ca", files.client_ca)
        )
        self.context()

    @property
    def asks_clients(self) -> bool:
        """Whether clients must show a certificate."""
        return self._client_ca is not None

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For gRPC's server."""
        return grpc.ssl_server_credentials(
            [(self._key, self._cert)], self._client_ca, require_client_auth=self.asks_clients
        )

    def context(self) -> ssl.SSLContext:
        """For servers of Python's own; of the same bytes as ``grpc_credentials``."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        files = self._files
        try:
            load_pair(context, self._cert, self._key)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise UnusableSecret(
                f"server.tls: {files.cert} and {files.key} are no certificate and its key, both in "
                f"PEM and without a password: {error}"
            ) from error
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(cadata=self._client_ca.decode("ascii"))
            except (ssl.SSLError, ValueError) as error:
                raise UnusableSecret(
                    f"server.tls.client_ca: {files.client_ca} holds no certificates in PEM: {error}"
                ) from error
        return context


def load_pair(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    """A certificate and its key that were read before, PEM: the bytes that were checked.

    Raises what ``load_cert_chain`` does, and ValueError for a key with a password.
    """
    with _as_path(cert) as cert_path, _as_path(key) as key_path:
        context.load_cert_chain(cert_path, key_path, password=_no_password)


@contextlib.contextmanager
def _as_path(content: bytes) -> Iterator[str]:
    """Bytes under a path, which is all that OpenSSL's binding takes; in memory, never on a disk."""
    descriptor = os.memfd_create("kvferry-pem", os.MFD_CLOEXEC)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{descriptor}"


def _no_password() -> str:
    """Of an encrypted key: nobody is there to be asked."""
    raise ValueError("the key is encrypted")
