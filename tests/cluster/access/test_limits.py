"""Strangers hold no connection for long, nor all of them; who is hung up on is counted and logged.

Limits are short here; whoever is hung up on waits for it, so nothing depends on how fast it comes.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvferry.cluster.access.settings import AccessSettings
from kvferry.cluster.access.tls import TlsFiles
from kvferry.cluster.http_door import connections
from kvferry.cluster.server_limits import ServerLimits, connections_for
from tests.certificates import Authority
from tests.cluster.access.locked import Locked
from tests.stack import LONG_S, Stack, eventually

SHORT_S = 0.3
UNUSED: Any = (None, None, None)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
MAX_CONCURRENT_STREAMS = 3  # its number in HTTP/2's SETTINGS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@contextlib.contextmanager
def opened(folder: Path, access: AccessSettings | None = None, **limits: Any) -> Iterator[Locked]:
    """A cluster with these limits, and the others as they are."""
    with Stack(
        folder,
        http=True,
        metrics=True,
        limits=ServerLimits(**limits),
        access=access or AccessSettings(),
    ) as stack:
        yield Locked(stack, *UNUSED)
        stack.assert_quiet()


@contextlib.contextmanager
def connected(door: Locked, port: str) -> Iterator[socket.socket]:
    with socket.create_connection(door.address(port), timeout=LONG_S) as connection:
        yield connection


def rest(connection: socket.socket) -> bytes:
    """What comes until the other end hangs up."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            said += part
    return said


def dribble(connection: socket.socket, byte: bytes) -> None:
    """Send the same byte again and again, with as much between as a patient attacker leaves."""
    connection.settimeout(SHORT_S / 20)
    with contextlib.suppress(ConnectionError):
        while True:
            connection.sendall(byte)
            with contextlib.suppress(TimeoutError):
                if not connection.recv(1 << 16):
                    return


def name_of(connection: socket.socket) -> str:
    host, port = connection.getsockname()
    return f"{host}:{port}"


def assert_told(
    door: Locked, port: str, reason: str, peer: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is counted once, and logged with where it came from."""
    eventually("it is counted", lambda: door.refused(port), LONG_S)
    assert door.refused(port) == Counter({reason: 1})
    said = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(f"refused a connection to the {port} port ({reason}) from {peer}: ")


# --- HTTP ---------------------------------------------------------------------------------------


def silence(connection: socket.socket) -> None:
    """Say nothing."""


def half_a_header(connection: socket.socket) -> None:
    connection.sendall(HEALTH[:-4])


def a_header_in_drops(connection: socket.socket) -> None:
    half_a_header(connection)
    dribble(connection, b"x")


def half_a_second_header(connection: socket.socket) -> None:
    connection.sendall(HEALTH)
    answer = b""
    while not answer.endswith(b'{"status":"ok"}'):
        answer += connection.recv(1 << 16)
    half_a_header(connection)


def a_second_header_in_drops(connection: socket.socket) -> None:
    half_a_second_header(connection)
    dribble(connection, b"x")


@pytest.mark.parametrize(
    "behave",
    [
        silence,
        half_a_header,
        a_header_in_drops,
        half_a_second_header,
        a_second_header_in_drops,
    ],
)
def test_a_header_that_does_not_come_is_not_waited_for(
    behave: Callable[[socket.socket], None], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(folder, header_limit_s=SHORT_S) as door, connected(door, "http") as connection:
        name = name_of(connection)
        behave(connection)
        assert rest(connection) == b""
        assert_told(door, "http", "slow", name, caplog)


def test_a_body_that_comes_after_its_answer_is_no_late_header(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is idle then, and ends like any that is."""
    monkeypatch.setattr(connections, "IDLE_LIMIT_S", SHORT_S)
    with opened(folder, header_limit_s=SHORT_S) as door, connected(door, "http") as connection:
        connection.sendall(b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404")
        connection.sendall(b"abc")
        rest(connection)
        assert not door.refused("http")


def test_a_request_that_takes_long_is_not_cut_off(folder: Path) -> None:
    with opened(folder, header_limit_s=SHORT_S) as door, connected(door, "http") as connection:
        door.stack.prefill.runner.allow(0)
        body = b'{"prompt": "x", "max_tokens": 2}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        door.stack.prefill.runner.wait_held()
        with connected(door, "http") as later:
            assert rest(later) == b"", "its time is over, though it began later"
        door.stack.release()
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_client_that_takes_no_answers_is_not_kept(folder: Path) -> None:
    """It needs no token for this: pipelined requests, of whose answers it reads none."""
    with opened(folder) as door, connected(door, "http") as connection:
        server = door.stack.http_server
        assert server is not None
        server._kind.stall_limit_s = SHORT_S
        connection.setblocking(False)
        state = server._server.server_state

        def is_gone() -> bool:
            with contextlib.suppress(OSError):
                connection.send(HEALTH * 1000)
            return state.total_requests > 0 and not state.connections

        eventually("it is hung up on", is_gone, LONG_S)


def test_there_are_only_so_many_connections(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(folder, max_connections=2) as door, contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(connected(door, "http")) for _ in range(2))
        for each in (first, second):
            each.sendall(HEALTH)
            assert each.recv(1 << 16).startswith(b"HTTP/1.1 200")
        with connected(door, "http") as third:
            name = name_of(third)
            assert rest(third) == b""
        assert_told(door, "http", "crowded", name, caplog)
        first.close()

        def is_served() -> bool:
            with contextlib.suppress(httpx2.TransportError):
                return httpx2.get(f"{door.stack.url}/health").status_code == 200
            return False

        eventually("there is room again", is_served, LONG_S)


def test_the_limit_is_above_what_the_router_lets_wait() -> None:
    assert connections_for(1024) == ServerLimits().max_connections == ServerLimits().max_streams
    assert connections_for(10**6) > 10**6


# --- handshakes ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls(authorities: tuple[Authority, Authority]) -> AccessSettings:
    server = authorities[0].pair("127.0.0.1")
    return AccessSettings(TlsFiles(server.cert, server.key))


def client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1").do_handshake()
    return outgoing.read()


@pytest.mark.parametrize(
    "said", [b"", client_hello()[:40], client_hello()], ids=["nothing", "a part", "a hello"]
)
@pytest.mark.parametrize("port", ["http", "metrics"])
def test_who_hangs_up_in_a_handshake_is_told_of(
    port: str, said: bytes, tls: AccessSettings, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(folder, tls) as door:
        with connected(door, port) as connection:
            name = name_of(connection)
            connection.sendall(said)
        assert_told(door, port, "tls", name, caplog)


@pytest.mark.parametrize(
    "said", [b"", client_hello()[:40], client_hello()], ids=["nothing", "a part", "a hello"]
)
@pytest.mark.parametrize("port", ["http", "metrics"])
def test_a_handshake_that_does_not_end_is_not_waited_for(
    port: str, said: bytes, tls: AccessSettings, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {"handshake_limit_s": SHORT_S, "scrape_limit_s": SHORT_S}
    with opened(folder, tls, **limits) as door, connected(door, port) as connection:
        name = name_of(connection)
        connection.sendall(said)
        rest(connection)
        assert_told(door, port, "slow", name, caplog)


def test_connections_in_a_handshake_count(
    tls: AccessSettings, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        opened(folder, tls, max_connections=1) as door,
        connected(door, "http"),
        connected(door, "http") as second,
    ):
        assert rest(second) == b""
        assert_told(door, "http", "crowded", name_of(second), caplog)


# --- metrics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("behave", [silence, half_a_header, a_header_in_drops])
def test_a_scrape_has_its_time(
    behave: Callable[[socket.socket], None], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(folder, scrape_limit_s=SHORT_S) as door, connected(door, "metrics") as connection:
        name = name_of(connection)
        behave(connection)
        rest(connection)
        assert_told(door, "metrics", "slow", name, caplog)


def test_there_are_only_so_many_scrapes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(folder, max_scrapes=2) as door:
        with connected(door, "metrics"), connected(door, "metrics"):
            with connected(door, "metrics") as third:
                name = name_of(third)
                assert rest(third) == b""
            assert_told(door, "metrics", "crowded", name, caplog)
        metrics = door.stack.metrics_server
        assert metrics is not None
        address = metrics.endpoint
        eventually("the others have gone", lambda: not metrics._server._open, LONG_S)
        assert httpx2.get(f"http://{address}/metrics").status_code == 200


@pytest.mark.parametrize("line", [b"\x00" * 65000, b"GET /x " + b"\xff" * 65000, b"x" * 70000])
def test_a_request_line_fills_no_log(
    line: bytes, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(folder) as door, connected(door, "metrics") as connection:
        name = name_of(connection)
        with contextlib.suppress(ConnectionError):
            connection.sendall(line + b"\r\n\r\n")
        rest(connection)
        assert_told(door, "metrics", "malformed", name, caplog)
        assert all(len(record.getMessage()) < 1000 for record in caplog.records)


# --- gRPC ---------------------------------------------------------------------------------------


def settings_of(connection: socket.socket) -> dict[int, int]:
    """What the server's first frame of HTTP/2 says."""
    connection.sendall(PREFACE)
    with connection.makefile("rb") as file:
        head = file.read(9)
        if len(head) < 9:
            return {}
        content = file.read(int.from_bytes(head[:3], "big"))
    pairs = [content[at : at + 6] for at in range(0, len(content), 6)]
    return {int.from_bytes(p[:2], "big"): int.from_bytes(p[2:], "big") for p in pairs}


def test_a_grpc_connection_that_says_nothing_is_not_kept(folder: Path) -> None:
    with opened(folder, handshake_limit_s=SHORT_S) as door, connected(door, "grpc") as connection:
        rest(connection)  # or it would time out


def test_a_grpc_connection_without_calls_is_not_kept(folder: Path) -> None:
    with opened(folder, idle_limit_s=SHORT_S) as door, connected(door, "grpc") as connection:
        assert settings_of(connection)
        rest(connection)


def test_a_grpc_connection_has_only_so_many_calls(folder: Path) -> None:
    with opened(folder, max_streams=7) as door, connected(door, "grpc") as connection:
        assert settings_of(connection)[MAX_CONCURRENT_STREAMS] == 7


def test_there_are_only_so_many_grpc_connections(folder: Path) -> None:
    with (
        opened(folder, max_connections=2) as door,
        connected(door, "grpc") as first,
        connected(door, "grpc") as second,
        connected(door, "grpc") as third,
    ):
        assert settings_of(first) and settings_of(second)
        assert not settings_of_closed(third)


def settings_of_closed(connection: socket.socket) -> dict[int, int]:
    with contextlib.suppress(ConnectionError):
        return settings_of(connection)
    return {}


def test_strangers_have_only_so_many_streams_together(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        opened(folder, max_open_streams=2) as door,
        grpc.insecure_channel(door.stack.endpoint) as channel,
        grpc.insecure_channel(door.stack.endpoint) as other,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch
        ask = health_pb2.HealthCheckRequest()
        streams = [watch(ask, timeout=LONG_S) for _ in range(2)]
        for stream in streams:
            next(stream)
        reflect = reflection_pb2_grpc.ServerReflectionStub(other).ServerReflectionInfo
        for call in (
            health_pb2_grpc.HealthStub(other).Watch(ask, timeout=LONG_S),
            reflect(iter([reflection_pb2.ServerReflectionRequest()]), timeout=LONG_S),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert door.rejected() == Counter({"Overloaded": 2})
        assert caplog.text.count("from ipv4:127.0.0.1:") == 2
        health_pb2_grpc.HealthStub(other).Check(ask, timeout=LONG_S)  # probes go on
        streams[0].cancel()

        def has_room() -> bool:
            answers = reflect(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=LONG_S
            )
            with contextlib.suppress(grpc.RpcError):
                return "kvferry.v1" in str(next(answers))
            return False

        eventually("there is room again", has_room, LONG_S)
