"""A listening HTTP server that answers every GET with the metrics: ``server.metrics``.

A few threads, beside the router's event loop: samples are taken on the loop, for only there they
hold still; text is made from them on the request's own thread, so that no token waits for it. Each
connection is for one scrape, within a time from its beginning; there are only so many at once. TLS
and tokens are those of the other doors; a tenant's key opens nothing here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app

from kvferry.cluster.access.gate import Gate
from kvferry.cluster.access.refusals import Refusals
from kvferry.cluster.access.settings import Access
from kvferry.cluster.errors import PortUnavailable, status_of
from kvferry.cluster.metrics.exposition import Source, registry_of
from kvferry.cluster.metrics.families import Family
from kvferry.cluster.server_limits import ServerLimits
from kvferry.kv_cache.errors import KVFerryError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

logger = logging.getLogger(__name__)

PORT = "metrics"
SAMPLES_TIMEOUT_S = 10.0
STOP_POLL_S = 0.1  # and between two looks for connections that are late
STOP_TIMEOUT_S = 10.0


@dataclass(slots=True)
class _Open:
    """A connection: who it is, when it must have ended, and whether it was hung up on for that."""

    peer: str
    end: float
    is_late: bool = False


class _Server(ThreadingMixIn, WSGIServer):
    """Refuses connections beyond a number, and hangs up on those that last. ``limits`` and
    ``refusals`` are set before it serves.
    """

    daemon_threads = True
    limits = ServerLimits()
    refusals: Refusals | None = None

    def __init__(self, *args: Any, **more: Any) -> None:
        self._open: dict[Any, _Open] = {}  # by the socket; those that are not closed yet
        self._lock = threading.Lock()
        super().__init__(*args, **more)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a new connection on a thread of its own, if there are not too many."""
        opened = _Open(
            f"{client_address[0]}:{client_address[1]}",
            time.monotonic() + self.limits.scrape_limit_s,
        )
        with self._lock:
            has_room = len(self._open) < self.limits.max_scrapes
            if has_room:
                self._open[request] = opened
        if has_room:
            super().process_request(request, client_address)
            return
        self._tell(opened, "crowded", f"{self.limits.max_scrapes} are open")
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; before, it is forgotten, as its descriptor may be another's soon."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Listen no longer, and to nobody; answers that are under way go on."""
        super().server_close()
        with self._lock:
            for request in self._open:
                with contextlib.suppress(OSError):  # that one has gone
                    socket.socket.shutdown(request, socket.SHUT_RD)

    def service_actions(self) -> None:
        """Hang up on connections that are late."""
        self.hang_up(time.monotonic())

    def hang_up(self, now: float) -> None:
        """End every connection that should have ended by now; its thread finds out and closes."""
        late = []
        with self._lock:
            for request, opened in self._open.items():
                if now >= opened.end and not opened.is_late:
                    opened.is_late = True
                    late.append(opened)
                    with contextlib.suppress(OSError):  # it has gone
                        # the plain socket's: TLS's would take the state from under the thread
                        socket.socket.shutdown(request, socket.SHUT_RDWR)
        for opened in late:
            self._tell(opened, "slow", f"it was not done within {self.limits.scrape_limit_s:g} s")

    def refuse(self, request: object, reason: str, why: str) -> None:
        """A connection is refused, unless it has been already, for being late."""
        with self._lock:
            opened = self._open.get(request)
        if opened is not None and not opened.is_late:
            self._tell(opened, reason, why)

    def _tell(self, opened: _Open, reason: str, why: str) -> None:
        if self.refusals is not None:
            self.refusals.connection(PORT, reason, opened.peer, why)

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("the connection of %s broke", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    server: _Server

    def setup(self) -> None:
        if isinstance(self.request, ssl.SSLSocket):  # here, where only this client waits for it
            try:
                self.request.do_handshake()
            except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
                self.server.refuse(self.request, "tls", str(error))
                raise
        super().setup()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self.server.refuse(self.request, "malformed", f"{code} {message or ''}")
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
        limits: ServerLimits | None = None,
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
        self._server.limits = limits or ServerLimits()
        if access.tls is not None:  # each client's own thread makes the handshake
            self._server.socket = access.tls.context().wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
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
            self._thread.join(STOP_TIMEOUT_S)
        self._server.server_close()


def _guarded(
    application: WSGIApplication, gate: Gate, refusals: Refusals | None
) -> WSGIApplication:
    """The application for those who run the cluster."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            gate.operator(environ.get("HTTP_AUTHORIZATION"), "the metrics page")
        except KVFerryError as error:
            if refusals is not None:
                refusals.call(PORT, "a scrape", environ.get("REMOTE_ADDR", ""), error)
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
