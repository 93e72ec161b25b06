"""``demo`` and ``serve`` on a fake cluster: READY line, signals, documents, and a stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster.cli import demo, main
from kvferry.cluster.cli.serve import ready_line, write_whole
from kvferry.cluster.config import Config, load_config
from kvferry.cluster.errors import PortUnavailable, WorkerLost
from kvferry.protos import kvferry_pb2 as pb
from tests.cluster import documents
from tests.cluster.fake_server import FakeServer, accepted, delta


class FakeCluster:
    """A running cluster whose gRPC is the fake server's."""

    http: str | None = None
    ray_address = "127.0.0.1:6379"
    metrics = None
    startup_s = 1.5

    def __init__(self, endpoint: str) -> None:
        self.config = Config()
        self.grpc = endpoint
        self.stopped = 0

    def ended(self) -> bool:
        return False

    def begin_stop(self, grace_s: float) -> None:
        pass

    def stop(self, grace_s: float) -> None:
        self.stopped += 1


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@pytest.fixture
def cluster(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    fake = FakeCluster(server.endpoint)
    monkeypatch.setattr(demo, "start", lambda config, progress: fake)
    monkeypatch.setattr(demo, "QUIET_WITHIN_S", 0.0)
    return fake


def test_demo_document_tells_what_moved(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--json"]) == 0
    printed = capsys.readouterr()
    document = documents.parse(printed.out)
    assert document["ok"]
    assert document["startup_s"] == 1.5
    assert len(document["requests"]) == 4
    assert document["totals"]["blocks_moved"] == 8
    assert document["totals"]["num_failed"] == 0
    assert [pool["consistent"] for pool in document["pools"]] == [True, True]
    assert "The capital of France is" in printed.err
    assert cluster.stopped == 1


def test_demo_shows_people_the_texts(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo"]) == 0
    shown = capsys.readouterr().out
    assert "The capital of France is The capital" in shown
    assert "prefill-0 → decode-0" in shown


def test_demo_prompts_include_one_of_at_least_three_chunks() -> None:
    config = load_config(None, {"scheduler.chunk_tokens": 32})
    words = [len(text.split()) for text in demo.prompts(config)]
    assert len(words) == 4
    assert max(words) > 2 * 32


def test_demo_fails_if_a_request_fails_and_still_stops(
    cluster: FakeCluster, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.scripts["def fibonacci(n):"] = [accepted(), delta(0, 7), WorkerLost("decode-0 died")]
    assert main(["demo", "--json"]) == 1
    document = documents.parse(capsys.readouterr().out)
    assert document["totals"]["num_failed"] == 1
    failed = [r for r in document["requests"] if r["error"] is not None]
    assert [r["error"]["message"] for r in failed] == ["decode-0 died"]
    assert "1 of 4 requests failed" in document["error"]["message"]
    assert cluster.stopped == 1


def spoil(pool: pb.Pool, field: str) -> None:
    if field == "consistent":
        pool.consistent = False
    else:
        setattr(pool, field, 1)


@pytest.mark.parametrize(
    "field",
    ["consistent", "num_pinned", "num_in_transfer", "num_referenced", "num_quarantined"],
)
def test_demo_fails_if_the_audit_is_not_clean(
    field: str, cluster: FakeCluster, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(server.audit, pb.AuditResponse)
    spoil(server.audit.pools[0], field)
    assert main(["demo", "--json"]) == 1
    assert "prefill-0" in documents.parse(capsys.readouterr().out)["error"]["message"]


def test_demo_waits_until_leases_are_released(
    cluster: FakeCluster, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "QUIET_WITHIN_S", 30.0)
    assert isinstance(server.audit, pb.AuditResponse)
    pinned = pb.AuditResponse()
    pinned.CopyFrom(server.audit)
    pinned.pools[0].num_pinned = 2
    answers = [pinned, pinned, server.audit]

    class Releasing(FakeServer):
        async def Audit(self, request: pb.AuditRequest, context: Any) -> pb.AuditResponse:
            return answers.pop(0)

    with Releasing() as releasing:
        cluster.grpc = releasing.endpoint
        assert main(["demo"]) == 0
    assert answers == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PortUnavailable("127.0.0.1:50051 is taken"), 3),
        (WorkerLost("prefill-0 did not start"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_failed_start_has_its_exit_code_and_document(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def failing(config: Config, progress: object) -> FakeCluster:
        raise error

    monkeypatch.setattr(demo, "start", failing)
    assert main(["demo", "--json"]) == code
    assert documents.parse(capsys.readouterr().out)["ok"] is False


@pytest.mark.parametrize("argv", [["demo", "--prefill", "0"], ["serve", "--grpc", "nonsense"]])
def test_wrong_configuration_is_exit_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "configuration: " in capsys.readouterr().err


def test_flags_override_the_configuration_file(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kvferry.yaml"
    file.write_text("prefill: {replicas: 3}\ndecode: {replicas: 2}\n")
    seen: list[Config] = []

    def recording(config: Config, progress: object) -> FakeCluster:
        seen.append(config)
        return FakeCluster(server.endpoint)

    monkeypatch.setattr(demo, "start", recording)
    monkeypatch.setenv("KVFERRY_LOG", "debug")
    monkeypatch.setenv("KVFERRY_KERNELS", "cpu")
    monkeypatch.setenv("KVFERRY_ISA", "baseline")
    main(["demo", "--config", str(file), "--prefill", "1", "--connector", "shm"])
    (config,) = seen
    assert (config.replicas().prefill, config.replicas().decode) == (1, 2)
    assert config.transfer.connector == "shm"
    assert config.logging.level == "debug"
    assert (config.debug.kernels, config.debug.isa) == ("cpu", "baseline")
    assert config.server.grpc == "127.0.0.1:0"


# Runs the real command in a process of its own, with a cluster that only says what happens to it.
SERVE = """
import sys, time
from kvferry.cluster.cli import main, serve
from kvferry.cluster.errors import NotReady

class Cluster:
    grpc, http, metrics = "127.0.0.1:7", "127.0.0.1:8", None
    ray_address, startup_s = "127.0.0.1:6379", 0.0
    def ended(self):
        return {ended}
    def begin_stop(self, grace_s):
        pass
    def leave(self):
        print("LEFT", flush=True)
    def stop(self, grace_s):
        print("STOPPING", flush=True)
        {stop}

def start(config, progress):
    {start}
    Cluster.config = config
    return Cluster()

serve.start = start
sys.exit(main(["serve", *sys.argv[1:]]))
"""
Serve = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def serve() -> Iterator[Serve]:
    running: list[subprocess.Popen[str]] = []

    def run(
        *flags: str, start: str = "pass", stop: str = "pass", ended: object = False
    ) -> subprocess.Popen[str]:
        code = SERVE.format(start=start, stop=stop, ended=ended)
        process = subprocess.Popen(
            [sys.executable, "-c", code, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_says_ready_once_and_stops_in_order(
    number: signal.Signals, serve: Serve, tmp_path: Path
) -> None:
    file = tmp_path / "ready"
    file.write_text("of an earlier run\n")
    process = serve("--ready-file", str(file))
    ready = line(process)
    assert ready.startswith("READY {")
    facts = json.loads(ready.removeprefix("READY "))
    assert facts == {
        "grpc": "127.0.0.1:7",
        "http": "127.0.0.1:8",
        "pid": process.pid,
        "ray_address": "127.0.0.1:6379",
        "metrics": None,
    }
    assert file.read_text() == ready
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "STOPPING\n")
    assert err == "stopping: streams have 5 s to finish\n"
    assert not file.exists()


def test_serve_ends_when_somebody_else_has_ended_the_cluster(serve: Serve) -> None:
    process = serve(ended=True)
    assert line(process).startswith("READY ")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "LEFT\n")  # what is there now is not its own
    assert "the cluster has been taken down" in err


def test_serve_fails_and_ends_nothing_when_nobody_watches_the_cluster(serve: Serve) -> None:
    process = serve(ended='(_ for _ in ()).throw(NotReady("the keeper has died"))')
    assert line(process).startswith("READY ")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, "LEFT\n")
    assert "kvferry: the keeper has died" in err
    assert "taken down" not in err


def test_a_cluster_is_left_to_itself_only_on_a_ray_that_it_has_joined(serve: Serve) -> None:
    process = serve("--detach")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, "")
    assert "--detach: a Ray of its own ends with this command" in err
    process = serve("--detach", "--address", "127.0.0.1:1")
    out, _ = process.communicate(timeout=30)
    ready, left = out.splitlines()
    assert (process.returncode, left) == (0, "LEFT")
    assert ready.startswith("READY {")


def test_second_signal_ends_serve_at_once(serve: Serve) -> None:
    process = serve(stop="time.sleep(600)")
    assert line(process).startswith("READY ")
    process.send_signal(signal.SIGTERM)
    assert line(process) == "STOPPING\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_start_up_unwinds_it(number: signal.Signals, serve: Serve) -> None:
    start = (
        "try:\n"
        "        print('STARTING', flush=True)\n"
        "        time.sleep(600)\n"
        "    finally: print('UNWOUND', flush=True)"
    )
    process = serve(start=start)
    assert line(process) == "STARTING\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "UNWOUND\n")
    assert err == "kvferry: interrupted\n"


def test_serve_takes_the_signals_back_from_what_start_up_installed(serve: Serve) -> None:
    process = serve(start="import signal; signal.signal(signal.SIGTERM, signal.SIG_DFL)")
    assert line(process).startswith("READY ")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "STOPPING\n")


def test_ready_line_is_one_line() -> None:
    said = ready_line("127.0.0.1:1", "127.0.0.1:2", "x", None)
    assert "\n" not in said
    assert json.loads(said.removeprefix("READY "))["pid"] == os.getpid()


def test_file_that_cannot_be_moved_into_place_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "ready").mkdir()
    with pytest.raises(OSError):
        write_whole(tmp_path / "ready", "READY\n")
    assert [path.name for path in tmp_path.iterdir()] == ["ready"]
