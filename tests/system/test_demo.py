"""``kvferry demo`` with nothing replaced: two workers, real tokens, moved blocks, a clean end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.engine.weights.store import ModelFolder
from tests.cluster import documents
from tests.system.processes import START_S, Command, eventually

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]

SHM = Path("/dev/shm")


@pytest.fixture(scope="module")
def demo(default_model: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """A run of the command, ended."""
    before = set(SHM.iterdir())
    with Command("demo", "--json", folder=tmp_path_factory.mktemp("demo")) as run:
        assert run.wait(START_S).code == 0, run.err
        run.assert_nothing_lives_on()
        eventually(
            "shared memory is given back",
            lambda: {path.name for path in set(SHM.iterdir()) - before},
            lambda names: not names,
        )
        yield run


@pytest.fixture(scope="module")
def document(demo: Command) -> dict[str, Any]:
    """The document; that it is the only one and keeps its schema is checked here."""
    return documents.parse(demo.out)


def test_prefill_and_decode_are_processes_of_their_own(
    demo: Command, document: dict[str, Any]
) -> None:
    workers = {worker["role"]: worker for worker in document["workers"]}
    assert sorted(workers) == ["decode", "prefill"]
    pids = {worker["pid"] for worker in workers.values()}
    assert len(pids | {demo.process.pid, os.getpid()}) == 4
    for worker in workers.values():
        assert worker["state"] == "ready"
        assert worker["node_id"]
        assert worker["connectors"] == ["shm", "tcp"]
    assert workers["prefill"]["epoch"] != workers["decode"]["epoch"]


def test_every_request_tells_what_it_took(document: dict[str, Any]) -> None:
    block_bytes, block_size = document["model"]["block_bytes"], document["model"]["block_size"]
    assert len(document["requests"]) == 4
    assert len({request["request_id"] for request in document["requests"]}) == 4
    for request in document["requests"]:
        assert request["error"] is None
        assert (request["prefill_worker"], request["decode_worker"]) == ("prefill-0", "decode-0")
        assert request["attempt"] == 1
        assert request["text"]
        num_prompt, num_output = len(request["prompt_token_ids"]), len(request["output_token_ids"])
        assert request["usage"] == {
            "prompt_tokens": num_prompt,
            "cached_tokens": request["usage"]["cached_tokens"],
            "completion_tokens": num_output,
        }
        assert 0 <= request["usage"]["cached_tokens"] < num_prompt
        assert request["finish_reason"] == ("length" if num_output == 32 else "stop")
        transfer = request["transfer"]
        assert transfer["connector"] == "shm"
        num_blocks = -(-num_prompt // block_size)
        assert transfer["blocks_moved"] + transfer["blocks_reused"] == num_blocks
        assert transfer["bytes_moved"] == transfer["blocks_moved"] * block_bytes
        assert transfer["reads_failed"] == 0
        assert 0 <= transfer["transfer_exposed_s"] <= transfer["transfer_s"]
        assert request["recomputed_prompt_tokens"] == 0
        assert request["num_preemptions"] == 0
        assert request["num_prefill_chunks"] >= 1
        (branch,) = request["branches"]
        assert branch["output_token_ids"] == request["output_token_ids"]


def test_times_add_up(document: dict[str, Any]) -> None:
    assert document["startup_s"] > 0
    for request in document["requests"]:
        times = request["timing"]
        parts = times["queue_s"] + times["prefill_s"] + times["delivery_s"]
        assert times["ttft_s"] == pytest.approx(parts)
        assert len(times["itl_s"]) == len(request["output_token_ids"]) - 1
        assert times["ttst_s"] == pytest.approx(times["ttft_s"] + times["itl_s"][0])
        gap = times["handoff_s"] + times["decode_wait_s"] + times["first_step_s"]
        assert gap >= times["itl_s"][0] - 1e-9
        assert times["tpot_s"] == pytest.approx(sum(times["itl_s"]) / len(times["itl_s"]))
        assert times["e2e_s"] >= times["ttft_s"] + sum(times["itl_s"]) - 1e-9


def test_long_prompt_is_prefilled_in_chunks_and_moved_meanwhile(document: dict[str, Any]) -> None:
    long = max(document["requests"], key=lambda request: len(request["prompt_token_ids"]))
    assert long["num_prefill_chunks"] >= 3
    assert long["transfer"]["blocks_before_last_chunk"] > 0


def test_totals_are_the_requests(document: dict[str, Any]) -> None:
    totals, requests = document["totals"], document["requests"]
    assert totals["num_requests"] == 4
    assert totals["num_failed"] == 0
    assert totals["blocks_moved"] == sum(r["transfer"]["blocks_moved"] for r in requests)
    assert totals["bytes_moved"] == sum(r["transfer"]["bytes_moved"] for r in requests)
    assert totals["completion_tokens"] == sum(len(r["output_token_ids"]) for r in requests)


def test_no_block_is_left_with_anybody(document: dict[str, Any]) -> None:
    assert [pool["role"] for pool in document["pools"]] == ["prefill", "decode"]
    for pool in document["pools"]:
        assert pool["consistent"]
        assert pool["problems"] == []
        for name in ("pinned", "in_transfer", "referenced", "quarantined"):
            assert pool[f"num_{name}"] == 0, pool
        assert pool["num_free"] + pool["num_cached"] == pool["num_total"]
