"""The connections of the HTTP door: how many there are, and how long one may take over nothing.

Accepts them, makes TLS's handshakes, and hangs up on those that are late, each counted with where
it came from. No connection is without a deadline but while a request is being answered, and then
only as long as the client takes what it is sent; a body has its own (``reading``). Knows no routes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvferry.cluster.access.refusals import Refusals
from kvferry.cluster.server_limits import ServerLimits

PORT = "http"
IDLE_LIMIT_S = 60  # between two requests of one connection
ACCEPT_RETRY_S = 0.05  # after an accept that failed, which out of descriptors would repeat at once
FAREWELL_S = 5.0  # for a client to answer the end of TLS
LAST_WORDS_S = 60.0  # for one whose stream was ended for its slowness, to read that

# For uvicorn's own words of what clients do wrong, which are told here, counted and limited.
_errors_only = logging.getLogger(f"{__name__}.uvicorn")
_errors_only.setLevel(logging.ERROR)


class Connection(H11Protocol):
    """A connection of uvicorn's with deadlines. See ``connection_kind``.

    That for a header begins with the connection, and after a request with the first byte of the
    next; until that comes it may be idle for longer. Another runs while nothing is taken.
    """

    refusals: Refusals
    begun: Callable[[str], None]
    header_limit_s: float
    stall_limit_s: float

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.logger = _errors_only
        self._deadline: asyncio.TimerHandle | None = None
        self._owes_header = False
        self._stall: asyncio.TimerHandle | None = None

    @property
    def peer(self) -> str:
        """Where it came from."""
        return address(self.client)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It is there, and owes a header."""
        super().connection_made(transport)
        self.begun(self.peer)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Some of a request, or all."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self._set_deadline(None)
        self._end_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client takes nothing."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self.stall_limit_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It takes something again, or is gone."""
        self._end_stall()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came after a request; who has not even taken its answer is not waited for."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        self.refusals.connection(PORT, "malformed", self.peer, msg)
        super().send_400_response(msg)

    def _watch(self) -> None:
        has_begun: Any = self.cycle  # None, whatever uvicorn says, before the first request
        if has_begun and not has_begun.response_complete:
            self._set_deadline(None)
        elif has_begun and self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            # What came was the rest of a request that was answered before it.
            self._set_deadline(IDLE_LIMIT_S, self.timeout_keep_alive_handler)
        elif not self._owes_header:
            self._set_deadline(self.header_limit_s, self._late)
            self._owes_header = True

    def _set_deadline(self, seconds: float | None, then: Callable[[], None] | None = None) -> None:
        self._owes_header = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None and then is not None:
            self._deadline = self.loop.call_later(seconds, then)

    def _late(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            limit = f"{self.header_limit_s:g} s"
            self.refusals.connection(PORT, "slow", self.peer, f"no header came within {limit}")
        self.transport.abort()

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


def connection_kind(
    refusals: Refusals, limits: ServerLimits, begun: Callable[[str], None]
) -> type[Connection]:
    """Connections of one door; ``begun`` is told the peer of each."""
    shared = {
        "refusals": refusals,
        "begun": staticmethod(begun),
        "header_limit_s": limits.header_limit_s,
        "stall_limit_s": limits.slow_client_limit_s + LAST_WORDS_S,
    }
    return type("Connection", (Connection,), shared)


class Acceptor:
    """Takes connections off a listening socket, as many as may be open at a time.

    Those beyond are closed at once. ``num_open``: how many there are whose handshake has been made,
    of which each is told by ``begun``.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        limits: ServerLimits,
        refusals: Refusals,
        num_open: Callable[[], int],
    ) -> None:
        self._listener = listener
        self._make = make
        self._tls = tls
        self._limits = limits
        self._refusals = refusals
        self._num_open = num_open
        self._tasks: set[asyncio.Task[None]] = set()
        self._beginning: set[str] = set()  # peers, each until it is among the open ones

    def begun(self, peer: str) -> None:
        """The peer's handshake has been made."""
        self._beginning.discard(peer)

    async def run(self) -> None:
        """Until it is cancelled, which ends those that have not begun, too."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, peer = await loop.sock_accept(self._listener)
                except OSError as error:
                    why = error.strerror or str(error)
                    self._refusals.connection(PORT, "accept_failed", "somebody", why)
                    await asyncio.sleep(ACCEPT_RETRY_S)
                    continue
                self._take(loop, connection, address(peer))
        finally:
            for task in self._tasks:
                task.cancel()

    def _take(self, loop: asyncio.AbstractEventLoop, connection: socket.socket, peer: str) -> None:
        most = self._limits.max_connections
        if len(self._beginning) + self._num_open() >= most:
            connection.close()
            self._refusals.connection(PORT, "crowded", peer, f"{most} connections are open")
            return
        self._beginning.add(peer)
        task = loop.create_task(self._begin(loop, connection, peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _begin(
        self, loop: asyncio.AbstractEventLoop, connection: socket.socket, peer: str
    ) -> None:
        limit_s = self._limits.handshake_limit_s
        times = (
            {}
            if self._tls is None
            else {"ssl_handshake_timeout": limit_s, "ssl_shutdown_timeout": FAREWELL_S}
        )
        try:
            await loop.connect_accepted_socket(self._make, connection, ssl=self._tls, **times)
        except ConnectionAbortedError:  # asyncio's, of its own clock
            why = f"no handshake within {limit_s:g} s"
            self._refusals.connection(PORT, "slow", peer, why)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            why = str(error) or "it hung up during the handshake"
            self._refusals.connection(PORT, "tls", peer, why)
        finally:
            self._beginning.discard(peer)


def address(client: Any) -> str:
    """HOST:PORT of what sockets and uvicorn call a peer."""
    return f"{client[0]}:{client[1]}" if client else "an unknown address"
