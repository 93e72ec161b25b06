"""A listening HTTP server that answers every GET with the metrics: ``server.metrics``.

A few threads, beside the router's event loop: samples are taken on the loop, for only there they
hold still; text is made from them on the request's own thread, so that no token waits for it. TLS
and tokens are those of the other doors; a tenant's key opens nothing here.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Iterable, Sequence
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app

from kvferry.cluster.access.gate import Gate
from kvferry.cluster.access.refusals import Refusals
from kvferry.cluster.access.settings import Access
from kvferry.cluster.errors import PortUnavailable, status_of
from kvferry.cluster.metrics.exposition import Source, registry_of
from kvferry.cluster.metrics.families import Family
from kvferry.kv_cache.errors import KVFerryError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

logger = logging.getLogger(__name__)

SAMPLES_TIMEOUT_S = 10.0
STOP_POLL_S = 0.1
CLIENT_TIMEOUT_S = 10.0  # a client that says or takes nothing for so long is hung up on


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    refusals: Refusals | None = None

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("the connection of %s broke", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_TIMEOUT_S
    server: _Server

    def setup(self) -> None:
        super().setup()
        if isinstance(self.connection, ssl.SSLSocket):  # here, where only this client waits for it
            self.connection.do_handshake()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        if self.server.refusals is not None:
            self.server.refusals.connection("metrics", "malformed", f"{code} {message or ''}")
        super().send_error(code, message, explain)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)


class MetricsServer:
    """See the module. ``address``: HOST:PORT, port 0 picks a free one.

    Construct on the loop that ``source`` is to be called on. Raises PortUnavailable.
    """

    def __init__(
        self,
        address: str,
        source: Source,
        access: Access | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        access = access or Access()
        loop = asyncio.get_running_loop()

        async def taken() -> Sequence[Family]:
            return source()

        def samples() -> Sequence[Family]:
            pending = asyncio.run_coroutine_threadsafe(taken(), loop)
            return pending.result(SAMPLES_TIMEOUT_S)

        host, _, port = address.rpartition(":")
        kind = _Server6 if ":" in host else _Server
        application = _answering(make_wsgi_app(registry_of(samples)))
        if not access.gate.is_open:
            application = _guarded(application, access.gate, refusals)
        try:
            self._server = make_server(host.strip("[]"), int(port), application, kind, _Handler)
        except OSError as error:
            why = error.strerror or str(error)
            raise PortUnavailable(
                f"cannot listen on {address} for metrics: {why}; is another server using the port? "
                "Give another server.metrics, or port 0 to pick a free one"
            ) from error
        self._server.refusals = refusals
        if access.tls is not None:
            self._server.socket = _secured(self._server.socket, access, refusals)
        self.endpoint = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": STOP_POLL_S},
            name="kvferry-metrics",
            daemon=True,
        )

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Take no further requests and close the port; not on the loop, whose answer one that runs
        may wait for.
        """
        if self._thread.ident is not None:
            self._server.shutdown()
            self._thread.join(CLIENT_TIMEOUT_S)
        self._server.server_close()


def _secured(listener: socket.socket, access: Access, refusals: Refusals | None) -> socket.socket:
    """The listening socket with TLS, whose handshakes are made by each client's own thread."""

    def refused(why: str) -> None:
        if refusals is not None:
            refusals.connection("metrics", "tls", why)

    assert access.tls is not None
    return access.tls.context(refused).wrap_socket(
        listener, server_side=True, do_handshake_on_connect=False
    )


def _guarded(
    application: WSGIApplication, gate: Gate, refusals: Refusals | None
) -> WSGIApplication:
    """The application for those who run the cluster."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            gate.operator(environ.get("HTTP_AUTHORIZATION"), "the metrics page")
        except KVFerryError as error:
            if refusals is not None:
                refusals.call("a scrape", environ.get("REMOTE_ADDR", ""), error)
            status = status_of(error).http
            headers = [("Content-Type", "text/plain"), ("WWW-Authenticate", "Bearer")]
            start_response(f"{status} {type(error).__name__}", headers)
            return [f"{error}\n".encode()]
        return application(environ, start_response)

    return answer


def _answering(application: WSGIApplication) -> WSGIApplication:
    """The application, but an error becomes an answer and a line of the log."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            return application(environ, start_response)
        except Exception:  # a scrape's boundary; the next one may find the loop less busy
            logger.exception("a scrape failed")
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"the metrics could not be collected\n"]

    return answer
