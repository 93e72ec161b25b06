"""Temperature, top-k, top-p, min-p and the draw, over a ranking of each row's likeliest tokens.

Every filter keeps a prefix of the ranking, so a filter is a number of tokens kept, and the draw is
a place in the partial sums. Only as much of a row is sorted as its filters and its number need:
a prefix first, the whole vocabulary only if that does not decide; and a row is scaled and summed
in float64 as a whole only if a filter looks at its sum. Knows neither requests nor models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvferry.engine.sampling.narrowing import narrow

PREFIXES = (512, 8192)
"""Lengths of ranking that are tried before the whole vocabulary is sorted."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Parameters of a batch, one entry per row.

    Attributes:
        temperature: > 0, divides the logits; float64.
        top_k: keep the k likeliest, and those as likely as the last of them; 0 keeps all; int64.
        top_p: keep the likeliest up to the one at which their share reaches p, in (0, 1]; float64.
        min_p: keep those at least ``min_p`` times as likely as the likeliest, 0 to 1; float64.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @property
    def is_none(self) -> torch.Tensor:
        """Which rows keep everything."""
        return (self.top_k == 0) & (self.top_p == 1) & (self.min_p == 0)

    def look_at_total(self) -> torch.Tensor:
        """Which rows need the sum of all weights, if the first ranking reaches as far as top-k.

        Min-p compares with the largest only; behind top-k, top-p takes its share of what is left.
        """
        near = (self.top_k > 0) & (self.top_k <= PREFIXES[0])
        return self.is_none | ((self.top_p < 1) & ~near)

    def select(self, rows: torch.Tensor) -> Filters:
        """Those of some rows."""
        return Filters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(frozen=True, slots=True)
class Ranking:
    """The likeliest tokens of each row, in descending order, ties by the lower id.

    Attributes:
        ids: [num_rows, width]; what stands behind ``num_ranked`` means nothing.
        logits: -inf behind ``num_ranked``; float64.  [num_rows, width]
        weights: exp(logit - largest).  [num_rows, width]
        mass: partial sums of ``weights``.  [num_rows, width]
        num_ranked: tokens ranked in each row.  [num_rows]
        total: sum of all weights of the row, ranked or not.  [num_rows]
        is_whole: whether nothing but removed tokens is left unranked.  [num_rows]
    """

    ids: torch.Tensor
    logits: torch.Tensor
    weights: torch.Tensor
    mass: torch.Tensor
    num_ranked: torch.Tensor
    total: torch.Tensor
    is_whole: torch.Tensor


def total_weight(logits: torch.Tensor) -> torch.Tensor:
    """Sum of exp(logit - largest) of each row.  [num_rows, vocab_size] to [num_rows]"""
    return (logits - logits.amax(-1, keepdim=True)).exp_().sum(-1)


def rank(logits: torch.Tensor, size: int, total: torch.Tensor) -> Ranking:
    """Rank at least the ``size`` likeliest tokens of each row, or all that there are.

    Args:
        logits: ``[num_rows, vocab_size]`` float64, each row with a finite maximum.
        size: at least 1.
        total: ``total_weight(logits)``.
    """
    found = logits > -torch.inf
    if size < logits.shape[-1]:
        found &= logits >= logits.topk(size).values[:, -1:]  # every tie of the last one
    num_ranked = found.sum(-1)
    rows, ids = found.nonzero(as_tuple=True)
    firsts = num_ranked.cumsum(0) - num_ranked
    places = torch.arange(len(rows), device=logits.device) - firsts[rows]
    shape = (len(logits), int(num_ranked.max()))
    found_logits = torch.full(shape, -torch.inf, dtype=logits.dtype, device=logits.device)
    found_ids = torch.zeros(shape, dtype=torch.int64, device=logits.device)
    found_logits[rows, places] = logits[rows, ids]
    found_ids[rows, places] = ids
    ordered, order = found_logits.sort(dim=-1, descending=True, stable=True)
    weights = (ordered - ordered[:, :1]).exp()
    return Ranking(
        ids=found_ids.gather(-1, order),
        logits=ordered,
        weights=weights,
        mass=weights.cumsum(-1),
        num_ranked=num_ranked,
        total=total,
        is_whole=num_ranked == (logits > -torch.inf).sum(-1),
    )


def num_kept(ranking: Ranking, filters: Filters) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the ranked tokens pass top-k, then top-p, then min-p.

    Returns:
        the number of ranked tokens kept, at least 1.  [num_rows]
        whether that is all that the row's filters keep; else more must be ranked.  [num_rows]
    """
    by_k, cut_by_k = _top_k(ranking, filters.top_k)
    last = (by_k - 1)[:, None]
    mass = torch.where(cut_by_k, ranking.mass.gather(-1, last)[:, 0], ranking.total)
    by_p = (ranking.mass < (filters.top_p * mass)[:, None]).sum(-1) + 1
    cut_by_p = (filters.top_p < 1) & (by_p <= ranking.num_ranked)
    by_p = torch.where(filters.top_p < 1, by_p, ranking.num_ranked)
    by_min = (ranking.weights >= filters.min_p[:, None]).sum(-1)  # the largest weight is 1
    by_min = torch.where(filters.min_p > 0, by_min, ranking.num_ranked)
    cut_by_min = by_min < ranking.num_ranked
    kept = torch.minimum(torch.minimum(by_k, by_p), torch.minimum(by_min, ranking.num_ranked))
    known_mass = cut_by_k | (filters.top_k == 0) | ranking.is_whole
    decided = ranking.is_whole | cut_by_k | ((cut_by_p | cut_by_min) & known_mass)
    return kept, decided


def _top_k(ranking: Ranking, top_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens kept by top-k, and whether the ranking holds all of these."""
    cut = (top_k > 0) & (top_k <= ranking.num_ranked)
    last = (torch.where(cut, top_k, ranking.num_ranked) - 1)[:, None]
    smallest = ranking.logits.gather(-1, last)
    as_likely = (ranking.logits >= smallest).sum(-1)
    return torch.where(cut, as_likely, ranking.num_ranked), cut


def draw(logits: torch.Tensor, filters: Filters, u: torch.Tensor) -> torch.Tensor:
    """The token of each row at quantile ``u`` of what the filters keep, in descending order.

    Args:
        logits: ``[num_rows, vocab_size]``, each row with a finite maximum.
        filters: of the same rows.
        u: in [0, 1), float64.  [num_rows]

    Returns:
        token ids.  [num_rows] int64
    """
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    left = torch.arange(len(logits), device=logits.device)
    unknown = torch.full((len(logits),), torch.nan, dtype=torch.float64, device=logits.device)
    rows = _Rows(logits, logits.amax(-1, keepdim=True).double(), unknown, filters)
    rows = rows.summed(filters.look_at_total())
    for size in (*PREFIXES, logits.shape[-1]):
        ranking = rows.rank(size)
        unsummed = rows.total.isnan() & (rows.filters.top_p < 1)
        if unsummed.any():  # needed after all where top-k asks for more tokens than there are
            rows = rows.summed(unsummed & ~_top_k(ranking, rows.filters.top_k)[1])
            ranking = replace(ranking, total=rows.total)
        ids, decided = _draw(ranking, rows.filters, u[left])
        chosen[left[decided]] = ids[decided]
        left = left[~decided]
        if not len(left):
            break
        rows = rows.select(~decided)
    return chosen


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of raw logits, and what is known of them.

    Attributes:
        logits: [num_rows, vocab_size]
        largest: float64.  [num_rows, 1]
        total: sums of all weights; NaN where no filter looks at them.  [num_rows]
        filters: of the same rows.
    """

    logits: torch.Tensor
    largest: torch.Tensor
    total: torch.Tensor
    filters: Filters

    def select(self, rows: torch.Tensor) -> _Rows:
        """Some of them."""
        return _Rows(
            self.logits[rows], self.largest[rows], self.total[rows], self.filters.select(rows)
        )

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of each row over its temperature in float64, the largest being 0.

        It becomes 0 first: divided by a very small temperature it would be infinite.
        """
        distances = logits.to(torch.float64, copy=True).sub_(self.largest)
        return distances.div_(self.filters.temperature[:, None])

    def summed(self, wanted: torch.Tensor) -> _Rows:
        """The same with the totals of the rows ``wanted``."""
        if not wanted.any():
            return self
        rows = self.select(wanted)
        total = self.total.clone()
        total[wanted] = total_weight(rows.scaled(rows.logits))
        return replace(self, total=total)

    def rank(self, size: int) -> Ranking:
        """``rank`` of the scaled logits, of which only those are looked at that it may hold."""
        few = narrow(self.logits, size)
        if few is None:
            return rank(self.scaled(self.logits), size, self.total)
        ranking = rank(self.scaled(few.logits), size, self.total)
        is_all = few.has_all | (self.scaled(few.bound)[:, 0] == -torch.inf)
        return replace(
            ranking, ids=few.ids.gather(-1, ranking.ids), is_whole=ranking.is_whole & is_all
        )


def _draw(ranking: Ranking, filters: Filters, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens at the quantiles, and of which rows they are certain."""
    kept, decided = num_kept(ranking, filters)
    last = (kept - 1)[:, None]
    kept_mass = torch.where(decided, ranking.mass.gather(-1, last)[:, 0], ranking.total)
    target = u * kept_mass
    decided = decided | (filters.is_none & (ranking.mass[:, -1] > target))
    place = (ranking.mass <= target[:, None]).sum(-1)
    place = torch.minimum(place, kept - 1)  # all sums may stay below the target by rounding
    return ranking.ids.gather(-1, place[:, None])[:, 0], decided
