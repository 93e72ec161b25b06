from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvferry.engine.request import SamplingParams, TokenBias
from kvferry.engine.sampling import sampler
from kvferry.engine.sampling.constraints import SamplingRow
from kvferry.engine.sampling.filters import draw
from kvferry.engine.sampling.sampler import (
    ROWS_AT_ONCE,
    InvalidLogits,
    NothingAllowed,
    sample,
    uniform,
)
from tests.engine.sampling.rows import chi_square, filters, finite

GOLDEN = {
    (0, 0, 0): 0.918129751621392,
    (1, 0, 0): 0.6873281525109708,
    (0, 1, 0): 0.15156946332026,
    (0, 0, 1): 0.06484388625527293,
    (-1, 0, 0): 0.6243992175937709,
    (2**64 - 1, 0, 0): 0.6243992175937709,
    (123456789, 3, 4095): 0.7251542802999186,
}
# 0.999 quantiles of the chi-square distribution by degrees of freedom
QUANTILES = {2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 15: 37.70, 19: 43.82}


def row(seed: int = 0, branch: int = 0, index: int = 0, **params: float) -> SamplingRow:
    return SamplingRow(SamplingParams(seed=seed, **params), branch, index)  # type: ignore[arg-type]


class Transfers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what waits for a device if the tensors are there."""

    WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name().partition(".")[0] in self.WAITING
        return func(*args, **(kwargs or {}))


def test_greedy_tokens_of_a_step_come_from_a_device_in_one_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler, "as_array", lambda logits: None)  # as for another device
    plain, lists = torch.Tensor.tolist, []

    def tolist(tensor: torch.Tensor) -> Any:
        lists.append(tensor.shape)
        return plain(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    logits = torch.randn(5, 100)
    with Transfers() as seen:
        tokens = sample(logits, [row(seed, temperature=0.0) for seed in range(5)])
    assert seen.count == 0 and len(lists) == 1
    assert tokens == plain(logits.argmax(-1))


def test_uniform_has_golden_values_in_this_and_in_another_process() -> None:
    code = (
        "from kvferry.engine.sampling.sampler import uniform\n"
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
        assert chi_square([int(number * 20) for number in numbers], [1 / 20] * 20) < QUANTILES[19]
        lags = [int(a * 4) * 4 + int(b * 4) for a, b in pairwise(numbers)]
        assert chi_square(lags, [1 / 16] * 16) < QUANTILES[15]


LOGITS = torch.tensor([[2.0, 0.5, 1.0, -3.0, 0.0, 1.5]])
HISTORY = [0, 2, 5]


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        (SamplingParams(temperature=0.6), [TemperatureLogitsWarper(0.6)]),
        (SamplingParams(top_k=3), [TopKLogitsWarper(3)]),
        (SamplingParams(top_p=0.8), [TopPLogitsWarper(0.8)]),
        (SamplingParams(min_p=0.2), [MinPLogitsWarper(0.2)]),
        (
            SamplingParams(repetition_penalty=1.7),
            [RepetitionPenaltyLogitsProcessor(1.7)],
        ),
        (
            SamplingParams(
                repetition_penalty=1.3, temperature=0.8, top_k=5, top_p=0.95, min_p=0.05
            ),
            [
                RepetitionPenaltyLogitsProcessor(1.3),
                TemperatureLogitsWarper(0.8),
                TopKLogitsWarper(5),
                TopPLogitsWarper(0.95),
                MinPLogitsWarper(0.05),
            ],
        ),
    ],
)
@pytest.mark.parametrize("over", ["seeds", "indices"])
def test_seeded_samples_follow_the_distribution_of_transformers(
    params: SamplingParams, warpers: list[object], over: str
) -> None:
    scores = LOGITS.double()
    for warper in warpers:
        scores = warper(torch.tensor([HISTORY]), scores)  # type: ignore[operator]
    rows = [
        SamplingRow(
            replace(params, seed=i if over == "seeds" else 11),
            0,
            i if over == "indices" else 0,
            HISTORY,
        )
        for i in range(4000)
    ]
    tokens = sample(LOGITS.expand(len(rows), -1), rows)
    left = finite(scores[0])
    assert set(tokens) <= left
    statistic = chi_square(tokens, scores[0].softmax(-1).tolist())
    assert statistic < QUANTILES[len(left) - 1]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.permutations(range(8)), st.integers(1, 3))
def test_a_token_does_not_depend_on_the_rest_of_the_batch(
    seed: int, order: list[int], repeats: int
) -> None:
    logits = torch.randn(8, 700, generator=torch.Generator().manual_seed(seed))
    rows = [
        row(temperature=0.0),
        row(seed=seed, index=3),
        row(seed=seed, index=4),
        row(seed=5, branch=1, temperature=0.7, top_k=20),
        row(seed=6, temperature=1.3, top_p=0.8),
        row(seed=7, temperature=2.0, top_k=650, top_p=0.9, min_p=0.01),
        row(temperature=0.0, min_tokens=2),
        SamplingRow(SamplingParams(repetition_penalty=1.5, seed=seed), 0, 1, [3, 4, 5]),
    ]
    alone = [sample(logits[i : i + 1], [rows[i]])[0] for i in range(8)]
    order = order * repeats
    assert ROWS_AT_ONCE <= 8, "two repeats take more than one round"
    assert sample(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]


def test_seed_branch_and_output_index_choose_the_number() -> None:
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(0))
    for seed, branch, index in [(0, 0, 0), (3, 0, 0), (0, 3, 0), (0, 0, 3), (4, 5, 6)]:
        number = torch.tensor([uniform(seed, branch, index)], dtype=torch.float64)
        expected = draw(logits, filters(temperature=1.0), number).tolist()
        assert sample(logits, [row(seed, branch, index)]) == expected


def test_greedy_takes_the_first_of_equal_logits_and_ignores_filters_and_seed() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    assert sample(logits, [row(temperature=0.0)]) == [1]
    assert sample(logits, [row(temperature=0.0, top_k=1, top_p=0.01, seed=99)]) == [1]


def test_constraints_hold_for_greedy_tokens_too() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.5, 1.0]])
    forbidden = SamplingParams(temperature=0.0, bad_words=((1,),))
    biased = SamplingParams(temperature=0.0, logit_bias=(TokenBias(3, 5.0),))
    rows = [SamplingRow(forbidden), SamplingRow(biased), SamplingRow(SamplingParams())]
    assert sample(logits.expand(3, -1), rows)[:2] == [2, 3]


def test_logits_without_a_finite_maximum_are_an_error_that_names_the_rows() -> None:
    logits = torch.zeros(5, 8)
    logits[1, 3] = torch.nan
    logits[2, 0] = -torch.inf  # a removed token is no fault
    logits[3] = -torch.inf
    logits[4, 7] = torch.inf
    for temperature in (0.0, 1.0):
        with pytest.raises(InvalidLogits, match="NaN or infinity") as caught:
            sample(logits, [row(temperature=temperature)] * 5)
        assert caught.value.rows == (1, 3, 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_forbids_every_token_ends_alone(temperature: float) -> None:
    everything = SamplingParams(temperature=temperature, bad_words=tuple((i,) for i in range(4)))
    rows = [row(temperature=temperature), SamplingRow(everything)]
    with pytest.raises(NothingAllowed, match="bad_words") as caught:
        sample(torch.zeros(2, 4), rows)
    assert caught.value.rows == (1,)


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.zeros(0, 8), []) == []
