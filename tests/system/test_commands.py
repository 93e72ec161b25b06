"""The commands that talk to a running cluster, as processes, against a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster.client import Client
from tests.cluster import documents
from tests.system.pools import assert_quiet
from tests.system.processes import Command, Ended, Served

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]

PROMPT = "a b c d e f g h i j k l m"
TEXT = " n o p q r s t u"


@pytest.fixture
def run(served: Served, tmp_path: Path) -> Any:
    """Runs a command against the cluster, which it finds through the environment."""

    def run(*arguments: str) -> Ended:
        environment = {"KVFERRY_ENDPOINT": served.endpoint}
        with Command(*arguments, folder=tmp_path, environment=environment) as command:
            return command.wait()

    return run


def test_generate_streams_text(run: Any) -> None:
    ended = run("generate", PROMPT, "--temperature", "0", "--max-tokens", "8")
    assert (ended.code, ended.out, ended.err) == (0, f"{TEXT}\n", "")


def test_generate_json_tells_one_request(run: Any) -> None:
    ended = run("generate", PROMPT, "--temperature", "0", "--max-tokens", "8", "--json")
    assert (ended.code, ended.err) == (0, "")
    (request,) = documents.parse(ended.out)["requests"]
    assert request["text"] == TEXT
    assert len(request["prompt_token_ids"]) == 13
    assert request["transfer"]["blocks_moved"] == 1
    assert (request["prefill_worker"], request["decode_worker"]) == ("prefill-0", "decode-0")


def test_status_and_blocks_describe_the_same_workers(run: Any, client: Client) -> None:
    assert_quiet(client)
    status = documents.parse(run("status", "--json").out)
    blocks = documents.parse(run("blocks", "--json").out)
    assert status["ok"] and status["ready"]
    workers = {(worker["worker_id"], worker["epoch"]) for worker in status["workers"]}
    assert {(pool["worker_id"], pool["epoch"]) for pool in blocks["pools"]} == workers
    assert all(pool["consistent"] for pool in blocks["pools"])
    one = documents.parse(run("blocks", "--worker", "decode-0", "--json").out)
    assert [pool["role"] for pool in one["pools"]] == ["decode"]
    assert run("blocks", "--worker", "nobody").code == 1


def test_bench_serve_measures_the_cluster(run: Any, client: Client) -> None:
    flags = ("--input-tokens", "20", "--output-tokens", "4", "--concurrency", "2")
    ended = run("bench", "serve", *flags, "--num-requests", "4", "--json")
    assert ended.code == 0, ended
    document = documents.parse(ended.out)
    assert document["arrangement"]["prefill"] == document["arrangement"]["decode"] == 1
    results = document["results"]
    assert (results["completed"], results["failed"]) == (4, 0)
    assert results["output_tokens_per_s"] > 0
    assert results["ttft_s"]["n"] == 4
    assert results["itl_s"]["n"] == 12
    assert results["cpu_s_per_output_token"] > 0
    assert_quiet(client)


def test_loadgen_follows_conversations_on_the_cluster(run: Any, client: Client) -> None:
    flags = ("--workload", "agents", "--num-requests", "3", "--turns", "3", "--groups", "1")
    lengths = ("--opening-tokens", "64", "--input-tokens", "20", "--output-tokens", "5")
    ended = run("loadgen", "run", *flags, *lengths, "--concurrency", "1", "--json")
    assert ended.code == 0, ended
    document = documents.parse(ended.out)
    results, server, parts = (document[name] for name in ("results", "server", "parts"))
    assert (results["completed"], results["failed"]) == (9, 0)
    assert results["prompt_tokens"] == 3 * (84 + 109 + 134)
    # Later turns find what was said before, other sessions their tools.
    assert results["cached_tokens"] >= 3 * (80 + 96) + 2 * 64
    hits = sum(server["totals"][f"hit_tokens_{source}"] for source in ("local", "moved", "host"))
    assert hits > 0
    assert server["totals"]["finished_length"] == 9
    assert server["totals"]["blocks_moved"] > 0
    whole = [parts[name]["mean"] for name in ("queue_s", "prefill_s", "delivery_s", "network_s")]
    assert sum(whole) == pytest.approx(results["ttft_s"]["mean"])
    assert results["cpu_s_per_output_token"] > 0
    assert_quiet(client)
