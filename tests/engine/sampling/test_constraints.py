from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from kvferry.engine.request import SamplingParams, TokenBias
from kvferry.engine.sampling.constraints import SamplingRow, constrain

VOCAB = 23
EOS = 5
tokens = st.integers(0, VOCAB - 1)
histories = st.lists(tokens, min_size=1, max_size=40)


def logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def row(sampling: SamplingParams, ids: list[int], num_output: int = 0) -> SamplingRow:
    return SamplingRow(sampling, 0, num_output, ids, (EOS,))


@given(st.integers(0, 2**31), histories, st.floats(0.01, 10.0))
def test_repetition_penalty_equals_transformers(seed: int, ids: list[int], penalty: float) -> None:
    own = constrain(logits(seed), [row(SamplingParams(repetition_penalty=penalty), ids)])
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), logits(seed))
    assert torch.equal(own, theirs)


@given(
    st.integers(0, 2**31),
    histories,
    st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=8),
)
def test_bad_words_equal_transformers(seed: int, ids: list[int], words: list[list[int]]) -> None:
    sampling = SamplingParams(bad_words=tuple(tuple(word) for word in words))
    own = constrain(logits(seed), [row(sampling, ids)])
    theirs = NoBadWordsLogitsProcessor(words)(torch.tensor([ids]), logits(seed))
    assert torch.equal(own, theirs)


@given(st.integers(0, 2**31), st.dictionaries(tokens, st.floats(-100, 100, width=32), min_size=1))
def test_logit_bias_equals_transformers(seed: int, bias: dict[int, float]) -> None:
    sampling = SamplingParams(logit_bias=tuple(TokenBias(*item) for item in bias.items()))
    own = constrain(logits(seed), [row(sampling, [1])])
    biases: Any = [[[index], value] for index, value in bias.items()]
    theirs = SequenceBiasLogitsProcessor(biases)(torch.tensor([[1]]), logits(seed))
    assert torch.equal(own, theirs)


@given(st.integers(0, 2**31), st.integers(0, 9), st.integers(1, 8), st.lists(tokens, max_size=3))
def test_min_tokens_equal_transformers(
    seed: int, num_output: int, min_tokens: int, stop_ids: list[int]
) -> None:
    prompt = [1, 2, 3]
    sampling = SamplingParams(min_tokens=min_tokens, stop_token_ids=tuple(stop_ids))
    ids = [*prompt, *range(num_output)]
    own = constrain(logits(seed), [row(sampling, ids, num_output)])
    theirs = MinNewTokensLengthLogitsProcessor(len(prompt), min_tokens, [EOS, *stop_ids])(
        torch.tensor([ids]), logits(seed)
    )
    assert torch.equal(own, theirs)


def test_min_tokens_leave_an_ignored_end_of_sequence_alone() -> None:
    sampling = SamplingParams(min_tokens=3, ignore_eos=True, stop_token_ids=(7,))
    own = constrain(logits(0), [row(sampling, [1])])
    assert own[0, EOS] == logits(0)[0, EOS] and own[0, 7] == -torch.inf


@given(
    st.integers(0, 2**31),
    histories,
    st.integers(0, 40),
    st.floats(-2, 2),
    st.floats(-2, 2),
)
def test_presence_and_frequency_count_output_tokens_only(
    seed: int, ids: list[int], num_output: int, presence: float, frequency: float
) -> None:
    num_output = min(num_output, len(ids))
    sampling = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    own = constrain(logits(seed), [row(sampling, ids, num_output)])
    wanted = logits(seed).double()
    output = ids[len(ids) - num_output :]
    for index in set(output):
        wanted[0, index] -= frequency * output.count(index) + presence
    assert torch.allclose(own.double(), wanted, atol=1e-4)


@st.composite
def sampling_rows(draw: st.DrawFn) -> SamplingRow:
    """Any mixture of constraints."""
    ids = draw(histories)
    maybe = st.booleans()
    sampling = SamplingParams(
        repetition_penalty=draw(st.floats(0.5, 2.0)) if draw(maybe) else 1.0,
        presence_penalty=draw(st.floats(-2, 2)) if draw(maybe) else 0.0,
        frequency_penalty=draw(st.floats(-2, 2)) if draw(maybe) else 0.0,
        min_tokens=draw(st.integers(0, 10)) if draw(maybe) else 0,
        logit_bias=(TokenBias(draw(tokens), draw(st.floats(-9, 9))),) if draw(maybe) else (),
        bad_words=((ids[-1], draw(tokens)), (draw(tokens),)) if draw(maybe) else (),
    )
    return row(sampling, ids, draw(st.integers(0, len(ids))))


@settings(deadline=None)
@given(st.lists(sampling_rows(), min_size=1, max_size=6), st.integers(0, 2**31))
def test_a_row_does_not_depend_on_the_rest_of_the_batch(rows: list[SamplingRow], seed: int) -> None:
    batch = logits(seed, len(rows))
    before = batch.clone()
    together = constrain(batch, rows)
    assert torch.equal(batch, before), "the model's own logits were changed"
    for place, each in enumerate(rows):
        assert torch.equal(constrain(batch[place : place + 1], [each])[0], together[place])


@settings(deadline=None)
@given(sampling_rows(), st.integers(0, 2**31))
def test_only_rows_that_look_back_need_their_tokens(each: SamplingRow, seed: int) -> None:
    forgetful = replace(each, token_ids=each.token_ids if each.sampling.looks_back else ())
    assert torch.equal(constrain(logits(seed), [each]), constrain(logits(seed), [forgetful]))


def test_an_id_that_the_model_lacks_needs_no_removal() -> None:
    sampling = SamplingParams(min_tokens=2, bad_words=((VOCAB + 3,),), stop_token_ids=(VOCAB,))
    own = constrain(logits(0), [SamplingRow(sampling, 0, 0, [1], (2**31 - 1,))])
    assert torch.equal(own, logits(0))


def test_the_order_is_removal_bias_repetition_output() -> None:
    sampling = SamplingParams(
        logit_bias=(TokenBias(2, -3.0), TokenBias(3, 5.0)),
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        bad_words=((3,),),
    )
    own = constrain(torch.ones(1, 5), [row(sampling, [1, 2, 2], 2)])
    assert own.tolist() == [[1.0, 0.5, (1.0 - 3.0) * 2.0 - 0.25 - 1.0, -torch.inf, 1.0]]


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.0, top_k=3)])
def test_without_constraints_the_logits_are_not_copied(sampling: SamplingParams) -> None:
    given_logits = logits(0)
    assert constrain(given_logits, [row(sampling, [1])]) is given_logits
