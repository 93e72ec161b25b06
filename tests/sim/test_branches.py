"""Several outputs of one prompt: computed once, moved once, shared, and each exact by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from kvferry.cluster.errors import InvalidRequest
from kvferry.cluster.routed_request import RoutedRequest, StopMatch
from kvferry.cluster.token_run import TokenRun
from kvferry.engine.request import FinishReason, RequestId, RequestSpec
from kvferry.engine.stopping import Finish
from tests.fakes import RecordingListener, stub_answer, stub_spec
from tests.sim.cluster import SimCluster

STOPS = range(0, 997, 5)


def started(**settings: Any) -> SimCluster:
    cluster = SimCluster(**settings)
    cluster.run(1.5)
    return cluster


def serve(cluster: SimCluster, spec: RequestSpec) -> RoutedRequest:
    """Submit a request and run it to its end."""
    cluster.submit(spec)
    assert cluster.router is not None
    request = cluster.router.requests[spec.request_id]
    cluster.run_until_ended()
    return request


def moved(request: RoutedRequest) -> int:
    assert request.decode_stats is not None and request.decode_stats.transfer is not None
    return request.decode_stats.transfer.bytes_moved


def assert_clean(cluster: SimCluster) -> None:
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("length", range(1, 10))
def test_four_outputs_move_the_bytes_of_one_and_are_exact(length: int, caching: bool) -> None:
    prompt = range(50, 50 + length)
    alone = serve(started(caching=caching), stub_spec("one", prompt, 7))
    cluster = started(caching=caching)
    request = serve(cluster, stub_spec("four", prompt, 7, num_branches=4))
    cluster.assert_exact()
    assert moved(request) == moved(alone)
    assert request.num_delivered == 28
    assert request.num_prefill_chunks == alone.num_prefill_chunks
    assert request.recomputed_prompt_tokens == 0
    kv = cluster.named("decode").worker.engine.kv
    assert kv.num_copies == (3 if length % cluster.block_size else 0), "one block stays in place"
    assert_clean(cluster)


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("colocated", [False, True])
def test_where_decode_computes_the_prompt_it_computes_it_once(length: int, colocated: bool) -> None:
    """Colocated; or all but a rest of the prompt is there."""
    roles = {"num_prefill": 0, "num_decode": 0, "num_colocated": 1} if colocated else {}
    cluster = started(**roles)
    prompt = range(50, 50 + length)
    serve(cluster, stub_spec("before", prompt, 2))
    serve(cluster, stub_spec("four", prompt, 6, num_branches=4, stop_token_ids=STOPS))
    cluster.assert_exact()
    assert_clean(cluster)


def test_usage_is_that_of_a_colocated_run() -> None:
    spec = stub_spec("r", range(30, 43), 6, num_branches=3, stop_token_ids=STOPS)
    apart = serve(started(), spec)
    together = serve(started(num_prefill=0, num_decode=0, num_colocated=1), spec)
    assert apart.num_delivered == together.num_delivered
    assert apart.num_cached_tokens == together.num_cached_tokens
    assert [b.delivered for b in apart.branches] == [b.delivered for b in together.branches]


def test_a_full_pool_preempts_branches_and_all_stay_exact() -> None:
    cluster = started(decode_blocks=9)
    request = serve(cluster, stub_spec("r", range(20, 29), 14, num_branches=4))
    cluster.assert_exact()
    assert request.num_preemptions > 0
    assert_clean(cluster)


def test_more_branches_than_the_pool_could_hold_are_refused_by_name() -> None:
    cluster = started(decode_blocks=8)
    listener = cluster.submit(stub_spec("r", range(9), 4, num_branches=8))
    cluster.run_until_ended()
    (end,) = listener.ends
    assert isinstance(end.error, InvalidRequest)
    assert "in 8 branches need 11 blocks, this worker has 8" in str(end.error)
    assert_clean(cluster)


@dataclass
class Stopper(RecordingListener):
    """Finds a stop string in one branch after so many of its tokens."""

    branch: int = 1
    after: int = 3

    def on_tokens(self, run: TokenRun, now: float) -> StopMatch | None:
        super().on_tokens(run, now)
        if run.branch == self.branch and len(self.branches[run.branch]) >= self.after:
            return StopMatch(len(run.token_ids), Finish(FinishReason.STOP, "found"))
        return None


@pytest.mark.parametrize("lost", [False, True])
def test_a_branch_that_a_stop_string_ends_lets_go_of_its_blocks_alone(lost: bool) -> None:
    cluster = started()
    if lost:  # the word that the branch is over: the lists say it again
        cluster.filter = lambda e: () if getattr(e.body, "branch", None) == 1 else (0,)
    listener = Stopper()
    spec = stub_spec("r", range(10), 60, num_branches=3)
    cluster.submit(spec, listener)
    (decode,) = [w for w in cluster.workers if w.decode is not None]

    def running() -> set[int]:
        return {key.branch for key in decode.worker.engine.scheduler.sequences}

    assert cluster.run(10, lambda: 1 in listener.branch_ends)
    assert cluster.run(2.5, lambda: running() == {0, 2})
    assert listener.branch_ends[1] == Finish(FinishReason.STOP, "found")
    cluster.run_until_ended()
    for branch in (0, 2):
        assert listener.branches[branch] == stub_answer(spec, branch)
    assert len(listener.branches[1]) == 3
    assert_clean(cluster)


@pytest.mark.parametrize("after", range(16))
def test_a_cancel_in_every_state_frees_all_branches(after: int) -> None:
    cluster = started(blocks_per_poll=1)
    listener = cluster.submit(stub_spec("r", range(60, 83), 30, num_branches=3))
    for _ in range(after):
        cluster.advance()
    assert cluster.router is not None
    assert cluster.router.cancel(RequestId("r"), cluster.clock.now)
    cluster.assert_prefixes("r")
    assert len(listener.ends) == 1
    cluster.run(0.5)
    assert cluster.leftovers() == []


@pytest.mark.parametrize("tokens", range(1, 9))
def test_the_death_of_decode_continues_each_branch_where_it_is(tokens: int) -> None:
    cluster = started(num_decode=2)
    spec = stub_spec("r", range(40, 50), 9, num_branches=3, stop_token_ids=STOPS)
    listener = cluster.submit(spec)
    assert cluster.router is not None
    request = cluster.router.requests[spec.request_id]
    assert cluster.run(
        20, lambda: bool(listener.ends) or len(listener.branches.get(1, [])) >= tokens
    )
    if request.decode is not None:
        cluster.kill(cluster.named(request.decode.worker.node_id))
    cluster.run_until_ended()
    cluster.assert_exact()
    assert_clean(cluster)


def test_log_probabilities_of_the_first_tokens_are_each_branch_s_own() -> None:
    cluster = started()
    seen: dict[int, list[int]] = {}

    class Keeper(RecordingListener):
        def on_tokens(self, run: TokenRun, now: float) -> StopMatch | None:
            seen.setdefault(run.branch, []).extend(entry.token_id for entry in run.logprobs)
            return super().on_tokens(run, now)

    listener = Keeper()
    spec = stub_spec("r", range(9), 5, logprobs=1, num_branches=3)
    cluster.submit(spec, listener)
    cluster.run_until_ended()
    cluster.assert_exact()
    assert seen == listener.branches
    assert [entry.token_id for entry in listener.prompt_logprobs] == list(range(1, 9)), "once"
