"""Rows of logits and parameters for the sampler's tests."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from kvferry.engine.request import SamplingParams
from kvferry.engine.sampling.constraints import SamplingRow
from kvferry.engine.sampling.filters import PREFIXES, Filters, num_kept, rank, total_weight
from kvferry.engine.sampling.sampler import filters_of


@st.composite
def logit_rows(draw: st.DrawFn, distinct: bool = False) -> torch.Tensor:
    """Logits of up to 9000 tokens, so that the short rankings and the whole one are met."""
    size = draw(st.sampled_from([1, 2, 5, 50, 600, 9000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([0.01, 1.0, 8.0]))
    row = torch.randn(size, generator=generator, dtype=torch.float64) * scale
    if not distinct and draw(st.booleans()):
        row = row.mul(2).round().div(2)  # many ties
    return row


def filters(**params: float) -> Filters:
    """The filters of one row."""
    row = SamplingRow(SamplingParams(**params))  # type: ignore[arg-type]
    return filters_of([row], torch.device("cpu"))


def kept(logits: torch.Tensor, **params: float) -> set[int]:
    """Ids that the filters keep of one row."""
    chosen = filters(**params)
    scaled = (logits[None].double() - logits.double().max()) / chosen.temperature[:, None]
    for size in (*PREFIXES, len(logits)):
        ranking = rank(scaled, size, total_weight(scaled))
        count, decided = num_kept(ranking, chosen)
        if decided:
            break
    assert decided
    return set(ranking.ids[0, : int(count)].tolist())


def finite(row: torch.Tensor) -> set[int]:
    """Ids that a processor has left."""
    return set(row.isfinite().nonzero().flatten().tolist())


def chi_square(values: list[int], probabilities: list[float]) -> float:
    """Pearson's statistic of drawn values against their probabilities."""
    expected = [len(values) * p for p in probabilities]
    pairs = [(values.count(i), e) for i, e in enumerate(expected) if e > 0]
    return sum((count - e) ** 2 / e for count, e in pairs)
