"""The listening HTTP server: its socket, its limits, how it starts and stops.

uvicorn on the router's own loop; its signals stay the process's and its logs go where all go.
Its connections are ``http_door.connections``'s, what its routes do is ``http_door.app``'s, who may
ask is ``http_door.guard``'s.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable

import uvicorn

from kvferry.cluster.http_door.app import Door, make_app
from kvferry.cluster.http_door.connections import IDLE_LIMIT_S, Acceptor, connection_kind
from kvferry.cluster.ports import unavailable
from kvferry.cluster.router_node import RouterNode
from kvferry.cluster.server_limits import ServerLimits

LAST_WORDS_S = 1.0  # for the errors of streams that a stop has ended
PROBES = 3  # that a silent connection leaves unanswered before it is dropped


class HttpServer:
    """See the module. Construct and run on the node's loop.

    Attributes:
        endpoint: HOST:PORT, with the port that was found where 0 was asked for.
    """

    def __init__(
        self,
        node: RouterNode,
        address: str,
        limits: ServerLimits | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Bind the address; raises PortUnavailable."""
        self._node = node
        limits = limits or ServerLimits()
        self._socket = _listen(address, limits)
        port = self._socket.getsockname()[1]
        self.endpoint = f"{address.rpartition(':')[0]}:{port}"
        self._door = Door(node, limits, wall_clock)
        self._kind = connection_kind(node.refusals, limits, lambda peer: self._acceptor.begun(peer))
        config = uvicorn.Config(
            make_app(self._door),
            http=self._kind,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE_LIMIT_S,
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._server.servers = []  # it is the acceptor that listens
        self._acceptor = Acceptor(
            self._socket,
            self._connection,
            None if node.access.tls is None else node.access.tls.context(),
            limits,
            node.refusals,
            lambda: len(self._server.server_state.connections),
        )
        self._running: list[asyncio.Task[None]] = []

    def _connection(self) -> asyncio.Protocol:
        server = self._server
        return self._kind(server.config, server.server_state, server.lifespan.state)

    async def start(self) -> None:
        """Accept connections."""
        loop = asyncio.get_running_loop()
        self._running = [
            loop.create_task(self._server.main_loop()),
            loop.create_task(self._acceptor.run()),
        ]

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, let running ones finish for ``grace_s`` seconds, then fail them."""
        self._door.draining = True
        if not self._running:
            self._socket.close()
            return
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        stopping = asyncio.create_task(self._server.shutdown(sockets=[self._socket]))
        await asyncio.wait({stopping}, timeout=grace_s)
        self._node.end_requests()  # a stream ends with its typed error, it is not cut off
        await asyncio.wait({stopping}, timeout=LAST_WORDS_S)
        for connection in list(self._server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()  # who does not read would keep it for ever
        await stopping


def _listen(address: str, limits: ServerLimits) -> socket.socket:
    """A socket whose connections notice that a client's machine has vanished."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=1024)
    except OSError as error:
        raise unavailable(address, error.strerror or str(error)) from error
    interval = max(1, math.ceil(limits.keepalive_timeout_s / PROBES))
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, math.ceil(limits.keepalive_s))),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    ):
        listener.setsockopt(level, option, value)
    listener.setblocking(False)
    return listener
