"""TLS at the doors: certificates read and checked once, then given to each library in its form.

With a client CA both sides show a certificate (mutual TLS). A handshake that fails is told to
``on_refused``, where the library lets us know: asyncio and ``ssl`` do, gRPC's own core does not.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from kvferry.cluster.access.secret_files import UnusableSecret, read_public, read_secret

OnRefused = Callable[[str], None]

_UNFINISHED = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


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
        self.context(lambda why: None)

    @property
    def asks_clients(self) -> bool:
        """Whether clients must show a certificate."""
        return self._client_ca is not None

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For gRPC's server."""
        return grpc.ssl_server_credentials(
            [(self._key, self._cert)], self._client_ca, require_client_auth=self.asks_clients
        )

    def context(self, on_refused: OnRefused) -> ssl.SSLContext:
        """For servers of Python's own, one each. ``on_refused`` is told why a handshake failed, on
        the thread that it failed on.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        files = self._files
        try:
            context.load_cert_chain(files.cert, files.key, password=_no_password)
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
        context.sslobject_class = _telling(ssl.SSLObject, on_refused)
        context.sslsocket_class = _telling(ssl.SSLSocket, on_refused)
        return context


def _telling(kind: Any, on_refused: OnRefused) -> Any:
    """``kind`` (``ssl.SSLObject`` or ``SSLSocket``), telling of handshakes that fail."""

    class Telling(kind):  # type: ignore[misc]  # a class that is an argument
        def do_handshake(self, *args: Any) -> None:
            try:
                super().do_handshake(*args)
            except _UNFINISHED:
                raise
            except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
                on_refused(str(error))
                raise

    return Telling


def _no_password() -> str:
    """Of an encrypted key: nobody is there to be asked."""
    raise ValueError("the key is encrypted")
