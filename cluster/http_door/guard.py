"""Who may pass the HTTP door: an ASGI layer in front of every route.

Health and readiness stay open, as probes carry no tokens. The caller goes into the request's scope
for the routes behind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvferry.cluster.access.gate import ANYBODY, Caller, Gate
from kvferry.cluster.access.refusals import Refusals
from kvferry.cluster.http_door.answer import failure_response
from kvferry.kv_cache.errors import KVFerryError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/health", "/ready")
OPERATORS_PATHS = ("/metrics",)
_CALLER = "kvferry.caller"


class Guard:
    """See the module."""

    def __init__(self, app: Application, gate: Gate, refusals: Refusals) -> None:
        self._app = app
        self._gate = gate
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it with what refuses it."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                scope[_CALLER] = self._caller(scope)
            except KVFerryError as error:
                what = f"{scope['method']} {scope['path']!r:.100}"
                self._refusals.call(what, _peer(scope), error)
                await _refusal(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        authorization = values[0].decode("latin-1") if values else None
        if scope["path"] in OPERATORS_PATHS:
            return self._gate.operator(authorization, scope["path"])
        return self._gate.caller(authorization)


def caller_of(scope: Scope) -> Caller:
    """Who sent a request that has passed the guard."""
    found: Caller = scope.get(_CALLER, ANYBODY)
    return found


def _refusal(error: KVFerryError) -> Application:
    response = failure_response(error)
    if response.status_code == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


def _peer(scope: Scope) -> str:
    client = scope.get("client")
    return f"{client[0]}:{client[1]}" if client else "an unknown address"
