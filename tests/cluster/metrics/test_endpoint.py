"""The listening server: what it answers over HTTP while the router works."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

from kvferry.cluster.errors import PortUnavailable
from kvferry.cluster.metrics import endpoint
from kvferry.cluster.metrics.endpoint import MetricsServer
from kvferry.cluster.metrics.families import Family, families
from tests.cluster.metrics.scraping import read
from tests.cluster.routing import Bench

T = TypeVar("T")


def get(
    at: str, method: str = "GET", path: str = "/metrics", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    host, _, port = at.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=30)
    try:
        connection.request(
            method, path, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def serving(
    source: Callable[[], Sequence[Family]], ask: Callable[[str], T], address: str = "127.0.0.1:0"
) -> T:
    """What ``ask`` gets of a server that runs meanwhile."""

    async def run() -> T:
        server = MetricsServer(address, source)
        server.start()
        try:
            return await asyncio.to_thread(ask, server.endpoint)
        finally:
            await asyncio.to_thread(server.stop)

    return asyncio.run(run())


def bench_source() -> Callable[[], Sequence[Family]]:
    bench = Bench()
    return lambda: families(bench.router, "stub", "0.1", {}, bench.now)


def test_metrics_are_served_as_prometheus_asks_for_them() -> None:
    status, headers, body = serving(bench_source(), get)
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert read(body).value("kvferry_worker_ready", worker_id="decode-0") == 1


def test_a_page_is_compressed_for_who_takes_it() -> None:
    status, headers, body = serving(bench_source(), lambda at: get(at, Accept_Encoding="gzip"))
    assert (status, headers["Content-Encoding"]) == (200, "gzip")
    assert b"kvferry_worker_ready" in gzip.decompress(body)


def test_only_reading_is_allowed() -> None:
    status, _, _ = serving(bench_source(), lambda at: get(at, "POST"))
    assert status == 405


def test_samples_are_taken_on_the_loop_that_made_the_server() -> None:
    loops = []
    source = bench_source()

    def noted() -> Sequence[Family]:
        loops.append(asyncio.get_running_loop())
        return source()

    async def run() -> asyncio.AbstractEventLoop:
        server = MetricsServer("127.0.0.1:0", noted)
        server.start()
        try:
            assert (await asyncio.to_thread(get, server.endpoint))[0] == 200
        finally:
            await asyncio.to_thread(server.stop)
        return asyncio.get_running_loop()

    assert asyncio.run(run()) in loops


def test_a_scrape_that_fails_is_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Sequence[Family]:
        raise ArithmeticError("told to fail")

    status, _, body = serving(broken, get)
    assert status == 503
    assert b"could not be collected" in body
    assert [record.getMessage() for record in caplog.records] == ["a scrape failed"]


def test_a_client_that_says_nothing_is_hung_up_on_and_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(endpoint._Handler, "timeout", 0.2)

    def ask(at: str) -> tuple[int, bytes]:
        host, _, port = at.rpartition(":")
        with socket.create_connection((host, int(port)), 30) as silent:
            status, _, _ = get(at)
            return status, silent.recv(1)

    assert serving(bench_source(), ask) == (200, b"")
    assert capfd.readouterr().err == ""


def test_a_taken_port_is_named() -> None:
    async def run(address: str) -> None:
        MetricsServer(address, bench_source())

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PortUnavailable, match=f"{address} for metrics.*server.metrics"):
            asyncio.run(run(address))


def test_the_port_is_free_after_a_stop() -> None:
    where, status = serving(bench_source(), lambda at: (at, get(at)[0]))
    assert status == 200
    assert serving(bench_source(), get, where)[0] == 200


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_an_ipv6_address_is_taken_in_brackets() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 address on this machine")
    assert serving(bench_source(), get, "[::1]:0")[0] == 200
