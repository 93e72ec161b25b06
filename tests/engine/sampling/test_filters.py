from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvferry.engine.sampling.filters import draw, num_kept, rank, total_weight
from tests.engine.sampling.rows import filters, finite, kept, logit_rows

NO_IDS: Any = torch.zeros(1, 0, dtype=torch.int64)


@settings(deadline=None)
@given(logit_rows(), st.integers(1, 4000))
def test_top_k_equals_transformers(row: torch.Tensor, k: int) -> None:
    assert kept(row, top_k=k) == finite(TopKLogitsWarper(k)(NO_IDS, row[None])[0])


@settings(deadline=None)
@given(logit_rows(distinct=True), st.floats(1e-6, 1.0, exclude_max=True))
def test_top_p_equals_transformers(row: torch.Tensor, p: float) -> None:
    mine, theirs = kept(row, top_p=p), finite(TopPLogitsWarper(p)(NO_IDS, row[None])[0])
    assert mine and theirs
    assert_same_up_to_rounding(row, p, mine, theirs)


@settings(deadline=None)
@given(logit_rows(), st.floats(1e-6, 1.0))
def test_min_p_equals_transformers(row: torch.Tensor, p: float) -> None:
    mine, theirs = kept(row, min_p=p), finite(MinPLogitsWarper(p)(NO_IDS, row[None])[0])
    share = (row - row.max()).exp()
    assert all(math.isclose(float(share[token]), p, rel_tol=1e-9) for token in mine ^ theirs)


@settings(deadline=None, max_examples=200)
@given(
    logit_rows(distinct=True),
    st.floats(0.05, 4.0),
    st.one_of(st.just(0), st.integers(1, 700)),
    st.one_of(st.just(1.0), st.floats(0.01, 1.0, exclude_max=True)),
    st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
)
def test_the_chain_equals_transformers(
    row: torch.Tensor, t: float, k: int, p: float, m: float
) -> None:
    theirs = TemperatureLogitsWarper(t)(NO_IDS, row[None])
    if k:
        theirs = TopKLogitsWarper(k)(NO_IDS, theirs)
    before_top_p = theirs[0]
    theirs = TopPLogitsWarper(p)(NO_IDS, theirs)
    if m:
        theirs = MinPLogitsWarper(m)(NO_IDS, theirs)
    mine = kept(row, temperature=t, top_k=k, top_p=p, min_p=m)
    share = (before_top_p - before_top_p.max()).exp()
    differing = mine ^ finite(theirs[0])
    by_min_p = {i for i in differing if math.isclose(float(share[i]), m, rel_tol=1e-9)}
    assert_same_up_to_rounding(before_top_p, p, differing - by_min_p, set())


def assert_same_up_to_rounding(row: torch.Tensor, p: float, a: set[int], b: set[int]) -> None:
    """Sets may differ only in a token at which the probability before it equals p to 1e-12."""
    probability = row.softmax(-1)
    for token in a ^ b:
        before = float(probability[probability > probability[token]].sum())
        assert math.isclose(before, p, abs_tol=1e-12)


def test_top_p_breaks_ties_by_the_lower_id() -> None:
    row = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    probability = float(row.softmax(-1)[1])
    assert kept(row, top_p=1.5 * probability) == {1, 2}


def drawn(row: torch.Tensor, u: float, **params: float) -> int:
    return int(draw(row[None], filters(**params), torch.tensor([u], dtype=torch.float64)))


@settings(deadline=None)
@given(logit_rows(), st.floats(0, 1, exclude_max=True))
def test_draw_is_the_quantile_of_the_descending_distribution(row: torch.Tensor, u: float) -> None:
    order = row.argsort(descending=True, stable=True)
    weights = (row[order] - row.max()).exp()
    steps = weights.cumsum(0) / weights.sum()
    place = order.tolist().index(drawn(row, u))
    low = float(steps[place - 1]) if place else 0.0
    assert low - 1e-12 <= u < float(steps[place]) + 1e-12


@settings(deadline=None)
@given(
    logit_rows(),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 700),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
)
def test_draw_is_the_quantile_of_what_the_filters_keep(
    row: torch.Tensor, u: float, k: int, p: float, m: float
) -> None:
    ids = kept(row, top_k=k, top_p=p, min_p=m)
    left = torch.full_like(row, -torch.inf)
    left[sorted(ids)] = row[sorted(ids)]
    token = drawn(row, u, top_k=k, top_p=p, min_p=m)
    order = left.argsort(descending=True, stable=True)
    steps = left.softmax(-1)[order].cumsum(0)
    place = order.tolist().index(token)
    assert token in ids
    low = float(steps[place - 1]) if place else 0.0
    assert low - 1e-12 <= u < float(steps[place]) + 1e-12


@settings(deadline=None)
@given(logit_rows(distinct=True), st.floats(5e-324, 1e-12), st.floats(0, 1, exclude_max=True))
def test_a_temperature_near_zero_is_greedy(row: torch.Tensor, t: float, u: float) -> None:
    best = row.topk(min(2, len(row))).values
    if len(row) == 1 or best[0] - best[1] > 1e-9:
        assert drawn(row, u, temperature=t) == int(row.argmax())


def test_draw_never_returns_a_removed_token() -> None:
    row = torch.full((2000,), -torch.inf, dtype=torch.float64)
    row[1999], row[7] = 0.0, -1.0
    assert drawn(row, 0.0) == 1999
    assert drawn(row, 1 - 2.0**-53) == 7


@settings(deadline=None)
@given(st.lists(logit_rows(), min_size=1, max_size=4), st.integers(1, 600))
def test_a_short_ranking_is_the_beginning_of_the_whole_one(
    rows: list[torch.Tensor], size: int
) -> None:
    width = max(len(row) for row in rows)
    batch = torch.full((len(rows), width), -torch.inf, dtype=torch.float64)
    for place, row in enumerate(rows):
        batch[place, : len(row)] = row
    total = total_weight(batch)
    short, whole = rank(batch, size, total), rank(batch, width, total)
    assert whole.is_whole.all()
    for place in range(len(rows)):
        count = int(short.num_ranked[place])
        assert count >= min(size, len(rows[place]))
        assert torch.equal(short.ids[place, :count], whole.ids[place, :count])
        assert torch.equal(short.mass[place, :count], whole.mass[place, :count])
        assert short.is_whole[place] == (count == len(rows[place]))


def test_a_ranking_too_short_for_its_filters_does_not_decide() -> None:
    row = torch.zeros(1, 900, dtype=torch.float64)
    row[0, :10] = torch.arange(10, 0, -1)
    ranking = rank(row, 5, total_weight(row))
    assert num_kept(ranking, filters(top_k=5))[1]
    assert not num_kept(ranking, filters(top_k=6))[1]
    assert not num_kept(ranking, filters(top_p=0.9999))[1]
    assert num_kept(ranking, filters(top_p=0.5))[1]
    assert num_kept(ranking, filters(min_p=0.5))[1]
    assert not num_kept(ranking, filters(min_p=1e-4))[1]
    assert not num_kept(ranking, filters(top_k=6, top_p=0.5))[1]
