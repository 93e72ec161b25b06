"""Clients that go, that do not read, or that are there when the server stops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kvferry.cluster.errors import PortUnavailable
from kvferry.cluster.http_door.server import HttpServer
from kvferry.cluster.server_limits import ServerLimits
from tests.stack import LONG_S, Stack, eventually
from tests.system.test_door import BIG, push_tokens

LONG: dict[str, Any] = {"prompt": [5] * 24, "max_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def request_bytes(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


@contextlib.contextmanager
def connected(stack: Stack, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    """A connection of which nobody reads; with a small window, if wanted."""
    host, _, port = stack.url.removeprefix("http://").rpartition(":")
    with socket.socket() as connection:
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(LONG_S)
        connection.connect((host, int(port)))
        yield connection


def queued(stack: Stack) -> None:
    stack.prefill.runner.allow(0)


def in_mid_prefill(stack: Stack) -> None:
    stack.prefill.runner.allow(1)


def decoding(stack: Stack) -> None:
    stack.decode.runner.allow(3)


@pytest.mark.parametrize("hold", [queued, in_mid_prefill, decoding])
@pytest.mark.parametrize(
    "extra", [{}, {"stream": True}, {"n": 3}, {"prompt": [[5] * 24, [6] * 24], "stream": True}]
)
def test_a_client_that_leaves_cancels_its_requests_in_whatever_state(
    hold: Callable[[Stack], None], extra: dict[str, Any], folder: Path
) -> None:
    with Stack(folder, http=True) as stack:
        hold(stack)
        held = stack.decode if hold is decoding else stack.prefill
        with connected(stack) as connection:
            connection.sendall(request_bytes({**LONG, **extra}))
            held.runner.wait_held()
        count = 2 if "prompt" in extra else 1
        eventually("they are cancelled", lambda: stack.counters().get("finished_abort", 0) == count)
        stack.release()
        stack.assert_quiet()
        assert stack.counters()["accepted"] == count


def test_a_client_that_leaves_before_its_body_has_come_starts_nothing(folder: Path) -> None:
    with Stack(folder, http=True) as stack:
        with connected(stack) as connection:
            connection.sendall(request_bytes(LONG)[:-5])
        with httpx2.Client(base_url=stack.url) as http:
            assert http.get("/health").status_code == 200
        assert stack.counters().get("accepted", 0) == 0
        server = stack.http_server
        assert server is not None
        eventually("no connection is kept", lambda: not server._server.server_state.connections)


def test_a_body_that_does_not_come_is_not_waited_for(folder: Path) -> None:
    limits = ServerLimits(slow_client_limit_s=0.3)
    with Stack(folder, http=True, limits=limits) as stack, connected(stack) as connection:
        connection.sendall(request_bytes(LONG)[:-5])
        answer = b""
        while b"body_too_slow" not in answer and (more := connection.recv(1 << 16)):
            answer += more
        assert answer.startswith(b"HTTP/1.1 408") and b"body_too_slow" in answer


def test_a_silent_connection_is_probed_as_the_limits_say(folder: Path) -> None:
    limits = ServerLimits(keepalive_s=7.0, keepalive_timeout_s=9.0)
    with Stack(folder, http=True, limits=limits) as stack, connected(stack) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        server = stack.http_server
        assert server is not None
        (protocol,) = server._server.server_state.connections
        ours = protocol.transport.get_extra_info("socket")
        tcp = socket.IPPROTO_TCP
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert ours.getsockopt(tcp, socket.TCP_KEEPIDLE) == 7
        probes = ours.getsockopt(tcp, socket.TCP_KEEPCNT)
        assert ours.getsockopt(tcp, socket.TCP_KEEPINTVL) * probes == 9


# --- clients that do not read -------------------------------------------------------------------

WIDE: dict[str, Any] = {"num_prefill": 0, "num_decode": 0, "wait_ready": False, "http": True}
SLOW: dict[str, Any] = {"prompt": "x", "max_tokens": 10 * BIG, "stream": True}


@contextlib.contextmanager
def unread_stream(stack: Stack) -> Iterator[socket.socket]:
    """A stream of which nothing is read, with buffers on its way that are soon full."""
    with connected(stack, receive_buffer=1 << 14) as connection:
        connection.sendall(request_bytes({**SLOW, "return_token_ids": True}))
        eventually("it is there", lambda: stack.on_loop(lambda: bool(stack.router.requests)))
        server = stack.http_server
        assert server is not None
        (protocol,) = server._server.server_state.connections
        ours = protocol.transport.get_extra_info("socket")
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        yield connection


def rest_of(connection: socket.socket, until: bytes) -> bytes:
    """What comes, until this has come."""
    received = bytearray()
    while until not in received:
        part = connection.recv(1 << 20)
        assert part, f"the connection ended before {until!r}: {bytes(received[-200:])!r}"
        received += part
    return bytes(received)


def test_a_slow_client_gets_what_waited_as_one(folder: Path) -> None:
    with (
        Stack(folder, **WIDE, max_model_len=20 * BIG) as stack,
        unread_stream(stack) as connection,
    ):
        for _ in range(4):
            push_tokens(stack, BIG)  # of these, some fill the transport
        for _ in range(100):
            push_tokens(stack, 2)
        stack.on_loop(lambda: stack.router.shut_down(stack.node.clock()))
        text = rest_of(connection, b"\r\n0\r\n")
        assert text.count(b'"text":') < 20, "what waited came piece by piece"
        assert b"[DONE]" not in text
        stack.assert_quiet()
        assert "slow_clients" not in stack.counters()


def test_a_client_that_takes_nothing_is_cancelled_counted_told_and_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = ServerLimits(slow_client_limit_s=1.0)
    with (
        Stack(folder, **WIDE, max_model_len=20 * BIG, limits=limits) as stack,
        unread_stream(stack) as connection,
    ):
        push_tokens(stack, BIG, times=4)
        push_tokens(stack, 2)  # these have to wait
        eventually("it is cancelled", lambda: stack.counters().get("slow_clients"))
        stack.assert_quiet()
        assert stack.counters()["finished_abort"] == stack.counters()["slow_clients"] == 1
        text = rest_of(connection, b"\r\n0\r\n")  # the end of the answer
        assert b"took nothing of its stream for 1 s" in text and b"[DONE]" not in text
        (record,) = [each for each in caplog.records if "took nothing" in each.getMessage()]
        request_id, attempt = (getattr(record, name) for name in ("request_id", "attempt"))
        assert f"request {request_id}: " in record.getMessage() and attempt == 1
        with httpx2.Client(base_url=stack.url) as http:  # and nobody else has noticed
            assert http.get("/health").status_code == 200


# --- stopping -----------------------------------------------------------------------------------


def stop(stack: Stack, grace_s: float = 0.0) -> float:
    """Stop the door; the seconds that it took."""
    server = stack.http_server
    assert server is not None
    began = time.monotonic()
    stack._call(server.stop(grace_s))
    return time.monotonic() - began


def assert_closed(stack: Stack) -> None:
    with pytest.raises(ConnectionRefusedError), connected(stack):
        pass


def test_a_stop_ends_what_runs_with_a_typed_error(
    folder: Path, in_background: Callable[[Any], Any]
) -> None:
    with Stack(folder, http=True) as stack:
        stack.decode.runner.allow(2)
        with httpx2.Client(base_url=stack.url, timeout=LONG_S) as http:
            answer = in_background(lambda: http.post("/v1/completions", json=LONG))
            stack.decode.runner.wait_held()
            assert stop(stack) < LONG_S / 2
        assert answer().status_code == 503
        assert answer().json()["error"]["code"] == "worker_lost"
        assert_closed(stack)


def test_a_stop_ends_a_stream_with_a_typed_error(folder: Path) -> None:
    body = {**LONG, "stream": True}
    with Stack(folder, http=True) as stack:
        stack.decode.runner.allow(2)
        with (
            httpx2.Client(base_url=stack.url, timeout=LONG_S) as http,
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            assert stop(stack) < LONG_S / 2
            *_, last = lines
        assert answer.status_code == 200
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "worker_lost"
        assert_closed(stack)


def test_a_stop_lets_what_runs_finish_within_its_grace_and_refuses_the_rest(
    folder: Path, in_background: Callable[[Any], Any]
) -> None:
    with Stack(folder, http=True) as stack, connected(stack) as kept:
        stack.decode.runner.allow(2)
        kept.sendall(request_bytes(LONG)[:-5])
        with httpx2.Client(base_url=stack.url, timeout=LONG_S) as http:
            answer = in_background(lambda: http.post("/v1/completions", json=LONG))
            stack.decode.runner.wait_held()
            stopping = in_background(lambda: stop(stack, LONG_S / 2))
            server = stack.http_server
            assert server is not None
            eventually("it stops", lambda: server._door.draining)
            stack.release()
            assert answer().json()["usage"]["completion_tokens"] == 60
            kept.sendall(request_bytes(LONG)[-5:])  # whose head came in time
            assert kept.recv(1 << 16).startswith(b"HTTP/1.1 200")
            assert stopping() < LONG_S / 2


def test_a_stop_does_not_wait_for_a_client_that_does_not_read(folder: Path) -> None:
    with (
        Stack(folder, **WIDE, max_model_len=20 * BIG) as stack,
        unread_stream(stack),
    ):
        for _ in range(4):
            push_tokens(stack, BIG)
        assert stop(stack) < LONG_S / 2
        stack.assert_quiet()


def test_a_taken_port_is_a_typed_error(folder: Path) -> None:
    with Stack(folder, **WIDE) as stack:
        taken = stack.url.removeprefix("http://")

        def another() -> None:
            HttpServer(stack.node, taken)

        with pytest.raises(PortUnavailable, match=f"cannot listen on {taken}"):
            stack.on_loop(another)


def test_a_server_that_never_started_lets_go_of_its_port(folder: Path) -> None:
    with Stack(folder, **WIDE) as stack:

        async def made() -> str:
            server = HttpServer(stack.node, "127.0.0.1:0")
            await server.stop(0.0)
            return server.endpoint

        endpoint = asyncio.run_coroutine_threadsafe(made(), stack._loop).result(LONG_S)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])))
