"""A peer's answers are read as they came, and nothing that is not whole passes for an answer."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from benchmarks.peers.completions_api import PeerAnswer, PeerFailed, answer_of, client
from kvferry.cluster.loadgen.measures import BY_IDS, BY_USAGE, Receipt
from tests.loadgen.http_peer import HttpPeer


def ask(peer: HttpPeer) -> PeerAnswer:
    """The peer's answer, by a clock that counts its readings."""
    ticks = itertools.count()

    async def one() -> PeerAnswer:
        async with client(peer.url, "m", lambda: float(next(ticks))) as send:
            answer = await send([1, 2], 3)
        assert isinstance(answer, PeerAnswer)
        return answer

    return asyncio.run(one())


def test_a_request_says_exactly_what_is_wanted() -> None:
    with HttpPeer() as peer:
        answer = ask(peer)
    assert answer.output_token_ids == (0, 1, 2)
    assert answer.ttft_s is not None
    assert 0 < answer.ttft_s <= answer.e2e_s
    assert len(answer.itl_s) == 2
    (path, body) = peer.requests[0]
    assert path == "/v1/completions"
    assert body["model"] == "m"
    assert body["prompt"] == [1, 2]
    assert body["max_tokens"] == 3
    assert (body["ignore_eos"], body["temperature"], body["stream"]) == (True, 0.0, True)


def test_every_token_has_the_time_of_its_event() -> None:
    receipt = Receipt(10.0, [11.0, 13.0, 13.0, 15.0], [5, 6, 7, 8], [], 17.0)
    receipt.completion_tokens, receipt.counted_by = 4, BY_IDS
    assert answer_of(receipt) == PeerAnswer((5, 6, 7, 8), 1.0, (2.0, 0.0, 2.0), 7.0)


@pytest.mark.parametrize("counted", [None, 1, 3])
def test_tokens_and_usage_must_agree(counted: int | None) -> None:
    receipt = Receipt(0.0, [1.0, 2.0], [5, 6], [], 3.0, completion_tokens=counted)
    with pytest.raises(PeerFailed, match=f"got 2 tokens, but usage says {counted}"):
        answer_of(receipt)


def test_an_answer_without_token_ids_is_none() -> None:
    receipt = Receipt(0.0, [1.0], [], [" x"], 3.0, completion_tokens=1, counted_by=BY_USAGE)
    with pytest.raises(PeerFailed, match="no token ids"):
        answer_of(receipt)
    with HttpPeer(gives_ids=False) as peer, pytest.raises(PeerFailed, match="no token ids"):
        ask(peer)


def test_what_the_peer_says_went_wrong_is_its_failure() -> None:
    with HttpPeer(gives_usage=False) as peer, pytest.raises(PeerFailed, match="usage says None"):
        ask(peer)
    with HttpPeer() as peer:
        url = peer.url
    peer.url = url  # nobody listens there any more
    with pytest.raises(PeerFailed, match="ClusterUnreachable"):
        ask(peer)
