"""Beam search, disaggregated: the prompt computed and moved once, beams that share and copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cluster.routed_request import RoutedRequest
from kvferry.engine.batch import RunnerOutput, SchedulerOutput
from kvferry.engine.request import EarlyStopping, InvalidRequest, RequestId, RequestSpec
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.worker import messages as m
from kvferry.worker.messages import Envelope
from tests.fakes import STUB_VOCAB, stub_spec
from tests.sim.cluster import SimCluster
from tests.sim.test_branches import assert_clean, moved, serve, started

STOPS = range(0, STUB_VOCAB, 40)


def search(
    name: str,
    prompt: range,
    max_tokens: int,
    num_beams: int = 4,
    stops: range = STOPS,
    early_stopping: EarlyStopping = EarlyStopping.FALSE,
    length_penalty: float = 1.0,
) -> RequestSpec:
    spec = stub_spec(name, prompt, max_tokens, stop_token_ids=stops, num_beams=num_beams)
    sampling = replace(spec.sampling, early_stopping=early_stopping, length_penalty=length_penalty)
    return replace(spec, sampling=sampling)


def preemptions(cluster: SimCluster) -> int:
    return sum(w.worker.engine.scheduler.num_preemptions for w in cluster.workers)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("length", range(1, 10))
def test_a_search_moves_the_bytes_of_one_output_and_is_exact(length: int, caching: bool) -> None:
    prompt = range(50, 50 + length)
    alone = serve(started(caching=caching), stub_spec("one", prompt, 9))
    cluster = started(caching=caching)
    request = serve(cluster, search("beams", prompt, 9))
    cluster.assert_exact()
    assert moved(request) == moved(alone)
    assert request.num_prefill_chunks == alone.num_prefill_chunks
    assert request.recomputed_prompt_tokens == 0
    assert cluster.named("decode").worker.engine.kv.num_copies > 0, "beams write into copies"
    assert_clean(cluster)


@pytest.mark.parametrize("early_stopping", list(EarlyStopping))
@pytest.mark.parametrize("length_penalty", [1.0, -0.5, 2.0])
@pytest.mark.parametrize("num_beams", [2, 3, 16])
def test_searches_of_every_kind_end_as_they_do_beam_by_beam(
    num_beams: int, length_penalty: float, early_stopping: EarlyStopping
) -> None:
    cluster = started(decode_blocks=128)
    for index, max_tokens in enumerate((1, 2, 3, 12, 25)):
        prompt = range(100 * index, 100 * index + 5 + index)
        cluster.submit(
            search(
                f"r{index}",
                prompt,
                max_tokens,
                num_beams,
                early_stopping=early_stopping,
                length_penalty=length_penalty,
            )
        )
    cluster.run_until_ended()
    cluster.assert_exact()
    assert_clean(cluster)


def test_usage_is_that_of_a_colocated_run() -> None:
    spec = search("r", range(30, 43), 12)
    apart = serve(started(), spec)
    together = serve(started(num_prefill=0, num_decode=0, num_colocated=1), spec)
    assert apart.num_delivered == together.num_delivered
    assert apart.num_cached_tokens == together.num_cached_tokens
    assert apart.branches[0].delivered == together.branches[0].delivered


@pytest.mark.parametrize("length", range(1, 10))
def test_where_decode_computes_the_prompt_or_its_rest(length: int) -> None:
    cluster = started()
    prompt = range(50, 50 + length)
    serve(cluster, stub_spec("before", prompt, 2))
    serve(cluster, search("beams", prompt, 8))
    serve(cluster, search("again", prompt, 8))
    cluster.assert_exact()
    assert_clean(cluster)


@pytest.mark.parametrize("blocks", range(6, 12))
@pytest.mark.parametrize("caching", [False, True])
def test_a_pool_that_cannot_hold_all_beams_takes_longer_and_is_exact(
    blocks: int, caching: bool
) -> None:
    cluster = started(decode_blocks=blocks, caching=caching)
    serve(cluster, search("r", range(20, 29), 14, stops=range(0)))
    cluster.assert_exact()
    assert preemptions(cluster) > 0 or blocks >= 10
    assert_clean(cluster)


def test_searches_that_crowd_each_other_out_all_end() -> None:
    cluster = started(decode_blocks=12)
    for index in range(4):
        cluster.submit(search(f"b{index}", range(9 * index, 9 * index + 9), 14, stops=range(0)))
        cluster.submit(stub_spec(f"s{index}", range(9 * index, 9 * index + 9), 14))
    cluster.run_until_ended(300)
    cluster.assert_exact()
    assert preemptions(cluster) > 0
    assert_clean(cluster)


@pytest.mark.parametrize("seats", [1, 2, 3])
def test_more_beams_than_a_step_may_have_sequences(seats: int) -> None:
    cluster = started(scheduler=SchedulerConfig(seats, 32, 8, watermark=0.0))
    cluster.submit(search("a", range(9), 10))
    cluster.submit(search("b", range(40, 47), 10))
    cluster.submit(stub_spec("c", range(60, 70), 10))
    cluster.run_until_ended(120)
    cluster.assert_exact()
    runner = cluster.named("decode").runner
    assert max(runner.batches) <= seats, "a decode step has one token of each sequence"
    assert_clean(cluster)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_mix_in_any_pool_is_exact(data: st.DataObject) -> None:
    cluster = SimCluster(
        decode_blocks=data.draw(st.integers(8, 40), "blocks"),
        block_size=data.draw(st.sampled_from([1, 2, 4]), "block size"),
        caching=data.draw(st.booleans(), "caching"),
        scheduler=SchedulerConfig(data.draw(st.integers(1, 9), "seats"), 32, 8, watermark=0.0),
    )
    cluster.run(1.5)
    for index in range(data.draw(st.integers(1, 4), "requests")):
        first, length = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 5))
        max_tokens = data.draw(st.integers(1, 8 - length if cluster.block_size == 1 else 12))
        num_beams = data.draw(st.integers(1, 5))
        cluster.submit(search(f"r{index}", range(first, first + length), max_tokens, num_beams))
        cluster.run(data.draw(st.integers(0, 3)) * 0.05)
    cluster.run_until_ended(300)
    cluster.assert_exact()
    assert_clean(cluster)


@pytest.mark.parametrize("after", range(0, 24, 2))
def test_a_cancel_in_every_state_frees_all_beams(after: int) -> None:
    cluster = started(blocks_per_poll=1)
    listener = cluster.submit(search("r", range(60, 83), 30, stops=range(0)))
    for _ in range(after):
        cluster.advance()
    assert cluster.router is not None
    assert cluster.router.cancel(RequestId("r"), cluster.clock.now)
    assert listener.tokens == [] and len(listener.ends) == 1, "half a search is no output"
    cluster.run(0.5)
    assert cluster.leftovers() == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("after", range(0, 24, 3))
def test_a_death_in_every_state_costs_no_token(role: str, after: int) -> None:
    cluster = started(num_prefill=2, num_decode=2, blocks_per_poll=1)
    for index in range(3):
        cluster.submit(search(f"r{index}", range(60 + index, 83 + index), 20))
    for _ in range(after):
        cluster.advance()
    cluster.kill(cluster.named(role))
    cluster.run_until_ended()
    cluster.assert_exact()
    assert_clean(cluster)


def test_once_the_search_has_begun_its_prefill_worker_may_die() -> None:
    cluster = started()
    listener = cluster.submit(search("r", range(60, 83), 20, stops=range(0)))
    assert cluster.router is not None
    request: RoutedRequest = cluster.router.requests[RequestId("r")]
    decode = cluster.named("decode").worker.engine
    assert cluster.run(5, lambda: len(decode.scheduler.sequences) == 4)
    cluster.run(0.2)
    cluster.kill(cluster.named("prefill"))
    cluster.run_until_ended()
    cluster.assert_exact()
    assert request.num_attempts == 1 and listener.tokens


@pytest.mark.parametrize("num_left", [0, 1, 7])
def test_a_hand_off_without_all_the_likeliest_tokens_is_refused(num_left: int) -> None:
    cluster = started(caching=False)

    def strip(envelope: Envelope) -> tuple[int, ...]:
        body: Any = envelope.body
        if isinstance(body, m.Announce) and body.hand_off is not None and not stripped(body):
            (entry,) = body.hand_off.logprobs
            ids, logprobs = entry.top_ids[:num_left], entry.top_logprobs[:num_left]
            fewer = (replace(entry, top_ids=ids, top_logprobs=logprobs),)
            bare = replace(body, hand_off=replace(body.hand_off, logprobs=fewer))
            cluster.in_flight.append((cluster.clock.now, replace(envelope, body=bare)))
            return ()
        return (0,)

    def stripped(body: m.Announce) -> bool:
        assert body.hand_off is not None
        return len(body.hand_off.logprobs[0].top_ids) == num_left

    cluster.filter = strip
    listener = cluster.submit(search("r", range(9), 6))
    cluster.run_until_ended()
    (end,) = listener.ends
    assert f"hand-off with [{num_left}] of the" in str(end.error)
    assert_clean(cluster)


def test_several_branches_of_a_search_are_refused() -> None:
    cluster = started()
    with pytest.raises(InvalidRequest, match="num_beams: 4 of several"):
        cluster.submit(replace(search("r", range(9), 6), suffixes=((), ()), branches=(0, 1)))


def test_beams_stand_in_line_where_their_search_does() -> None:
    """Who came later neither overtakes the search nor makes it give up its blocks first."""
    cluster = started(decode_blocks=24, caching=False)
    listener = cluster.submit(search("search", range(60, 69), 40, stops=range(0)))
    assert cluster.router is not None
    request = cluster.router.requests[RequestId("search")]
    scheduler = cluster.named("decode").worker.engine.scheduler
    assert cluster.run(5, lambda: len(scheduler.sequences) == 4)
    younger: list[RoutedRequest] = []
    while not listener.ends:
        if sum(each.end is None for each in younger) < 8:
            spec = stub_spec(f"younger{len(younger)}", range(7 * len(younger), 900, 190), 12)
            cluster.submit(spec)
            younger.append(cluster.router.requests[spec.request_id])
        cluster.advance()
        mine = [s.is_beam for s in scheduler.running]
        assert mine == sorted(mine, reverse=True), "a younger one stands before a beam"
    cluster.run_until_ended()
    cluster.assert_exact()
    assert sum(each.num_preemptions for each in younger) > 0
    assert request.num_preemptions <= 4, "only for what beams need themselves"


def test_the_word_that_a_search_has_begun_may_be_lost() -> None:
    cluster = started(decode_blocks=400)
    lost: list[Envelope] = []

    def lose_first(envelope: Envelope) -> tuple[int, ...]:
        if isinstance(envelope.body, m.TokenEvents) and not lost:
            lost.append(envelope)
            return ()
        return (0,)

    cluster.filter = lose_first
    cluster.submit(search("r", range(60, 83), 100, stops=range(0)))
    assert cluster.router is not None
    request = cluster.router.requests[RequestId("r")]
    prefill = cluster.named("prefill")
    assert cluster.run(5, lambda: bool(lost))
    assert cluster.run(3, lambda: request.prefill is None), "the lists say it again"
    assert cluster.run(1, lambda: prefill.prefill is not None and not prefill.prefill.jobs)
    cluster.kill(prefill)
    cluster.run_until_ended(120)
    cluster.assert_exact()
    assert request.num_attempts == 1


@pytest.mark.parametrize("num_branches", [1, 2])
def test_a_copy_that_fails_ends_its_request_alone(num_branches: int) -> None:
    cluster = started()
    decode = cluster.named("decode")
    execute = decode.runner.execute
    failed: list[SchedulerOutput] = []

    def fail_once(output: SchedulerOutput) -> RunnerOutput:
        if output.copies and not output.sequences and not failed:
            failed.append(output)
            raise ArithmeticError("the copy failed")
        result: RunnerOutput = execute(output)
        return result

    decode.runner.execute = fail_once
    spec = search("r", range(60, 69), 9)
    if num_branches > 1:
        spec = stub_spec("r", range(60, 69), 9, num_branches=num_branches)
    cluster.submit(spec)
    assert cluster.router is not None
    request = cluster.router.requests[RequestId("r")]
    cluster.submit(stub_spec("other", range(5), 9))
    cluster.run_until_ended()
    cluster.assert_exact()
    assert failed and request.num_attempts == 2
    assert decode.worker.engine.num_failed_steps == 1
    assert_clean(cluster)


def test_what_a_search_looks_for_again_is_no_reuse() -> None:
    cluster = started(decode_blocks=7)
    serve(cluster, search("r", range(20, 29), 14, stops=range(0)))
    kv = cluster.named("decode").worker.engine.kv
    assert (kv.queried_tokens, kv.hit_tokens_local, kv.hit_tokens_moved) == (9, 0, 0)


def test_parked_beams_do_not_count_as_running() -> None:
    cluster = started(scheduler=SchedulerConfig(2, 32, 8, watermark=0.0))
    cluster.submit(search("r", range(20, 29), 14, num_beams=8, stops=range(0)))
    worker = cluster.named("decode").worker
    most = 0
    while not cluster.listeners["r"].ends:
        cluster.advance()
        most = max(most, worker.load().num_running)
    assert most == 8, "each that has a token to compute"
