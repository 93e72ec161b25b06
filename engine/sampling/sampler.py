"""The sampler: one token per row of logits, by constraints, filters and a counter-based number.

A token does not depend on who else is in the batch, nor on which worker samples it, so sampling
needs no hand-off. Knows no sequence and no model.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch

from kvferry.engine.batch import PoisonedRows
from kvferry.engine.sampling.constraints import SamplingRow, constrain
from kvferry.engine.sampling.filters import Filters, draw
from kvferry.engine.sampling.narrowing import as_array

ROWS_AT_ONCE = 8
"""Rows drawn together: ranking a whole row takes some 18 numbers of 8 bytes per vocabulary id."""

_PERSON = b"kvferry.sample"
_SEED_MASK = (1 << 64) - 1


class InvalidLogits(PoisonedRows):
    """Rows of logits from which no token can be chosen: NaN, +inf, or nothing but -inf."""

    message = (
        "its logits have no finite maximum: the model computed NaN or infinity; check its weights "
        "and dtype"
    )


class NothingAllowed(PoisonedRows):
    """Rows whose request forbids every token of the vocabulary."""

    message = "bad_words and min_tokens leave no token to choose; forbid less"
    is_requests_fault = True


def uniform(seed: int, branch: int, index: int) -> float:
    """A number in [0, 1): the first 53 bits of BLAKE2b over (seed, branch, index), over 2**53.

    The three are packed little-endian as uint64, uint32, uint64; a negative seed counts as its
    two's complement. The same in every process and on every machine.
    """
    packed = struct.pack("<QIQ", seed & _SEED_MASK, branch, index)
    digest = hashlib.blake2b(packed, digest_size=8, person=_PERSON).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """One token per row.

    Args:
        logits: ``[num_rows, vocab_size]``, not changed.
        rows: whose token each row yields.  [num_rows]

    Raises InvalidLogits or NothingAllowed, naming every such row, if a maximum is not finite.
    """
    if not rows:
        return []
    if not any(row.sampling.constrains or row.sampling.temperature > 0 for row in rows):
        return _likeliest(logits)
    largest, greedy = _largest(logits)
    bad = _unusable(largest)
    if bad:
        raise InvalidLogits(bad)
    constrained = constrain(logits, rows)
    if constrained is not logits:
        largest, greedy = _largest(constrained)
        bad = _unusable(largest)
        if bad:
            raise NothingAllowed(bad)
    random = [place for place, row in enumerate(rows) if row.sampling.temperature > 0]
    for first in range(0, len(random), ROWS_AT_ONCE):
        places = random[first : first + ROWS_AT_ONCE]
        greedy[places] = _draw(constrained[places], [rows[place] for place in places])
    tokens: list[int] = greedy.tolist()
    return tokens


def _likeliest(logits: torch.Tensor) -> list[int]:
    """The likeliest token of each row, in one transfer from a device. Raises InvalidLogits."""
    largest, greedy = _largest(logits)
    found: list[list[int]] = torch.stack((greedy, torch.isfinite(largest).long())).tolist()
    tokens, usable = found
    if not all(usable):
        raise InvalidLogits([place for place, is_usable in enumerate(usable) if not is_usable])
    return tokens


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    numbers = [uniform(row.sampling.seed, row.branch, row.output_index) for row in rows]
    u = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
    return draw(logits, filters_of(rows, logits.device), u)


def filters_of(rows: Sequence[SamplingRow], device: torch.device) -> Filters:
    """The filters of a batch of rows with temperature > 0."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)

    return Filters(
        temperature=column([row.sampling.temperature for row in rows]),
        top_k=torch.tensor([row.sampling.top_k for row in rows], device=device),
        top_p=column([row.sampling.top_p for row in rows]),
        min_p=column([row.sampling.min_p for row in rows]),
    )


def _largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row and the first token that has it; NaN counts as largest.

    By numpy on a CPU: torch's search for the place is several times slower there.
    """
    array = as_array(logits)
    if array is None:
        largest, ids = logits.max(dim=-1)
        return largest, ids
    ids = torch.from_numpy(array.argmax(-1))
    return logits.gather(-1, ids[:, None])[:, 0], ids


def _unusable(largest: torch.Tensor) -> list[int]:
    places: list[int] = (~torch.isfinite(largest)).nonzero().flatten().tolist()
    return places
