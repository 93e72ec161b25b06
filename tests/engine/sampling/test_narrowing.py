"""A draw that looks at few tokens draws what one over whole rows draws, to the last bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.request import SamplingParams
from kvferry.engine.sampling.constraints import SamplingRow
from kvferry.engine.sampling.filters import PREFIXES, Filters, draw, num_kept, rank, total_weight
from kvferry.engine.sampling.narrowing import narrow
from kvferry.engine.sampling.sampler import filters_of, sample, uniform

CPU = torch.device("cpu")


def drawn_from_whole_rows(logits: torch.Tensor, filters: Filters, u: torch.Tensor) -> list[int]:
    """The definition: scale, rank and sum everything in float64."""
    exact = logits.double()
    scaled = (exact - exact.amax(-1, keepdim=True)) / filters.temperature[:, None]
    chosen = []
    for row in range(len(logits)):
        one = torch.tensor([row])
        total = total_weight(scaled[one])
        for size in (*PREFIXES, logits.shape[-1]):
            ranking = rank(scaled[one], size, total)
            few = filters.select(one)
            kept, decided = num_kept(ranking, few)
            kept_mass = ranking.mass[0, kept - 1] if decided else ranking.total
            target = u[one] * kept_mass
            unfiltered = (few.top_k == 0) & (few.top_p == 1) & (few.min_p == 0)
            if decided or (unfiltered & (ranking.mass[:, -1] > target)):
                place = min(int((ranking.mass <= target).sum()), int(kept) - 1)
                chosen.append(int(ranking.ids[0, place]))
                break
    return chosen


@st.composite
def batches(draw_: st.DrawFn) -> torch.Tensor:
    """Rows wide enough to be narrowed: smooth, tied, or with many tokens removed."""
    size = draw_(st.sampled_from([2048, 2049, 5003, 40_000]))
    generator = torch.Generator().manual_seed(draw_(st.integers(0, 2**31)))
    rows = torch.randn(3, size, generator=generator) * draw_(st.sampled_from([0.01, 3.0, 1e6]))
    match draw_(st.sampled_from(["smooth", "tied", "removed", "few left"])):
        case "tied":
            rows = rows.round()
        case "removed":
            rows[:, torch.randperm(size, generator=generator)[: size // 3]] = -torch.inf
        case "few left":
            rows[1, torch.randperm(size, generator=generator)[: size - 40]] = -torch.inf
    return rows


@settings(deadline=None, max_examples=60)
@given(
    batches(),
    st.sampled_from([1e-300, 1e-3, 0.7, 1.0, 100.0]),
    st.sampled_from([0, 1, 50, 512, 513, 9000]),
    st.sampled_from([1.0, 0.9, 0.3]),
    st.sampled_from([0.0, 0.05]),
    st.integers(0, 2**31),
)
def test_the_token_is_that_of_the_whole_row(
    logits: torch.Tensor, t: float, k: int, p: float, m: float, seed: int
) -> None:
    params = SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, seed=seed)
    filters = filters_of([SamplingRow(params)] * len(logits), CPU)
    u = torch.tensor([uniform(seed, 0, i) for i in range(len(logits))], dtype=torch.float64)
    assert draw(logits, filters, u).tolist() == drawn_from_whole_rows(logits, filters, u)


@settings(deadline=None, max_examples=60)
@given(batches(), st.sampled_from([1, 40, 512]))
def test_what_is_left_out_is_less_likely_than_what_may_be_ranked(
    logits: torch.Tensor, size: int
) -> None:
    few = narrow(logits, size)
    assert few is not None
    for row, ids, values, bound, has_all in zip(
        logits, few.ids, few.logits, few.bound, few.has_all, strict=True
    ):
        inside = ids[values > -torch.inf]
        assert torch.equal(inside, inside.unique())
        assert torch.equal(row[inside], values[values > -torch.inf])
        outside = torch.ones(len(row), dtype=torch.bool)
        outside[inside] = False
        assert (row[outside] < bound).all()
        assert bool(has_all) == bool((row[outside] == -torch.inf).all())
        assert has_all or len(inside) >= size
        assert size == 512 or has_all or len(inside) < len(row)


def test_logits_that_scaling_makes_equal_stay_together() -> None:
    """In float64 the distances of 1 and 2 to 1e30 are the same number: a tie, by the lower id."""
    logits = torch.zeros(1, 3000)
    logits[0, 2999] = 1e30
    logits[0, 1000:1600] = 2.0
    params = SamplingParams(temperature=1e30, top_k=300)
    filters = filters_of([SamplingRow(params)], CPU)
    u = torch.tensor([0.9], dtype=torch.float64)
    assert draw(logits, filters, u).tolist() == drawn_from_whole_rows(logits, filters, u)


def test_short_rows_are_not_narrowed() -> None:
    assert narrow(torch.zeros(1, 2047), 512) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_type_of_logits_is_sampled(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 3000, dtype=dtype)
    logits[:, 7] = 50
    rows = [SamplingRow(SamplingParams(temperature=t)) for t in (0.0, 1.0)]
    assert sample(logits, rows) == [7, 7]
