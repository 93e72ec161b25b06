"""The few tokens of each row that a ranking can hold, found without sorting or scaling the row.

The maxima of interleaved columns bound the likeliest tokens from below: where ``size`` columns
have a maximum of at least b, so many logits are at least b. By numpy, row by row, which on a CPU
takes a tenth of what torch takes for whole rows; on other devices nothing is narrowed. Knows
logits; does not know filters or temperatures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ROUNDING = 2.0**-48
"""Logits whose distances to the largest differ relatively by less may be scaled to a tie."""


@dataclass(frozen=True, slots=True)
class Narrowed:
    """Some tokens of each row, by ascending id.

    Invariant: no token left out is as likely as the least likely of the ``size`` likeliest, even
    after division by a temperature in float64.

    Attributes:
        ids: 0 behind the last token of a row.  [num_rows, width] int64
        logits: -inf behind the last token of a row.  [num_rows, width]
        bound: what was left out is less.  [num_rows, 1]
        has_all: whether nothing but removed tokens was left out.  [num_rows] bool
    """

    ids: torch.Tensor
    logits: torch.Tensor
    bound: torch.Tensor
    has_all: torch.Tensor


def as_array(logits: torch.Tensor) -> NDArray[Any] | None:
    """A view of logits for numpy; None on other devices and for types that numpy lacks."""
    if logits.device.type != "cpu" or logits.dtype is torch.bfloat16:
        return None
    return logits.numpy()


def narrow(logits: torch.Tensor, size: int) -> Narrowed | None:
    """The tokens that may be among the ``size`` likeliest; None where that would not help.

    Args:
        logits: ``[num_rows, vocab_size]``, each row with a finite maximum.
        size: at least 1.
    """
    array = as_array(logits)
    if array is None or logits.shape[-1] < 4 * size:
        return None
    bounds = [_bound(row, size) for row in array]
    found = [np.flatnonzero(row >= bound) for row, bound in zip(array, bounds, strict=True)]
    shape = (len(found), max(len(ids) for ids in found))
    all_ids = np.zeros(shape, dtype=np.int64)
    values = np.full(shape, -np.inf, dtype=array.dtype)
    for place, (row, ids) in enumerate(zip(array, found, strict=True)):
        all_ids[place, : len(ids)] = ids
        values[place, : len(ids)] = row[ids]
    has_all = [_has_all(row, len(ids)) for row, ids in zip(array, found, strict=True)]
    return Narrowed(
        torch.from_numpy(all_ids),
        torch.from_numpy(values),
        torch.tensor(bounds, dtype=logits.dtype)[:, None],
        torch.tensor(has_all),
    )


def _bound(row: NDArray[Any], size: int) -> Any:
    """The lowest logit that may be ranked, finite."""
    num_columns = 2 * size
    depth = len(row) // num_columns
    maxima = row[: depth * num_columns].reshape(depth, num_columns).max(0)
    bound = float(np.partition(maxima, num_columns - size)[num_columns - size])
    reduced = row.dtype.type(bound - (float(row.max()) - bound) * _ROUNDING)
    lowest = np.nextafter(reduced, row.dtype.type(-np.inf))
    return max(lowest, np.finfo(row.dtype).min)  # what is -inf was removed


def _has_all(row: NDArray[Any], num_found: int) -> bool:
    if row.min() > -np.inf:
        return num_found == len(row)
    return num_found == np.count_nonzero(row > -np.inf)
