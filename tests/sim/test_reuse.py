"""Prefixes are computed once and moved once: reuse in both pools, through the whole protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvferry.cluster.routed_request import RoutedRequest
from kvferry.engine.request import RequestSpec
from kvferry.worker import messages as m
from kvferry.worker.messages import Envelope
from tests.fakes import stub_spec
from tests.sim.cluster import SimCluster, body_name
from tests.sim.test_serving import assert_clean, started


def serve(cluster: SimCluster, spec: RequestSpec) -> RoutedRequest:
    """Serve one request to its end; its final state."""
    cluster.submit(spec)
    assert cluster.router is not None
    request = cluster.router.requests[spec.request_id]
    cluster.run_until_ended()
    cluster.assert_exact()
    return request


def moved(request: RoutedRequest) -> tuple[int, int]:
    """Blocks moved and blocks reused, as the decode worker tells."""
    assert request.decode_stats is not None and request.decode_stats.transfer is not None
    transfer = request.decode_stats.transfer
    return transfer.blocks_moved, transfer.blocks_reused


def test_a_shared_prefix_is_neither_computed_nor_moved_again() -> None:
    cluster = started(prefill_blocks=64, decode_blocks=64)
    first = serve(cluster, stub_spec("first", range(48), 4))
    second = serve(cluster, stub_spec("second", [*range(32), *range(50, 59)], 4))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert moved(first) == (12, 0)
    assert moved(second) == (3, 8)
    assert second.num_prefill_chunks == 2, "nine positions in chunks of eight"
    assert second.recomputed_prompt_tokens == 0
    assert_clean(cluster)


@pytest.mark.parametrize("length", range(5, 14))
def test_a_prompt_that_decode_holds_needs_no_prefill_leg(length: int) -> None:
    cluster = started()
    serve(cluster, stub_spec("first", range(length), 5))
    prefills = cluster.sent["PrefillRequest"]
    again = serve(cluster, stub_spec("again", range(length), 5))
    assert cluster.sent["PrefillRequest"] == prefills
    assert again.prefill_worker == again.decode_worker
    assert again.num_cached_tokens == min(length - 1, length // 4 * 4)
    assert again.recomputed_prompt_tokens == 0
    assert_clean(cluster)


def test_a_lost_word_that_decode_computes_the_rest_is_healed_by_the_lists() -> None:
    cluster = started()
    serve(cluster, stub_spec("first", range(10), 3))

    def lose(envelope: Envelope) -> Sequence[int]:
        body = envelope.body
        lost = isinstance(body, m.ReserveReply) and body.outcome is m.ReserveOutcome.COMPUTING
        return [] if lost else [1]

    cluster.filter = lose
    again = serve(cluster, stub_spec("again", range(10), 40))
    assert cluster.sent["PrefillRequest"] == 1
    assert again.prefill_here
    assert_clean(cluster)


def test_the_whole_answer_of_an_earlier_turn_is_reused() -> None:
    """A conversation: the next prompt begins with the last one and what was answered."""
    cluster = started(prefill_blocks=64, decode_blocks=64)
    prompt = list(range(12))
    first = serve(cluster, stub_spec("first", prompt, 9))
    longer = [*prompt, *first.delivered, *range(40, 50)]
    second = serve(cluster, stub_spec("second", longer, 4))
    assert moved(second)[1] == 5, "20 of the 21 positions that the first one filled"
    assert second.num_cached_tokens == 12, "the prefill worker knows the first prompt only"
    assert_clean(cluster)


def test_tenants_share_nothing() -> None:
    cluster = started(prefill_blocks=64, decode_blocks=64)
    requests = [
        serve(cluster, replace(stub_spec(name, range(24), 3), cache_salt=salt))
        for name, salt in (("a", "one"), ("b", "two"), ("c", ""))
    ]
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0]
    assert [moved(request) for request in requests] == [(6, 0)] * 3


def test_a_retry_finds_its_prompt_at_the_source() -> None:
    """A dead decode worker: the prompt that it had acknowledged is cached where it came from."""
    cluster = started(num_decode=2, prefill_blocks=64)
    cluster.submit(stub_spec("r", range(24), 12))
    assert cluster.router is not None
    request = cluster.router.requests[stub_spec("r", (), 1).request_id]
    assert cluster.run(20, lambda: len(request.delivered) >= 4)
    assert request.decode is not None
    cluster.kill(cluster.named(request.decode.worker.node_id))
    cluster.run_until_ended()
    cluster.assert_exact()
    assert request.num_attempts == 2
    assert request.recomputed_prompt_tokens < 8, "only the tail"


@pytest.mark.parametrize("dropped", ["Announce", "Acknowledge", "ReserveReply", "PrefillDone"])
def test_hits_survive_a_message_lost_once(dropped: str) -> None:
    cluster = started(prefill_blocks=64, decode_blocks=64)
    serve(cluster, stub_spec("first", range(32), 4))
    gone = [dropped]

    def lose(envelope: Envelope) -> Sequence[int]:
        if gone and body_name(envelope.body) == dropped:
            gone.clear()
            return []
        return [1]

    cluster.filter = lose
    serve(cluster, stub_spec("second", [*range(24), *range(50, 63)], 4))
    assert not gone
    assert_clean(cluster)
