"""Who may pass the HTTP door: asked where a route has been found, before anything of it runs.

Each route says when it is registered whom it admits; one that does not is for those who run the
cluster, and nothing but such routes may be served. Where there is no route, only callers are told.
Health and readiness are open, as probes carry no tokens. The caller goes into the request's scope.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from enum import Enum
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from kvferry.cluster.access.gate import Caller, Gate
from kvferry.cluster.access.refusals import Refusals
from kvferry.cluster.http_door.answer import failure_response
from kvferry.cluster.http_door.connections import address
from kvferry.kv_cache.errors import KVFerryError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

PORT = "http"
_CALLER = "kvferry.caller"


class Admits(Enum):
    """Whom a route is for. Without tokens everybody is each of these."""

    ANYBODY = "anybody"
    CALLERS = "callers"
    OPERATORS = "operators"


class GuardedRoute(APIRoute):
    """A route that knows whom it admits; made by ``Guard.routes_for``."""

    admits: Admits
    guard: Guard

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run it, or answer with what refuses it: for another method than the route's, too."""
        if await self.guard.lets_in(self.admits, scope, receive, send):
            await super().handle(scope, receive, send)


class Guard:
    """See the module."""

    def __init__(self, gate: Gate, refusals: Refusals) -> None:
        self._gate = gate
        self._refusals = refusals

    def routes_for(self, whom: Admits) -> type[GuardedRoute]:
        """The class of routes that admit them."""
        return type("GuardedRoute", (GuardedRoute,), {"admits": whom, "guard": self})

    def stand_before(self, app: FastAPI) -> None:
        """Guard what nobody has classified, and paths that are no route's."""
        app.router.route_class = self.routes_for(Admits.OPERATORS)
        nothing = app.router.default

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if await self.lets_in(Admits.CALLERS, scope, receive, send):
                await nothing(scope, receive, send)

        app.router.default = guarded

    async def lets_in(self, whom: Admits, scope: Scope, receive: Receive, send: Send) -> bool:
        """Whether the caller is one of these; if not, the request has been answered."""
        try:
            scope[_CALLER] = self._caller(whom, scope)
        except KVFerryError as error:
            what = f"{scope['method']} {scope['path']!r}"
            self._refusals.call(PORT, what, peer_of(scope), error)
            if whom is Admits.ANYBODY:  # a stale token keeps no probe out, but opens nothing either
                return True
            await _refusal(error)(scope, receive, send)
            return False
        return True

    def _caller(self, whom: Admits, scope: Scope) -> Caller | None:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        authorization = values[0].decode("latin-1") if values else None
        if whom is Admits.ANYBODY and authorization is None and not self._gate.is_open:
            return None
        if whom is Admits.OPERATORS:
            return self._gate.operator(authorization, scope["path"])
        return self._gate.caller(authorization)


def check_guarded(app: FastAPI) -> None:
    """Raise TypeError if anything is served that no guard stands before."""
    bare = [route for route in app.routes if not isinstance(route, GuardedRoute)]
    if bare:
        raise TypeError(f"not guarded: {bare}")


def known_caller(scope: Scope) -> Caller | None:
    """Who sent a request that has passed the guard; None: a stranger at an open route."""
    found: Caller | None = scope.get(_CALLER)
    return found


def caller_of(scope: Scope) -> Caller:
    """Likewise, at a route that is not open to strangers."""
    found = known_caller(scope)
    assert found is not None, "the route admits anybody"
    return found


def peer_of(scope: Scope) -> str:
    """Where a request came from, for the log."""
    return address(scope.get("client"))


def _refusal(error: KVFerryError) -> Application:
    response = failure_response(error)
    if response.status_code == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response
