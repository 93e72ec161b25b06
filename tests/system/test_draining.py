"""Draining a worker: nothing new comes, streams finish, leases are read, then it is let go."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster.cli.app import main
from kvferry.cluster.client import Client, GenerateStream
from kvferry.cluster.errors import DeadlineExceeded, UnknownRequest, WorkerLost
from kvferry.protos import kvferry_pb2 as pb
from tests.cluster import documents
from tests.stack import LONG_S, Stack, eventually

PROMPT = [5] * 24
OPTIONS: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path, num_prefill=2, num_decode=2, audit_every_step=True) as running:
        pairs = 4  # every decode worker has connected to every prefill worker

        def connected() -> int:
            return sum(len(record.connected_to()) for record in running.router.workers)

        eventually("all are connected", lambda: running.on_loop(connected) == pairs)
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.endpoint) as connected:
        yield connected


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def states(client: Client) -> dict[str, str]:
    return {entry.worker.worker_id: entry.worker.state for entry in client.status().workers}


def begin_drain(threads: ThreadPoolExecutor, client: Client, name: str) -> Future[None]:
    """A drain on its way: the worker is marked, the call has not returned."""
    draining = threads.submit(client.drain, name)
    eventually("it is draining", lambda: states(client).get(name) == "draining")
    assert not draining.done()
    return draining


def worker_of(stream: GenerateStream, role: str) -> str:
    """Reads a stream to its end; which worker served it."""
    *_, last = stream
    assert isinstance(last, pb.Finished)
    assert (last.finish_reason, last.usage.completion_tokens) == ("length", 20)
    found = last.prefill_worker if role == "prefill" else last.decode_worker
    assert last.attempt == 1
    return found


def started(client: Client, prompt: list[int] = PROMPT) -> GenerateStream:
    stream = client.generate(token_ids=prompt, **OPTIONS)
    assert isinstance(next(stream), pb.Accepted)
    return stream


def test_a_stream_finishes_where_it_is_and_new_ones_go_elsewhere(
    stack: Stack, client: Client, threads: ThreadPoolExecutor
) -> None:
    held = stack.workers["decode-0"]
    held.runner.allow(2)
    stream = started(client)
    held.runner.wait_held()
    draining = begin_drain(threads, client, "decode-0")
    for _ in range(3):
        assert worker_of(started(client), "decode") == "decode-1"
    assert not draining.done()
    held.runner.allow(None)
    assert worker_of(stream, "decode") == "decode-0"
    draining.result(LONG_S)
    assert set(states(client)) == {"prefill-0", "prefill-1", "decode-1"}
    (gone,) = stack.node.drained
    assert (gone.ref, gone.drained) == (held.ref, True)
    assert not stack.counters().get("worker_deaths")
    stack.assert_quiet()


def test_a_source_waits_until_what_it_has_leased_is_read(
    stack: Stack, client: Client, threads: ThreadPoolExecutor
) -> None:
    for name in ("decode-0", "decode-1"):
        stack.workers[name].connector.held = True
    stream = started(client)
    assert isinstance(next(stream), pb.Delta)  # token 1: the prefill is done, its blocks leased
    draining = begin_drain(threads, client, "prefill-0")
    assert stack.workers["prefill-0"].worker.engine.pool.num_free < 64
    stack.release()
    assert worker_of(stream, "prefill") == "prefill-0"
    draining.result(LONG_S)
    assert worker_of(started(client, [5] * 40), "prefill") == "prefill-1"
    stack.assert_quiet()


def test_a_request_that_only_waits_for_blocks_goes_elsewhere(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    with (
        Stack(tmp_path, decode_blocks=24) as stack,
        Client(stack.endpoint) as client,
    ):
        stack.decode.connector.held = True
        first = started(client, [7] * 64)
        assert isinstance(next(first), pb.Delta)
        waiting = started(client, [5] * 40)
        eventually(
            "it waits for blocks",
            lambda: any(stack.on_loop(lambda: [r.waiting for r in stack.router.workers])),
        )
        draining = begin_drain(threads, client, "decode-0")
        assert not client.status().ready
        stack.join("decode-1", (stack.decode.worker.roles[0].role,))
        assert worker_of(waiting, "decode") == "decode-1"
        stack.decode.connector.held = False
        assert worker_of(first, "decode") == "decode-0"
        draining.result(LONG_S)


def test_the_last_worker_of_a_role_leaves_the_cluster_not_ready(
    tmp_path: Path,
) -> None:
    with Stack(tmp_path) as stack, Client(stack.endpoint) as client:
        client.drain("prefill-0")
        assert list(client.status().not_ready_reasons) == ["no live prefill worker"]
        eventually("health follows", lambda: not client.health())


def test_an_unknown_worker_and_a_time_limit_are_told(
    stack: Stack, client: Client, threads: ThreadPoolExecutor
) -> None:
    with pytest.raises(UnknownRequest, match="no live worker 'decode-7'; there are: decode-0"):
        client.drain("decode-7")
    held = stack.workers["decode-0"]
    held.runner.allow(0)
    stream = started(client)
    held.runner.wait_held()
    with pytest.raises(DeadlineExceeded, match=r"still holds something after 0\.1 s"):
        client.drain("decode-0", timeout_s=0.1)
    assert states(client)["decode-0"] == "draining"  # it goes on
    held.runner.allow(None)
    assert worker_of(stream, "decode") == "decode-0"
    eventually("it is let go", lambda: "decode-0" not in states(client))


def test_a_worker_that_dies_while_it_drains_is_told(
    stack: Stack, client: Client, threads: ThreadPoolExecutor
) -> None:
    held = stack.workers["decode-0"]
    held.runner.allow(0)
    stream = started(client)
    held.runner.wait_held()
    draining = begin_drain(threads, client, "decode-0")
    stack.on_loop(lambda: stack.node.worker_died(held.ref, "killed"))
    with pytest.raises(WorkerLost, match="decode-0 died while it was drained"):
        draining.result(LONG_S)
    *_, last = stream
    assert isinstance(last, pb.Finished) and last.decode_worker == "decode-1"
    assert not stack.node.drained


def test_the_command_drains_and_says_so(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--endpoint", stack.endpoint]
    assert main(["drain", "decode-0", "--json", *flags]) == 0
    assert documents.parse(capsys.readouterr().out)["worker_id"] == "decode-0"
    assert main(["drain", "decode-0", *flags]) == 1
    assert "no live worker 'decode-0'" in capsys.readouterr().err
    assert main(["drain", "decode-0", "--json", *flags]) == 1
    assert documents.parse(capsys.readouterr().out)["error"]["type"] == "UnknownRequest"
