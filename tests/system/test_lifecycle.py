"""How clusters start, fail to start, and end; and one whose decode pool is too small for its load.

Each start of Ray takes seconds, so one cluster serves several purposes.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import pytest

from kvferry.cluster.client import AsyncClient, Client, Completion
from kvferry.cluster.client_stream import GenerateOptions
from kvferry.engine.weights.store import ModelFolder
from kvferry.protos import kvferry_pb2 as pb
from tests.cluster import documents
from tests.system.pools import assert_quiet
from tests.system.processes import (
    START_S,
    Command,
    Served,
    abstract_sockets,
    all_abstract_sockets,
    eventually,
)

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]

# For each the reference's two best tokens differ by more than 0.1 at every step, in float32:
# whatever the batch that a step is computed in, its tokens are these.
PROMPTS = (
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,",
    "2, 4, 6, 8, 10, 12, 14, 16, 18,",
    "a b c d e f g h i j k l m",
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the",
    "Twinkle, twinkle, little",
    "The ferry leaves the north bank at seven. The ferry leaves the north bank at eight. The "
    "ferry leaves the north bank at",
    "SELECT * FROM",
    "for i in range(10):\n    print(i)\nfor i in range(20):\n",
)
LENGTHS = (16, 14, 12, 10)

# Sixteen blocks: the prompts of about nine requests, and no room for what they become.
SMALL = """
model: {max_model_len: 128}
cache: {num_blocks: 128}
decode: {num_blocks: 16}
scheduler: {watermark: 0.0, chunk_tokens: 32, max_num_batched_tokens: 64}
"""


def greedy(max_tokens: int) -> GenerateOptions:
    return {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}


def test_a_decode_pool_too_small_for_its_load_then_a_stop_while_a_stream_runs(
    default_model: ModelFolder, tmp_path: Path
) -> None:
    with Served(tmp_path, SMALL) as served, Client(served.endpoint) as client:
        too_much_at_once(served, client)
        stop_while_a_stream_runs(served, client)


def too_much_at_once(served: Served, client: Client) -> None:
    """32 requests: all finish with the tokens they have when sent alone, some after preemption."""
    alone = [client.generate_text(prompt, **greedy(max(LENGTHS))) for prompt in PROMPTS]
    asked = [(number, length) for length in LENGTHS for number in range(len(PROMPTS))]

    async def together() -> list[Completion]:
        async with AsyncClient(served.endpoint) as connected:
            return await asyncio.gather(
                *(
                    connected.generate_text(PROMPTS[number], **greedy(length))
                    for number, length in asked
                )
            )

    completions = asyncio.run(together())
    for (number, length), completion in zip(asked, completions, strict=True):
        assert completion.output_token_ids == alone[number].output_token_ids[:length]
        assert completion.finish_reason == "length"
        assert completion.finished.attempt == 1
    preemptions = sum(completion.finished.num_preemptions for completion in completions)
    assert preemptions > 0
    assert sum(completion.finished.recomputed_prompt_tokens for completion in completions) > 0
    assert_quiet(client)
    counters = client.status().counters
    assert counters.preempted == preemptions
    assert (counters.accepted, counters.finished_length, counters.failed) == (40, 40, 0)


def stop_while_a_stream_runs(served: Served, client: Client) -> None:
    """SIGTERM lets the stream finish; then nothing of the cluster is left."""
    workers = [p for p in served.family() if "Worker" in p.name()]
    sockets = set[str]().union(*(abstract_sockets(process) for process in workers))
    assert sockets and sockets <= all_abstract_sockets()
    with client.generate(PROMPTS[0], **greedy(12)) as stream:
        assert isinstance(next(stream), pb.Accepted)
        assert isinstance(next(stream), pb.Delta)
        served.process.send_signal(signal.SIGTERM)
        *_, last = stream
    assert isinstance(last, pb.Finished)
    assert (last.finish_reason, last.usage.completion_tokens) == ("length", 12)
    ended = served.wait()
    assert (ended.code, ended.complaints) == (0, [])
    assert ended.out.startswith("READY ") and len(ended.out.splitlines()) == 1
    assert not served.ready_file.exists()
    served.assert_nothing_lives_on()
    assert not sockets & all_abstract_sockets()


def test_a_pool_too_small_for_one_request_is_said_with_both_numbers(
    default_model: ModelFolder, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("{model: {max_model_len: 512}, decode: {num_blocks: 8}}")
    with Command("demo", "--json", "--config", str(config), folder=tmp_path) as command:
        ended = command.wait(START_S)
        assert ended.code == 2
        error = documents.parse(ended.out)["error"]
        assert error["type"] == "PoolTooSmall"
        assert "needs 32 blocks, got 8: raise cache.memory" in error["message"]
        command.assert_nothing_lives_on()


def test_ctrl_c_while_the_workers_start_leaves_nothing(
    default_model: ModelFolder, tmp_path: Path
) -> None:
    with Command("serve", "--grpc", "127.0.0.1:0", folder=tmp_path) as command:
        eventually(
            "an actor's process is there",
            lambda: [p.name() for p in command.family()],
            lambda names: any(name.startswith("ray::") for name in names),
            START_S,
        )
        command.interrupt()
        ended = command.wait()
        assert (ended.code, ended.out) == (130, "")
        assert "Traceback" not in ended.err
        command.assert_nothing_lives_on()


@pytest.mark.parametrize("door", ["--grpc", "--http"])
def test_a_port_in_use_is_said_before_anything_starts(
    door: str, default_model: ModelFolder, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        free = ("--grpc", "127.0.0.1:0") if door == "--http" else ()
        with Command("serve", door, address, *free, folder=tmp_path) as command:
            ended = command.wait(START_S)
            assert (ended.code, ended.out) == (3, "")
            assert ended.err.startswith(f"kvferry: cannot listen on {address}: ")
            assert len(ended.err.splitlines()) == 1
            command.assert_nothing_lives_on()


def test_a_model_that_cannot_be_fetched_is_said_with_what_to_do(tmp_path: Path) -> None:
    nowhere = {"KVFERRY_CACHE_DIR": str(tmp_path / "cache"), "PIP_NO_INDEX": "1"}
    with Command("demo", "--json", folder=tmp_path, environment=nowhere) as command:
        ended = command.wait()
        assert ended.code == 3
        error = documents.parse(ended.out)["error"]
        assert error["type"] == "ModelMissing"
        assert "kvferry models pull smollm2-135m-instruct" in error["message"]
        command.assert_nothing_lives_on()
