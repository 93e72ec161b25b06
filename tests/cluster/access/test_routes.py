"""Whom each route of the HTTP door admits, however its path is written."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Response

from kvferry.cluster.access.gate import Gate
from kvferry.cluster.access.settings import AccessSettings, TenantSettings
from kvferry.cluster.access.tenants import Tenant
from kvferry.cluster.http_door.guard import Admits, Guard, GuardedRoute, check_guarded
from tests.certificates import secret_file
from tests.cluster.access.locked import ACME, OPERATOR
from tests.stack import LONG_S, Stack

METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PROPFIND")
WRONG = "wrong-token-0123456789"
Reply = tuple[int, dict[str, str], bytes]


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> AccessSettings:
    folder = tmp_path_factory.mktemp("keys")
    tenant = TenantSettings(Tenant("acme", "acme"), secret_file(folder / "acme", ACME.encode()))
    return AccessSettings(None, secret_file(folder / "tokens", OPERATOR.encode()), (tenant,))


@pytest.fixture(scope="module")
def stack(access: AccessSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("tiny"), http=True, access=access) as running:
        yield running
        running.assert_quiet()


def ask(stack: Stack, token: str | None, method: str, path: str) -> Reply:
    """An answer to a path that is sent as it is written here."""
    host, _, port = stack.url.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=LONG_S)
    headers = {"content-type": "application/json"}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    try:
        connection.request(method, path, b"{}", headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def routes(stack: Stack) -> list[GuardedRoute]:
    server: Any = stack.http_server
    found: list[GuardedRoute] = server._server.config.app.routes
    return found


def ways_to_write(path: str) -> list[str]:
    """A path, and others that a router might take for it."""
    escaped = "".join(f"%{ord(char):02x}" if char != "/" else char for char in path)
    tails = ("", "%0A", "%0D%0A", "/", "//", "?", "?x=1", ";x", "%00", "%20", "/.", "/../metrics")
    return [
        *(path + tail for tail in tails),
        *(f"/{path}", f"/.{path}", f"/x/..{path}", f"/%2f{path[1:]}", path.upper(), escaped),
        f"http://x{path}",
    ]


def test_every_route_says_whom_it_admits(stack: Stack) -> None:
    said = {route.path: route.admits for route in routes(stack)}
    assert {path for path, whom in said.items() if whom is Admits.ANYBODY} == {"/health", "/ready"}
    assert {path for path, whom in said.items() if whom is Admits.OPERATORS} == {"/metrics"}


def test_no_way_to_write_a_path_opens_a_route(stack: Stack) -> None:
    """A tenant gets no operators' answer, a stranger none but the open ones."""
    for route in routes(stack):
        for path in ways_to_write(route.path.replace("{name:path}", "stub")):
            for method in METHODS:
                status, headers, body = ask(stack, None, method, path)
                open_ = route.admits is Admits.ANYBODY and status in (200, 405)
                assert status == 401 or open_, (method, path, body)
                assert open_ or headers["www-authenticate"] == "Bearer"
                if route.admits is Admits.OPERATORS:
                    status, _, body = ask(stack, ACME, method, path)
                    assert status in (403, 404), (method, path, body)
                    assert b"kvferry_requests" not in body


@pytest.mark.parametrize("path", ["/metrics", "/metrics%0A"])
def test_operators_get_what_tenants_do_not(stack: Stack, path: str) -> None:
    """The second is the same route: which is why paths are not compared."""
    status, _, body = ask(stack, OPERATOR, "GET", path)
    assert status == 200 and b"kvferry_requests_accepted_total" in body
    assert ask(stack, ACME, "GET", path)[0] == 403
    assert ask(stack, WRONG, "GET", path)[0] == ask(stack, None, "GET", path)[0] == 401


@pytest.mark.parametrize("path", ["/v1/completions", "/metrics", "/nothing"])
def test_who_is_refused_need_not_send_the_body(stack: Stack, path: str) -> None:
    host, _, port = stack.url.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=LONG_S)
    try:
        connection.putrequest("POST", path)
        connection.putheader("content-length", "1000000")
        connection.putheader("content-type", "application/json")
        connection.endheaders()
        assert connection.getresponse().status == 401
    finally:
        connection.close()


# --- what nobody has classified -----------------------------------------------------------------


def answered(app: FastAPI, path: str) -> int:
    """The status that a caller without a token gets."""
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("no body is read")

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [],
        "client": ("192.0.2.1", 1),
    }
    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]  # dicts are what ASGI has
    (status,) = statuses
    return status


class Nothing:
    """Refusals that nobody reads."""

    def call(self, *told: object) -> None:
        """See ``Refusals.call``."""


def guarded_app(gate: Gate) -> FastAPI:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    refusals: Any = Nothing()
    Guard(gate, refusals).stand_before(app)
    return app


def test_a_route_that_nobody_has_classified_is_the_operators(stack: Stack) -> None:
    app = guarded_app(stack.node.access.gate)

    @app.get("/new")
    async def new() -> str:
        return "secret"

    check_guarded(app)
    (route,) = app.routes
    assert isinstance(route, GuardedRoute) and route.admits is Admits.OPERATORS
    assert answered(app, "/new") == answered(app, "/other") == 401


def test_what_cannot_be_guarded_is_not_served(stack: Stack) -> None:
    mounted = guarded_app(stack.node.access.gate)
    mounted.mount("/inner", FastAPI())
    bare = guarded_app(stack.node.access.gate)
    bare.add_route("/bare", lambda request: Response())
    for app in (mounted, bare):
        with pytest.raises(TypeError, match="not guarded"):
            check_guarded(app)


# --- what readiness tells -----------------------------------------------------------------------


def test_why_it_is_not_ready_is_told_to_callers_only(
    access: AccessSettings, tmp_path: Path
) -> None:
    with Stack(tmp_path, num_decode=0, wait_ready=False, http=True, access=access) as stack:
        for token, said in ((None, "not ready"), (WRONG, "not ready")):
            status, _, body = ask(stack, token, "GET", "/ready")
            assert (status, json.loads(body)["error"]["message"]) == (503, said)
        for token in (ACME, OPERATOR):
            status, _, body = ask(stack, token, "GET", "/ready")
            assert status == 503 and b"decode" in body


def test_without_tokens_anybody_is_told(tmp_path: Path) -> None:
    with Stack(tmp_path, num_decode=0, wait_ready=False, http=True) as stack:
        status, _, body = ask(stack, None, "GET", "/ready")
        assert status == 503 and b"decode" in body
