"""Requests to a served cluster, through its gRPC door: real processes, real tokens."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any, TypedDict

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.cluster.client import AsyncClient, Client, Completion, GenerateStream
from kvferry.cluster.client_stream import GenerateOptions
from kvferry.cluster.errors import DeadlineExceeded, InvalidRequest, PromptTooLong, UnknownModel
from kvferry.kv_cache.errors import KVFerryError
from kvferry.protos import kvferry_pb2 as pb
from tests.system.pools import assert_quiet, consistent, counters, held
from tests.system.processes import Served, eventually

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]

PROMPT = "a b c d e f g h i j k l m"  # the two best tokens are far apart at every step


class Fixed(TypedDict):
    """Options that many tests share."""

    temperature: float
    max_tokens: int
    ignore_eos: bool


GREEDY: Fixed = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
ENDLESS: Fixed = {**GREEDY, "max_tokens": 400}
LONG = [(i * 7919) % 40_000 + 1000 for i in range(400)]  # thirteen chunks of prefill


# --- what is asked for is what comes ------------------------------------------------------------


def test_greedy_text_is_the_same_each_time_and_from_both_clients(
    served: Served, client: Client
) -> None:
    async def from_asyncio() -> Completion:
        async with AsyncClient(served.endpoint) as connected:
            return await connected.generate_text(PROMPT, **GREEDY)

    completions = [client.generate_text(PROMPT, **GREEDY) for _ in range(3)]
    completions.append(asyncio.run(from_asyncio()))
    assert {c.text for c in completions} == {" n o p q r s t u v w x y"}
    assert len({c.request_id for c in completions}) == 4
    for completion in completions:
        assert completion.finish_reason == "length"
        assert completion.usage.completion_tokens == 12
        assert completion.transfer.blocks_moved == 1
        assert completion.finished.recomputed_prompt_tokens == 0


def test_token_ids_are_taken_as_the_text_that_they_spell(client: Client) -> None:
    text = client.generate_text(PROMPT, **GREEDY, echo_prompt_token_ids=True)
    ids = client.generate_text(token_ids=text.prompt_token_ids, **GREEDY)
    assert ids.usage.prompt_tokens == len(text.prompt_token_ids) == 13
    assert ids.output_token_ids == text.output_token_ids


def test_chat_goes_through_the_models_template(client: Client) -> None:
    chat = [{"role": "user", "content": "Say hello."}]
    completion = client.generate_text(chat=chat, **GREEDY, echo_prompt_token_ids=True)
    plain = client.generate_text("Say hello.", **GREEDY, echo_prompt_token_ids=True)
    assert len(completion.prompt_token_ids) > len(plain.prompt_token_ids) + 5
    assert completion.text
    assert completion.text != plain.text


def test_an_answer_that_was_begun_is_continued(client: Client) -> None:
    begun = "Sure, the first letters of the alphabet are A, B, C,"
    completion = client.generate_text(
        chat=[
            {"role": "system", "content": "You recite the alphabet."},
            {"role": "user", "content": "Please say it."},
            {"role": "assistant", "content": begun},
        ],
        continue_final_message=True,
        temperature=0.0,
        max_tokens=3,
    )
    assert completion.text.startswith(" D")


def test_a_seed_repeats_the_output_and_another_one_does_not(client: Client) -> None:
    texts = [
        client.generate_text(PROMPT, temperature=1.5, max_tokens=12, seed=seed).output_token_ids
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("stop", [" q", "q r", " o p q"])
def test_output_ends_before_a_stop_string(client: Client, stop: str) -> None:
    completion = client.generate_text(PROMPT, **GREEDY, stop=["never", stop])
    whole = " n o p q r s t u v w x y"
    assert completion.text == whole[: whole.index(stop)]
    assert completion.finish_reason == "stop"
    assert completion.finished.stop_reason == stop
    assert completion.usage.completion_tokens == len(completion.output_token_ids) < 12
    assert_quiet(client)


def test_log_probabilities_come_with_their_tokens_and_the_prompt_s_with_the_first(
    client: Client,
) -> None:
    completion = client.generate_text(
        PROMPT, **GREEDY, logprobs=3, prompt_logprobs=2, echo_prompt_token_ids=True
    )
    assert [entry.token_id for entry in completion.logprobs] == list(completion.output_token_ids)
    for entry in completion.logprobs:
        assert len(entry.top) == 3
        assert entry.logprob == max(entry.top.values()) <= 0, "greedy takes the likeliest"
    prompt = completion.prompt_token_ids
    assert [entry.token_id for entry in completion.prompt_logprobs] == list(prompt[1:])
    assert all(len(entry.top) == 2 for entry in completion.prompt_logprobs)
    assert_quiet(client)


def test_penalties_biases_and_bad_words_reach_the_model(client: Client) -> None:
    usual = client.generate_text(PROMPT, **GREEDY).output_token_ids
    forbidden = client.generate_text(PROMPT, **GREEDY, bad_words=["n"])
    assert usual[0] not in forbidden.output_token_ids
    biased = client.generate_text(PROMPT, **GREEDY, logit_bias={usual[0]: 100.0})
    assert set(biased.output_token_ids) == {usual[0]}
    penalised = client.generate_text(
        PROMPT, **GREEDY, logit_bias={usual[0]: 8.0}, frequency_penalty=2.0, presence_penalty=2.0
    )
    assert 0 < penalised.output_token_ids.count(usual[0]) < 12
    assert_quiet(client)


def test_one_token_needs_no_decode_step(client: Client) -> None:
    completion = client.generate_text(PROMPT, temperature=0.0, max_tokens=1)
    assert (completion.text, completion.finish_reason) == (" n", "length")
    assert completion.usage.completion_tokens == 1
    assert list(completion.timing.itl_s) == []
    assert not completion.timing.HasField("ttst_s")
    assert_quiet(client)


def test_mixed_requests_at_once_each_end_once(served: Served, client: Client) -> None:
    before = counters(client)
    choose = random.Random(0)
    asked: list[GenerateOptions] = [
        {
            "token_ids": [choose.randrange(1000, 40_000) for _ in range(choose.choice(LENGTHS))],
            "max_tokens": choose.randrange(1, 12),
            "temperature": choose.choice((0.0, 0.8)),
            **({"seed": number} if number % 3 == 0 else {}),
            "ignore_eos": True,
        }
        for number in range(32)
    ]

    async def all_at_once() -> list[Completion]:
        async with AsyncClient(served.endpoint) as connected:
            return await asyncio.gather(*(connected.generate_text(**each) for each in asked))

    completions = asyncio.run(all_at_once())
    for options, completion in zip(asked, completions, strict=True):
        # The client has checked: contiguous indexes, one terminal event, and it the last.
        assert completion.finish_reason == "length"
        assert len(completion.output_token_ids) == options["max_tokens"]
        assert completion.usage.prompt_tokens == len(options["token_ids"])
        assert completion.finished.attempt == 1
    assert_quiet(client)
    after = counters(client)
    assert after.accepted - before.accepted == 32
    assert after.finished_length - before.finished_length == 32
    assert (after.failed, after.rejected, after.recovered) == (0, 0, 0)


LENGTHS = (1, 15, 16, 17, 31, 32, 33, 64, 97)


# --- who goes away early ------------------------------------------------------------------------


def after_tokens(stream: GenerateStream, count: int) -> None:
    """Read until ``count`` tokens have come."""
    for event in stream:
        if isinstance(event, pb.Delta) and event.index + len(event.token_ids) >= count:
            return
    raise AssertionError("the stream ended early")


def assert_one_more_abort(client: Client, before: pb.Counters) -> None:
    now = eventually(
        "the request counts as aborted",
        lambda: counters(client),
        lambda seen: seen.aborted > before.aborted,
    )
    assert now.aborted == before.aborted + 1
    assert now.failed == before.failed
    assert_quiet(client)


def test_cancel_by_id_ends_the_stream_with_abort(client: Client) -> None:
    before = counters(client)
    with client.generate(PROMPT, **ENDLESS) as stream:
        after_tokens(stream, 3)
        assert client.cancel(stream.request_id)
        last = list(stream)[-1]
    assert isinstance(last, pb.Finished)
    assert last.finish_reason == "abort"
    assert last.is_last
    assert 3 <= last.usage.completion_tokens < 400
    assert_one_more_abort(client, before)
    assert not client.cancel(stream.request_id)
    assert not client.cancel("nobody")


def test_client_that_leaves_in_the_middle_frees_everything(client: Client) -> None:
    before = counters(client)
    with client.generate(PROMPT, **ENDLESS) as stream:
        after_tokens(stream, 3)
    assert_one_more_abort(client, before)


def test_client_that_leaves_before_the_first_token_stops_the_prefill(client: Client) -> None:
    before = counters(client)
    with client.generate(token_ids=LONG, **ENDLESS) as stream:
        assert isinstance(next(stream), pb.Accepted)
    assert_one_more_abort(client, before)


def test_client_whose_connection_breaks_frees_everything(served: Served, client: Client) -> None:
    before = counters(client)
    with Client(served.endpoint) as doomed:
        stream = doomed.generate(PROMPT, **ENDLESS)
        after_tokens(stream, 2)
    assert_one_more_abort(client, before)


def test_deadline_ends_the_request_everywhere(client: Client) -> None:
    before = counters(client)
    with pytest.raises(DeadlineExceeded):
        client.generate_text(PROMPT, **ENDLESS, timeout_s=1.0)
    assert_one_more_abort(client, before)


# --- what is refused ----------------------------------------------------------------------------

UNSUPPORTED: dict[str, Any] = {
    "priority": 1,
    "tenant": "somebody",
    "adapter": "some-lora",
    "resume_grace_s": 1.0,
    "first_output_index": 3,
}


def refusal(client: Client, request: pb.GenerateRequest) -> KVFerryError:
    with pytest.raises(KVFerryError) as caught:
        list(client.stream(request))
    return caught.value


def test_unsupported_fields_are_refused_by_name(client: Client) -> None:
    for name, value in UNSUPPORTED.items():
        error = refusal(client, pb.GenerateRequest(text="x", **{name: value}))
        assert type(error) is InvalidRequest, name
        assert str(error).startswith(f"{name}: "), name
    assert client.generate_text(PROMPT, temperature=0.0, max_tokens=1).text == " n"


def test_wrong_requests_get_typed_errors_that_name_the_values(client: Client) -> None:
    too_long = refusal(client, pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1000] * 600)))
    assert type(too_long) is PromptTooLong
    assert "600" in str(too_long) and "576" in str(too_long)
    unknown = refusal(client, pb.GenerateRequest(text="x", model="gpt-17"))
    assert type(unknown) is UnknownModel
    assert "gpt-17" in str(unknown) and "smollm2-135m-instruct" in str(unknown)
    for wanted, request in {
        "temperature: got -1": pb.GenerateRequest(
            text="x", sampling=pb.SamplingParams(temperature=-1)
        ),
        "token id 50000": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[50_000])),
        "input: none given": pb.GenerateRequest(),
        "text: the prompt has no tokens": pb.GenerateRequest(text=""),
    }.items():
        error = refusal(client, request)
        assert type(error) is InvalidRequest
        assert wanted in str(error)
    assert client.generate_text(PROMPT, temperature=0.0, max_tokens=1).text == " n"


# --- what the cluster says of itself ------------------------------------------------------------


@pytest.mark.parametrize("service", ["", "kvferry.v1.Inference"])
def test_health_is_serving(served: Served, service: str) -> None:
    with grpc.insecure_channel(served.endpoint) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=30
        )
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_status_names_the_processes_that_serve(served: Served, client: Client) -> None:
    client.generate_text(PROMPT, **GREEDY)

    def idle(status: pb.StatusResponse) -> bool:
        busy = any(w.num_running or w.num_waiting for w in status.workers)
        # A report may be of the moment between the last token and the end of a lease.
        return not busy and all(
            w.kv.num_free + w.kv.num_cached == w.kv.num_total for w in status.workers
        )

    status = eventually("the workers are idle", client.status, idle)
    assert status.ready and not status.not_ready_reasons
    assert list(status.endpoints.grpc) == [served.endpoint]
    assert list(status.endpoints.http) == [served.ready["http"]]
    (router,) = status.routers
    assert router.num_in_flight == 0
    pids = [router.pid, *(entry.worker.pid for entry in status.workers)]
    assert len({*pids, served.process.pid}) == 4
    family = {process.pid for process in served.family()}
    assert set(pids) <= family
    epochs = {entry.worker.epoch for entry in status.workers}
    assert len(epochs | {router.epoch}) == 3
    for entry in status.workers:
        assert entry.worker.state == "ready"
        assert entry.kv.num_total == entry.kv.num_free + entry.kv.num_cached == 192
        assert entry.heartbeat_age_s < 10
        assert list(entry.worker.connectors) == ["shm", "tcp"]
    decode = next(entry for entry in status.workers if entry.worker.role == "decode")
    assert [(peer.worker_id, peer.state) for peer in decode.peers] == [("prefill-0", "connected")]
    assert decode.decode_step_s > 0
    model = status.model
    assert (model.name, model.max_model_len) == ("smollm2-135m-instruct", 576)
    assert model.block_bytes == (
        model.block_size * model.num_layers * model.num_kv_heads * model.head_dim * 2 * 4
    )


def test_audit_of_a_running_stream_names_its_owner(client: Client) -> None:
    with client.generate(PROMPT, **ENDLESS) as stream:
        after_tokens(stream, 8)
        (pool,) = client.audit("decode-0", include_blocks=True).pools
        assert consistent(pb.AuditResponse(pools=[pool]))
        mine = [
            block
            for block in pool.blocks
            if any(owner.request_id == stream.request_id for owner in block.owners)
        ]
        assert pool.num_referenced == len(mine) == held(pool) >= 2
        for block in mine:
            assert block.block_class == "referenced"
            assert block.ref_count == 1
            assert [owner.kind for owner in block.owners] == ["request"]
        # Blocks are listed by id, not in the table's order, and one may have been taken for the
        # step that runs: all are full but the last two of the table.
        counts = sorted(block.num_tokens for block in mine)
        assert counts[-1] <= pool.block_size
        assert all(count == pool.block_size for count in counts[2:])
        status = client.status()
        assert status.routers[0].num_in_flight == 1
    assert_quiet(client)


def test_workers_compute_on_their_share_of_the_cores(served: Served, client: Client) -> None:
    for entry in client.status().workers:
        environment = psutil.Process(entry.worker.pid).environ()
        assert environment["OMP_NUM_THREADS"] == str(entry.worker.threads)
        assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
        assert entry.worker.threads <= max(1, len(os.sched_getaffinity(0)) // 2)
