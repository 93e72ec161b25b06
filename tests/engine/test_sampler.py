from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kvferry.engine.request import SamplingParams
from kvferry.engine.sampler import (
    InvalidLogits,
    SampleKey,
    TopK,
    TopP,
    draw,
    processors,
    sample,
    uniform,
)

NO_IDS = torch.zeros(1, 0, dtype=torch.int64)

GOLDEN = {
    (0, 0, 0): 0.918129751621392,
    (1, 0, 0): 0.6873281525109708,
    (0, 1, 0): 0.15156946332026,
    (0, 0, 1): 0.06484388625527293,
    (-1, 0, 0): 0.6243992175937709,
    (2**64 - 1, 0, 0): 0.6243992175937709,
    (123456789, 3, 4095): 0.7251542802999186,
}


@st.composite
def rows(draw: st.DrawFn, distinct: bool = False) -> torch.Tensor:
    """Logits of up to 3000 tokens, so that both the short and the full sort are met."""
    size = draw(st.sampled_from([1, 2, 5, 50, 3000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([0.01, 1.0, 8.0]))
    row = torch.randn(size, generator=generator, dtype=torch.float64) * scale
    if not distinct and draw(st.booleans()):
        row = row.mul(2).round().div(2)  # many ties
    return row


def kept(row: torch.Tensor) -> set[int]:
    return set(row.isfinite().nonzero().flatten().tolist())


def key(seed: int = 0, branch: int = 0, index: int = 0, **params: float) -> SampleKey:
    return SampleKey(SamplingParams(seed=seed, **params), branch, index)  # type: ignore[arg-type]


@given(rows(), st.integers(1, 60))
def test_top_k_equals_transformers(row: torch.Tensor, k: int) -> None:
    assert torch.equal(TopK(k)(row), TopKLogitsWarper(k)(NO_IDS, row[None])[0])


@settings(deadline=None)
@given(rows(distinct=True), st.floats(1e-6, 1.0, exclude_max=True))
def test_top_p_equals_transformers(row: torch.Tensor, p: float) -> None:
    mine, theirs = kept(TopP(p)(row)), kept(TopPLogitsWarper(p)(NO_IDS, row[None])[0])
    assert mine and theirs
    assert_same_up_to_rounding(row, p, mine, theirs)


@settings(deadline=None)
@given(
    rows(distinct=True),
    st.floats(0.05, 4.0),
    st.integers(1, 60),
    st.floats(0.01, 1.0, exclude_max=True),
)
def test_the_chain_equals_transformers(row: torch.Tensor, t: float, k: int, p: float) -> None:
    mine = row
    for process in processors(SamplingParams(temperature=t, top_k=k, top_p=p)):
        mine = process(mine)
    theirs = row[None]
    for warper in (TemperatureLogitsWarper(t), TopKLogitsWarper(k)):
        theirs = warper(NO_IDS, theirs)
    before_top_p = theirs[0]
    theirs = TopPLogitsWarper(p)(NO_IDS, theirs)
    assert_same_up_to_rounding(before_top_p, p, kept(mine), kept(theirs[0]))
    both = sorted(kept(mine) & kept(theirs[0]))
    assert torch.equal(mine[both], theirs[0][both])


def assert_same_up_to_rounding(row: torch.Tensor, p: float, a: set[int], b: set[int]) -> None:
    """Sets may differ only in a token at which the probability before it equals p to 1e-12."""
    probability = row.softmax(-1)
    for token in a ^ b:
        before = float(probability[probability > probability[token]].sum())
        assert math.isclose(before, p, abs_tol=1e-12)


def test_top_p_breaks_ties_by_the_lower_id() -> None:
    row = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    probability = float(row.softmax(-1)[1])
    assert kept(TopP(1.5 * probability)(row)) == {1, 2}


def test_processors_follow_the_parameters() -> None:
    assert [type(p).__name__ for p in processors(SamplingParams())] == ["Temperature"]
    chain = processors(SamplingParams(temperature=0.5, top_k=3, top_p=0.9))
    assert [type(p).__name__ for p in chain] == ["Temperature", "TopK", "TopP"]


@settings(deadline=None)
@given(rows(), st.floats(0, 1, exclude_max=True))
def test_draw_is_the_quantile_of_the_descending_distribution(row: torch.Tensor, u: float) -> None:
    order = row.argsort(descending=True, stable=True)
    weights = (row[order] - row.max()).exp()
    steps = weights.cumsum(0) / weights.sum()
    place = order.tolist().index(draw(row, u))
    low = float(steps[place - 1]) if place else 0.0
    assert low - 1e-12 <= u < float(steps[place]) + 1e-12


def test_draw_never_returns_a_removed_token() -> None:
    row = torch.full((2000,), -torch.inf, dtype=torch.float64)
    row[1999], row[7] = 0.0, -1.0
    largest = 1 - 2.0**-53
    assert draw(row, 0.0) == 1999
    assert draw(row, largest) == 7


def test_uniform_has_golden_values_in_this_and_in_another_process() -> None:
    code = (
        "from kvferry.engine.sampler import uniform\n"
        f"for key in {list(GOLDEN)}: print(repr(uniform(*key)))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert [uniform(*arguments) for arguments in GOLDEN] == list(GOLDEN.values())
    assert [float(line) for line in other] == list(GOLDEN.values())


def test_uniform_is_uniform_and_independent_over_seeds_branches_and_indices() -> None:
    for numbers in (
        [uniform(seed, 0, 0) for seed in range(4000)],
        [uniform(7, branch, 0) for branch in range(4000)],
        [uniform(7, 0, index) for index in range(4000)],
    ):
        assert all(0 <= number < 1 for number in numbers)
        assert chi_square([int(number * 20) for number in numbers], [1 / 20] * 20) < 43.8
        lags = [int(a * 4) * 4 + int(b * 4) for a, b in pairwise(numbers)]
        assert chi_square(lags, [1 / 16] * 16) < 37.7


def test_sampled_tokens_follow_the_filtered_distribution() -> None:
    logits = torch.tensor([[2.0, 0.5, 1.0, -3.0, 0.0, 1.5]])
    params = SamplingParams(temperature=0.8, top_k=4, top_p=0.95, seed=11)
    row = logits[0].double()
    for process in processors(params):
        row = process(row)
    tokens = [sample(logits, [SampleKey(params, 0, index)])[0] for index in range(5000)]
    assert set(tokens) <= kept(row)
    assert chi_square(tokens, row.softmax(-1).tolist()) < 16.3


def chi_square(values: list[int], probabilities: list[float]) -> float:
    """Pearson's statistic; the bounds above are its 0.999 quantiles."""
    expected = [len(values) * p for p in probabilities]
    pairs = [(values.count(i), e) for i, e in enumerate(expected) if e > 0]
    return sum((count - e) ** 2 / e for count, e in pairs)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.permutations(range(6)))
def test_a_token_does_not_depend_on_the_rest_of_the_batch(seed: int, order: list[int]) -> None:
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(seed))
    keys = [
        key(temperature=0.0),
        key(seed=seed, index=3),
        key(seed=seed, index=4),
        key(seed=5, branch=1, temperature=0.7, top_k=20),
        key(seed=6, temperature=1.3, top_p=0.8),
        key(seed=7, temperature=2.0, top_k=50, top_p=0.9),
    ]
    alone = [sample(logits[i : i + 1], [keys[i]])[0] for i in range(6)]
    assert sample(logits[order], [keys[i] for i in order]) == [alone[i] for i in order]


def test_seed_branch_and_output_index_choose_the_number() -> None:
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(0))
    for seed, branch, index in [(0, 0, 0), (3, 0, 0), (0, 3, 0), (0, 0, 3), (4, 5, 6)]:
        expected = draw(logits[0].double(), uniform(seed, branch, index))
        assert sample(logits, [key(seed, branch, index)]) == [expected]


def test_greedy_takes_the_first_of_equal_logits_and_ignores_filters_and_seed() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    assert sample(logits, [key(temperature=0.0)]) == [1]
    assert sample(logits, [key(temperature=0.0, top_k=1, top_p=0.01, seed=99)]) == [1]


def test_logits_without_a_finite_maximum_are_an_error_that_names_the_rows() -> None:
    logits = torch.zeros(5, 8)
    logits[1, 3] = torch.nan
    logits[2, 0] = -torch.inf  # a removed token is no fault
    logits[3] = -torch.inf
    logits[4, 7] = torch.inf
    for temperature in (0.0, 1.0):
        with pytest.raises(InvalidLogits, match=r"rows \[1, 3, 4\]") as caught:
            sample(logits, [key(temperature=temperature)] * 5)
        assert caught.value.rows == (1, 3, 4)


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.zeros(0, 8), []) == []
