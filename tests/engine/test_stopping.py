"""When an output token ends its request; delivered tokens count as output."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.request import FinishReason, RequestId, RequestSpec, SamplingParams
from kvferry.engine.stopping import Finish, finish_after

LENGTH = Finish(FinishReason.LENGTH)
EOS, STOP, PLAIN = 2, 7, 50


def spec(
    prompt: int = 5,
    delivered: int = 0,
    max_tokens: int = 100,
    max_model_len: int = 1000,
    ignore_eos: bool = False,
    stop_token_ids: tuple[int, ...] = (STOP,),
) -> RequestSpec:
    return RequestSpec(
        RequestId("r"),
        tuple(range(100, 100 + prompt)),
        (tuple(range(200, 200 + delivered)),),
        SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids),
        eos_token_ids=(EOS, 3),
        max_model_len=max_model_len,
    )


def test_a_plain_token_within_the_limits_ends_nothing() -> None:
    assert finish_after(spec(), 0, PLAIN) is None


@pytest.mark.parametrize("index", [0, 5])
def test_a_stop_id_ends_the_request_and_is_named(index: int) -> None:
    assert finish_after(spec(), index, STOP) == Finish(FinishReason.STOP, STOP)


@pytest.mark.parametrize("token_id", [EOS, 3])
def test_end_of_sequence_ends_the_request_without_a_reason_of_the_users(token_id: int) -> None:
    assert finish_after(spec(), 0, token_id) == Finish(FinishReason.STOP, None)
    assert finish_after(spec(ignore_eos=True), 0, token_id) is None


def test_a_stop_id_counts_also_where_end_of_sequence_is_ignored() -> None:
    asked = spec(ignore_eos=True, stop_token_ids=(EOS,))
    assert finish_after(asked, 0, EOS) == Finish(FinishReason.STOP, EOS)


def test_the_reason_is_the_stop_even_where_the_limit_is_reached_at_once() -> None:
    assert finish_after(spec(max_tokens=1), 0, STOP) == Finish(FinishReason.STOP, STOP)
    assert finish_after(spec(max_tokens=1), 0, EOS) == Finish(FinishReason.STOP)
    assert finish_after(spec(max_model_len=6), 0, EOS) == Finish(FinishReason.STOP)


@given(st.integers(1, 6), st.integers(0, 6), st.integers(0, 8))
def test_the_token_limit_counts_output_from_the_first_token_of_the_request(
    max_tokens: int, delivered: int, index: int
) -> None:
    ended = finish_after(spec(delivered=delivered, max_tokens=max_tokens), index, PLAIN)
    assert ended == (LENGTH if index + 1 >= max_tokens else None)


@given(st.integers(1, 9), st.integers(0, 6), st.integers(2, 12), st.integers(0, 12))
def test_prompt_and_output_together_fit_the_model(
    prompt: int, delivered: int, max_model_len: int, index: int
) -> None:
    asked = spec(prompt=prompt, delivered=delivered, max_model_len=max_model_len)
    ended = finish_after(asked, index, PLAIN)
    assert ended == (LENGTH if prompt + index + 1 >= max_model_len else None)


@given(st.integers(0, 5), st.integers(0, 8), st.sampled_from([PLAIN, STOP, EOS]))
def test_tokens_of_an_earlier_attempt_change_no_end(
    delivered: int, index: int, token_id: int
) -> None:
    """The same token at the same output index ends the request, whoever sampled the others."""
    whole = spec(max_tokens=6, max_model_len=12)
    again = replace(whole, suffixes=(tuple(range(delivered)),))
    assert finish_after(again, index, token_id) == finish_after(whole, index, token_id)
