"""What clients do shows on the metrics page and in the logs; prompts show nowhere.

First over real sockets and stub models in this process, then with real processes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvferry.cluster.client import Client
from kvferry.cluster.errors import InvalidRequest, KVFerryError, Overloaded
from kvferry.cluster.metrics.exposition import render
from kvferry.cluster.router_config import RouterConfig
from kvferry.engine.weights.store import ModelFolder
from tests.cluster.metrics.scraping import Scrape, read
from tests.stack import LONG_S, Stack
from tests.system.processes import Served, eventually

SECRET = "zanzibar"
CONFIG = """
model: {max_model_len: 256}
cache: {num_blocks: 64}
router: {heartbeat_timeout: 60s, worker_wait: 120s}  # a busy machine is no death here
server: {metrics: 127.0.0.1:0}
logging: {level: info, format: json}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture
def stack(folder: Path) -> Iterator[Stack]:
    config = RouterConfig(
        list_period=0.2,
        heartbeat=0.1,
        heartbeat_timeout=LONG_S,
        stall_limit=LONG_S,
        queue_limit=1,
        max_attempts=2,
    )
    with Stack(folder, router_config=config) as running:
        yield running


def page(stack: Stack) -> Scrape:
    text, content_type = render(lambda: stack.on_loop(stack.node.metrics))
    assert content_type.startswith("text/plain")
    return read(text)


def refusal(client: Client, prompt: str = "x", **options: Any) -> KVFerryError:
    with pytest.raises(KVFerryError) as caught:
        client.generate_text(prompt, **options)
    return caught.value


def test_what_a_door_refuses_is_counted_by_what_the_client_is_told(stack: Stack) -> None:
    with Client(stack.endpoint) as client:
        assert isinstance(refusal(client, temperature=-1.0), InvalidRequest)
        assert isinstance(refusal(client, ""), InvalidRequest)
        done = client.generate_text("hello", max_tokens=3, ignore_eos=True)
        assert done.finished.finish_reason == "length"
        for each in (stack.prefill, stack.decode):
            stack.on_loop(partial(stack.node.worker_died, each.ref, "told to"))
        with client.generate("hello", max_tokens=3) as waiting:
            next(iter(waiting))
            assert isinstance(refusal(client), Overloaded)
            assert page(stack).value("kvferry_num_requests_waiting", role="router") == 1
        eventually(
            "it has ended",
            lambda: stack.on_loop(lambda: len(stack.router.requests)),
            lambda n: n == 0,
        )
    found = page(stack)
    refused = found.by("reason", "kvferry_requests_rejected_total")
    assert refused == {"InvalidRequest": 2, "Overloaded": 1}
    assert found.value("kvferry_requests_accepted_total") == 2
    ends = found.by("finished_reason", "kvferry_requests_finished_total")
    assert ends == {"length": 1, "abort": 1}


def test_the_page_names_model_and_workers(stack: Stack) -> None:
    def told() -> dict[str, str]:
        for sample in page(stack).families["kvferry_info"].samples:
            if sample.labels["worker_id"] == "decode-0":
                return dict(sample.labels)
        return {}

    labels = told()
    assert labels.pop("version")
    assert labels == {
        "model_name": "stub",
        "worker_id": "decode-0",
        "role": "decode",
        "kernels": "stub",
        "isa": "",
        "connector": "shm",
    }


def test_records_about_a_request_name_it_and_no_prompt_is_logged(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "kvferry")
    for each in stack.workers.values():
        each.runner.fail_next = 8
    with Client(stack.endpoint) as client:
        refusal(client, f"{SECRET} " * 3, max_tokens=4)
    about = [r for r in caplog.records if "request" in r.getMessage() or "step" in r.getMessage()]
    assert len(about) >= 2, "the attempts that failed were logged"
    names = {record.__dict__.get("request_id") for record in about}
    assert len(names) == 1 and None not in names
    assert all(isinstance(record.__dict__.get("attempt"), int) for record in about)
    formatter = logging.Formatter()
    said = "\n".join(formatter.format(record) for record in caplog.records)
    assert SECRET not in said
    ids = stack.node.intake.tokenize(f"{SECRET} " * 3)
    assert ", ".join(map(str, ids[:3])) not in said


# --- real processes -----------------------------------------------------------------------------


def scraped(endpoint: str) -> Scrape:
    host, _, port = endpoint.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        assert answer.status == 200
        return read(answer.read())


def log_of(pid: int) -> Path:
    """The file that a process's standard error goes to."""
    return Path(f"/proc/{pid}/fd/2").readlink()


def json_lines(path: Path) -> list[dict[str, Any]]:
    """What a process of ours wrote, without the lines by which Ray marks its files."""
    text = path.read_text(encoding="utf-8")
    assert SECRET not in text
    return [json.loads(line) for line in text.splitlines() if not line.startswith(":")]


@pytest.mark.model
@pytest.mark.ray
@pytest.mark.slow
def test_a_cluster_is_scraped_and_logs_json_while_a_worker_dies(
    default_model: ModelFolder, tmp_path: Path
) -> None:
    with Served(tmp_path, CONFIG) as served, Client(served.endpoint) as client:
        endpoint = served.ready["metrics"]
        assert list(client.status().endpoints.metrics) == [endpoint]

        def generate() -> None:
            done = client.generate_text(f"The ferry to {SECRET}", max_tokens=6, ignore_eos=True)
            assert done.finished.finish_reason == "length"

        def steps(found: Scrape) -> float:
            return found.sum("kvferry_engine_step_seconds_count", worker_id="decode-0")

        generate()
        first = eventually(
            "decode has told of its steps", lambda: scraped(endpoint), lambda s: steps(s) >= 5
        )
        assert first.value("kvferry_requests_accepted_total") == 1
        assert first.value("kvferry_generation_tokens_total") == 6
        assert first.value("kvferry_time_to_first_token_seconds_count") == 1
        assert first.value("kvferry_transfer_blocks_total") > 0
        assert first.value("kvferry_transfer_seconds_count") == 1
        (model,) = {s.labels["model_name"] for s in first.families["kvferry_info"].samples}
        assert model == client.status().model.name

        decode = next(w for w in client.status().workers if w.worker.worker_id == "decode-0")
        router = client.status().routers[0]
        logs = [log_of(router.pid), log_of(decode.worker.pid)]
        psutil.Process(decode.worker.pid).send_signal(signal.SIGKILL)
        eventually(
            "its successor serves",
            client.status,
            lambda s: s.ready and any(w.num_restarts for w in s.workers),
        )
        generate()
        second = eventually(
            "it has told of its steps",
            lambda: scraped(endpoint),
            lambda s: steps(s) >= steps(first) + 5,
        )
        assert second.sum("kvferry_worker_deaths_total", worker_id="decode-0") == 1
        assert second.value("kvferry_worker_ready", worker_id="decode-0") == 1
        assert second.value("kvferry_requests_accepted_total") == 2
        fallen = [k for k, v in first.counters().items() if second.counters()[k] < v]
        assert fallen == []

        said = json_lines(logs[0])
        assert {line["process"] for line in said} == {"router-0"}
        assert any("is lost" in line["message"] for line in said)
        json_lines(logs[1])
        served.process.send_signal(signal.SIGTERM)
        ended = served.wait()
        rays = [line for line in ended.complaints if "(raylet)" in line]  # of the killed process
        launcher = [json.loads(line) for line in ended.complaints if line not in rays]
        assert ended.code == 0
        assert any("starting decode-0" in line["message"] for line in launcher)
        assert {line["process"] for line in launcher} == {"launcher"}
        served.assert_nothing_lives_on()
