"""From logits to a token: pure processors, then one counter-based uniform number per token.

Nothing here has state. A token is a function of its row of logits, the request's parameters and
(seed, branch, output index), so sampling needs no hand-off between workers and does not depend on
who else is in the batch. Knows no sequence and no model.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvferry.engine.batch import PoisonedRows
from kvferry.engine.request import SamplingParams

LogitsProcessor = Callable[[torch.Tensor], torch.Tensor]
"""Maps one row of logits ``[vocab_size]`` float64 to another; a removed token has -inf."""

_PERSON = b"kvferry.sample"
_SEED_MASK = (1 << 64) - 1
_FIRST_PREFIX = 512


class InvalidLogits(PoisonedRows):
    """Rows of logits from which no token can be chosen: NaN, +inf, or nothing but -inf.

    Attributes:
        rows: their row numbers.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(
            rows,
            f"logits of rows {list(rows)} have no finite maximum; the model computed NaN or "
            "infinity: check its weights and dtype",
        )


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Whose token a row of logits yields: parameters, branch, and output position."""

    sampling: SamplingParams
    branch: int
    output_index: int


def uniform(seed: int, branch: int, index: int) -> float:
    """A number in [0, 1): the first 53 bits of BLAKE2b over (seed, branch, index), over 2**53.

    The three are packed little-endian as uint64, uint32, uint64; a negative seed counts as its
    two's complement. The same in every process and on every machine.
    """
    packed = struct.pack("<QIQ", seed & _SEED_MASK, branch, index)
    digest = hashlib.blake2b(packed, digest_size=8, person=_PERSON).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Temperature:
    """Divide by ``temperature`` (> 0)."""

    temperature: float

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale all logits."""
        return logits / self.temperature


@dataclass(frozen=True, slots=True)
class TopK:
    """Keep the ``k`` (>= 1) largest logits, and those equal to the smallest of them."""

    k: int

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Remove what is smaller than the k-th largest."""
        smallest = logits.topk(min(self.k, logits.shape[-1])).values[-1]
        return logits.masked_fill(logits < smallest, -torch.inf)


@dataclass(frozen=True, slots=True)
class TopP:
    """Keep the most likely tokens up to the one at which their probability reaches ``p``.

    Between equal logits the lower id comes first. At least one token stays.
    """

    p: float

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Remove the tail of the distribution."""
        ids, mass, total = _likeliest(logits, self.p)
        num_kept = int((mass < self.p * total).sum()) + 1
        kept = ids[:num_kept]
        return torch.full_like(logits, -torch.inf).index_copy_(0, kept, logits[kept])


def processors(sampling: SamplingParams) -> list[LogitsProcessor]:
    """The processors that ``sampling`` asks for, in the order in which they apply.

    Only for temperature > 0: a greedy token is the largest logit, whatever is filtered.
    """
    chain: list[LogitsProcessor] = [Temperature(sampling.temperature)]
    if sampling.top_k > 0:
        chain.append(TopK(sampling.top_k))
    if sampling.top_p < 1.0:
        chain.append(TopP(sampling.top_p))
    return chain


def draw(logits: torch.Tensor, u: float) -> int:
    """The token at quantile ``u`` of softmax(``logits``), tokens in descending order.

    Args:
        logits: ``[vocab_size]`` float64 with a finite maximum.
        u: in [0, 1).
    """
    ids, mass, total = _likeliest(logits, u)
    chosen = int((mass <= u * total).sum())
    return int(ids[min(chosen, len(ids) - 1)])  # all sums may stay below the total by rounding


def sample(logits: torch.Tensor, keys: Sequence[SampleKey]) -> list[int]:
    """One token per row.

    Args:
        logits: ``[num_rows, vocab_size]``.
        keys: whose token each row yields.  [num_rows]

    Raises InvalidLogits, naming every such row, if a maximum is not finite.
    """
    if not keys:
        return []
    largest, greedy = logits.max(dim=-1)  # NaN is larger than any number here
    bad = (~torch.isfinite(largest)).nonzero().flatten().tolist()
    if bad:
        raise InvalidLogits(bad)
    tokens: list[int] = greedy.tolist()
    for row, key in enumerate(keys):
        if key.sampling.temperature > 0:
            tokens[row] = _sample_row(logits[row].double(), key)
    return tokens


def _sample_row(row: torch.Tensor, key: SampleKey) -> int:
    for process in processors(key.sampling):
        row = process(row)
    return draw(row, uniform(key.sampling.seed, key.branch, key.output_index))


def _likeliest(
    logits: torch.Tensor, fraction: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The most likely tokens that hold more than ``fraction`` of the probability, or all of any.

    Sorts a prefix first and the whole vocabulary only if that does not suffice; the partial sums
    are the same numbers either way.

    Returns:
        ids in descending order of their logit, ties by id  [num_found]
        partial sums of their weights exp(logit - max), float64  [num_found]
        the sum of all weights, a scalar
    """
    weights = (logits - logits.max()).exp()
    total = weights.sum()
    for size in (_FIRST_PREFIX, len(logits)):
        smallest = logits.topk(min(size, len(logits))).values[-1]
        found = ((logits >= smallest) & (weights > 0)).nonzero().flatten()
        ids = found[logits[found].argsort(descending=True, stable=True)]
        mass = weights[ids].cumsum(0)
        if mass[-1] > fraction * total:
            break
    return ids, mass, total
