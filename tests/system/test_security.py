"""A locked cluster of real processes: what listens, and what becomes of those who do not belong.

One cluster for all of it: mutual TLS, tokens and tenants at the doors, the cluster's key between
its nodes.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx2
import psutil
import pytest
import zmq

from kvferry.cluster.cli import main
from kvferry.cluster.client import Client
from kvferry.cluster.client_security import ClientSecurity
from kvferry.cluster.errors import (
    ClusterUnreachable,
    KVFerryError,
    PermissionDenied,
    Unauthenticated,
)
from kvferry.engine.weights.store import ModelFolder
from tests.certificates import Authority, Pair, secret_file
from tests.cluster.metrics.scraping import Scrape, read
from tests.system.listening import classify, empty_actor, listed_ports, sockets_of
from tests.system.processes import SOON_S, Served, eventually
from tests.system.test_metrics import log_of

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]

OPERATOR, ACME, ZETA, WRONG = (f"{name}-0123456789abcdef" for name in ("op", "acme", "zeta", "no"))
SHORT: dict[str, Any] = {"max_tokens": 2, "ignore_eos": True, "temperature": 0.0}
GARBAGE = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + bytes(range(256))


@dataclass
class Locked:
    """The cluster, and a client's good certificate."""

    served: Served
    ours: Authority
    theirs: Authority
    pair: Pair

    def security(self, token: str | None, pair: Pair | None = None) -> ClientSecurity:
        shown = pair or self.pair
        return ClientSecurity(self.ours.ca, shown.cert, shown.key, token)

    def client(self, token: str | None, pair: Pair | None = None) -> Client:
        security = self.security(token, pair)
        return Client(self.served.endpoint, timeout_s=SOON_S, security=security)

    def https(self, door: str, token: str | None) -> httpx2.Client:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        context = self.security(None).ssl_context()
        assert context is not None
        base_url = f"https://{self.served.ready[door]}"
        return httpx2.Client(base_url=base_url, verify=context, headers=headers, timeout=SOON_S)

    def scrape(self) -> Scrape:
        with self.https("metrics", OPERATOR) as http:
            return read(http.get("/metrics").content)

    def logs(self) -> dict[str, str]:
        """What each process of ours has logged."""
        with self.client(OPERATOR) as client:
            status = client.status()
        pids = {entry.worker.worker_id: entry.worker.pid for entry in status.workers}
        pids[status.routers[0].router_id] = status.routers[0].pid
        return {name: log_of(pid).read_text(encoding="utf-8") for name, pid in pids.items()}


@pytest.fixture(scope="module")
def locked(
    default_model: ModelFolder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Locked]:
    folder: Path = tmp_path_factory.mktemp("locked")
    ours, theirs = Authority(folder, "ours"), Authority(folder, "theirs")
    server = ours.pair("127.0.0.1")
    config = {
        "model": {"max_model_len": 256},
        "cache": {"num_blocks": 64},
        # a busy machine is no death here
        "router": {"heartbeat_timeout": "60s", "worker_wait": "120s"},
        "server": {
            "http": "127.0.0.1:0",
            "metrics": "127.0.0.1:0",
            "tls": {"cert": server.cert, "key": server.key, "client_ca": ours.ca},
            "auth": {"tokens_file": secret_file(folder / "tokens", OPERATOR.encode())},
        },
        "tenants": {
            "acme": {"key_file": secret_file(folder / "acme", ACME.encode())},
            "zeta": {"key_file": secret_file(folder / "zeta", ZETA.encode())},
        },
    }
    with Served(folder, json.dumps(config)) as served:  # JSON is YAML
        yield Locked(served, ours, theirs, ours.pair("client"))
        assert served.process.poll() is None, served.err


def test_what_listens_is_what_the_page_lists(locked: Locked) -> None:
    """Every listening socket of every process is of one row of SECURITY.md, and there as it says;
    and every row is of some socket, but that of Ray Serve, which is not here (``tests/deploy``).
    """
    with locked.client(OPERATOR) as client:
        status = client.status()
    found = classify(locked.served, status)
    wanted = listed_ports()
    assert {each.name for each in found} | {"ray-serve"} == set(wanted)
    for each in found:
        row = wanted[each.name]
        assert each.process in row.processes, each
        assert each.is_loopback is row.is_loopback, each


def test_on_every_address_our_processes_have_what_ray_has_and_no_more(locked: Locked) -> None:
    """Whose a socket there is cannot be seen, so they are counted beside a process of Ray's only;
    so are UDP, which nobody has a row for, and Unix sockets with a file.
    """
    with locked.client(OPERATOR) as client:
        status = client.status()
    pids = {entry.worker.worker_id: entry.worker.pid for entry in status.workers}
    pids[status.routers[0].router_id] = status.routers[0].pid
    with empty_actor(locked.served.ready["ray_address"]) as pid:
        wanted = sockets_of(pid)
    assert wanted.wildcard > 0, "the page says that Ray listens on every address"
    for name, ours in pids.items():
        assert sockets_of(ours) == wanted, name


def assert_refused(kind: type[KVFerryError], call: Callable[[], object]) -> None:
    with pytest.raises(kind):
        call()


def test_attempts_at_the_doors_are_refused_counted_and_logged(locked: Locked) -> None:
    before = locked.scrape().by("reason", "kvferry_requests_rejected_total")
    for token in (None, WRONG):
        with locked.client(token) as client:
            assert_refused(Unauthenticated, client.status)
            assert_refused(Unauthenticated, partial(client.generate_text, "x", **SHORT))
    with locked.client(ACME) as client:
        assert_refused(PermissionDenied, client.audit)
        assert_refused(PermissionDenied, lambda: client.generate_text("x", tenant="zeta", **SHORT))
        assert client.generate_text("x", tenant="acme", **SHORT).usage.completion_tokens == 2
    body = {"prompt": "x", "tenant": "zeta"}
    for door, path, token, status in (
        ("http", "/v1/completions", None, 401),
        ("http", "/v1/completions", WRONG, 401),
        ("http", "/v1/completions", ACME, 403),
        ("metrics", "/metrics", None, 401),
        ("metrics", "/metrics", WRONG, 401),
        ("metrics", "/metrics", ZETA, 403),
    ):
        with locked.https(door, token) as http:
            said = http.post(path, json=body) if door == "http" else http.get(path)
            assert said.status_code == status, said.text
    after = locked.scrape().by("reason", "kvferry_requests_rejected_total")
    risen = {reason: after[reason] - before.get(reason, 0) for reason in after}
    assert {reason: n for reason, n in risen.items() if n} == {
        "Unauthenticated": 8,
        "PermissionDenied": 4,
    }
    log = locked.logs()["router-0"]
    assert len(re.findall("refused .*Unauthenticated", log)) == 8
    assert len(re.findall("refused .*PermissionDenied", log)) == 4


def knock(address: str, said: bytes, context: ssl.SSLContext | None = None) -> None:
    """Say something at HOST:PORT and wait for the hang-up; nothing good may come back."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    heard = b""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, int(port)), timeout=SOON_S) as plain,
        contextlib.nullcontext(plain)
        if context is None
        else context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        connection.sendall(said)
        while part := connection.recv(4096):
            heard += part
    assert b"200 OK" not in heard and b"kvferry" not in heard and b"layout" not in heard


def test_connections_that_do_not_belong_are_refused_counted_and_logged(locked: Locked) -> None:
    expired = locked.ours.pair("client", expired=True)
    foreign = locked.theirs.pair("client")
    wrong = [
        None,  # plaintext
        ssl.create_default_context(cafile=locked.ours.ca),  # no certificate
        ssl.create_default_context(cafile=locked.theirs.ca),  # does not trust the server
        locked.security(None, expired).ssl_context(),
        locked.security(None, foreign).ssl_context(),
    ]
    for door in ("grpc", "http", "metrics"):
        for context in wrong:
            knock(locked.served.ready[door], GARBAGE, context)
    for pair in (expired, foreign):
        with locked.client(OPERATOR, pair) as client:
            assert_refused(ClusterUnreachable, client.status)

    with locked.client(OPERATOR) as client:
        status = client.status()
    inner = [each for each in classify(locked.served, status) if each.name in ("control", "kv")]
    assert Counter((each.process, each.name) for each in inner) == {
        ("router", "control"): 1,
        ("worker", "control"): 2,
        ("worker", "kv"): 2,
    }
    for each in inner:
        knock(each.address, GARBAGE)
        if each.name == "control":
            send_without_key(each.address)
    wanted = {"http": 5, "metrics": 5, "control": 6, "kv": 2}
    eventually(
        "they are counted", lambda: refused(locked.scrape()), lambda found: found == wanted, SOON_S
    )
    logs = locked.logs()
    assert "refused a connection to the http port (tls)" in logs["router-0"]
    assert "refused a connection to the metrics port (tls)" in logs["router-0"]
    assert "Handshake failed" in logs["router-0"], "gRPC's own words"
    for name in ("router-0", "prefill-0", "decode-0"):
        assert "refused a connection for messages from " in logs[name]
    for name in ("prefill-0", "decode-0"):
        assert "refused a reader at 127.0.0.1" in logs[name]
    with locked.client(ACME) as client:
        assert client.generate_text("hello", **SHORT).usage.completion_tokens == 2


def refused(scrape: Scrape) -> dict[str, float]:
    """Refused connections so far, by port."""
    return scrape.by("port", "kvferry_connections_refused_total")


def send_without_key(address: str) -> None:
    """A ZeroMQ peer that knows no key: its message is never taken."""
    context = zmq.Context()
    push: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    monitor = push.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)
    push.setsockopt(zmq.RECONNECT_IVL, -1)
    try:
        push.connect(f"tcp://{address}")
        assert monitor.poll(int(SOON_S * 1000)), "neither let in nor hung up on"
        event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
        assert event == zmq.Event.DISCONNECTED
    finally:
        context.destroy(linger=0)


def test_no_token_is_in_any_log_or_on_any_command_line(locked: Locked) -> None:
    """Of ours and of Ray's: everything in its session's folder of logs.

    Environments are not looked at: what the kernel shows is what a process began with, before any
    token was read. The cluster's key is in no place where a test could read it to compare.
    """
    secrets = [token.encode() for token in (OPERATOR, ACME, ZETA, WRONG)]
    with locked.client(WRONG) as client:
        assert_refused(Unauthenticated, client.status)
    with locked.client(OPERATOR) as client:
        logs = log_of(client.status().routers[0].pid).parent
    texts = {path: path.read_bytes() for path in logs.rglob("*") if path.is_file()}
    assert len(texts) > len(locked.logs()), "Ray's own are there"
    assert any(b"refused" in text for text in texts.values()), "and ours"
    texts[Path("serve")] = (locked.served.err + locked.served.out).encode()
    for process in locked.served.family():
        with contextlib.suppress(psutil.Error):
            texts[Path(f"command line of {process.pid}")] = " ".join(process.cmdline()).encode()
    for path, text in texts.items():
        assert not any(secret in text for secret in secrets), path


def test_ray_asks_for_its_token(locked: Locked) -> None:
    with grpc.insecure_channel(locked.served.ready["ray_address"]) as channel:
        call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo", bytes, bytes)
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=SOON_S)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_every_command_gets_in_with_certificate_and_token(
    locked: Locked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files: tuple[str, ...] = ("--tls-ca", locked.ours.ca, "--tls-cert", locked.pair.cert)
    files += ("--tls-key", locked.pair.key)
    at = ("--endpoint", locked.served.endpoint, *files, "--json")
    load: tuple[str, ...] = ("--num-requests", "2", "--concurrency", "1", "--input-tokens", "8")
    load += ("--output-tokens", "2")
    monkeypatch.setenv("KVFERRY_TOKEN", OPERATOR)
    monkeypatch.setenv("OTHER_NAME", ACME)
    url = ("--url", f"https://{locked.served.ready['http']}", "--api-key-env", "OTHER_NAME")
    for command in (
        ("status", *at),
        ("blocks", *at),
        ("scale", "--decode", "1", *at),
        ("generate", "hello", "--max-tokens", "2", *at),
        ("generate", "hello", "--max-tokens", "2", "--token-env", "OTHER_NAME", *at),
        ("bench", "serve", *load, "--no-roof", *at),
        ("loadgen", "run", *load, "--warm-up", "0", *at),
        ("loadgen", "run", *load, "--warm-up", "0", *url, *files, "--json"),
    ):
        code = main(command)
        out = capsys.readouterr().out
        assert code == 0 and json.loads(out)["ok"], (command, out)
        assert OPERATOR not in out and ACME not in out
    assert main(("status", *at, "--token-env", "OTHER_NAME")) == 1
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "PermissionDenied"
    monkeypatch.delenv("KVFERRY_TOKEN")
    assert main(("status", *at)) == 1
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "Unauthenticated"
