from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.sampling.logprobs import LOWEST, logprobs_of


@settings(deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 30), min_size=1, max_size=5))
def test_logprobs_are_the_log_softmax_of_the_token_and_of_the_likeliest(
    seed: int, num_top: list[int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(num_top), 25, generator=generator) * 6
    ids = torch.randint(25, (len(num_top),), generator=generator).tolist()
    wanted = logits.double().log_softmax(-1)
    for place, found in enumerate(logprobs_of(logits, ids, num_top)):
        best = wanted[place].sort(descending=True)
        count = min(num_top[place], 25)
        assert found.token_id == ids[place]
        assert found.logprob == pytest.approx(float(wanted[place, ids[place]]), abs=1e-5)
        assert found.top_ids == tuple(best.indices[:count].tolist())
        assert found.top_logprobs == pytest.approx(best.values[:count].tolist(), abs=1e-5)


def test_a_removed_token_has_the_lowest_logprob() -> None:
    logits = torch.tensor([[0.0, -torch.inf]])
    (found,) = logprobs_of(logits, [1], [2])
    assert found.logprob == LOWEST
    assert found.top_logprobs == (0.0, LOWEST)


def test_no_rows_give_nothing() -> None:
    assert logprobs_of(torch.zeros(0, 8), [], []) == []
