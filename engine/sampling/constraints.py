"""What a request forbids, favours and penalises, applied to the logits of a whole batch.

In this order: bad words, minimum length, logit bias, repetition penalty, frequency and presence
penalties. They change which token is the likeliest, so they hold for greedy requests too. Every
one is a function of the parameters and the tokens so far. Does not know temperatures or filters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from kvferry.engine.request import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """Whose token a row of logits yields.

    Attributes:
        sampling: the request's parameters.
        branch: branch number.
        output_index: output position of the token, which is the number of output tokens so far.
        token_ids: prompt and output so far; may be left empty unless ``sampling.looks_back``.
        eos_token_ids: ids that end the output unless ``sampling.ignore_eos``.
    """

    sampling: SamplingParams
    branch: int = 0
    output_index: int = 0
    token_ids: Sequence[int] = field(default=())
    eos_token_ids: tuple[int, ...] = ()


def constrain(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """The logits with every row's constraints applied; ``logits`` itself if there are none.

    Args:
        logits: ``[num_rows, vocab_size]`` float32, not changed.
        rows: [num_rows]
    """
    if not any(row.sampling.constrains for row in rows):
        return logits
    constrained = logits.clone()
    _remove(constrained, rows)
    _add_bias(constrained, rows)
    _penalise_repetition(constrained, rows)
    _penalise_output(constrained, rows)
    return constrained


def forbidden(row: SamplingRow) -> Iterator[int]:
    """Ids that may not come next: what would complete a bad word, or end the output too soon."""
    sampling = row.sampling
    for word in sampling.bad_words:
        *begin, last = word
        if not begin or list(row.token_ids[-len(begin) :]) == begin:
            yield last
    if row.output_index < sampling.min_tokens:
        yield from sampling.stop_token_ids
        if not sampling.ignore_eos:
            yield from row.eos_token_ids


def _remove(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    size = logits.shape[-1]  # an id beyond it cannot be sampled anyway
    pairs = [(i, token) for i, row in enumerate(rows) for token in forbidden(row) if token < size]
    if pairs:
        places, ids = torch.tensor(pairs, device=logits.device).T
        logits[places, ids] = -torch.inf


def _add_bias(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Add each id's bias; ids of one row are distinct."""
    entries = [
        (place, *entry) for place, row in enumerate(rows) for entry in row.sampling.logit_bias
    ]
    if entries:
        places, ids, biases = zip(*entries, strict=True)
        logits[list(places), list(ids)] += torch.tensor(biases, device=logits.device)


def _penalise_repetition(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Divide positive logits, multiply negative ones, of every id in prompt or output.

    Keskar et al. 2019, "CTRL", section 4.1; the sign rule is the one of ``transformers``.
    """
    places = [i for i, row in enumerate(rows) if row.sampling.repetition_penalty != 1.0]
    if not places:
        return
    chosen = logits[places]
    seen = _counts(chosen, [rows[i].token_ids for i in places]) > 0
    penalty = _column([rows[i].sampling.repetition_penalty for i in places], chosen)
    penalised = torch.where(chosen > 0, chosen / penalty, chosen * penalty)
    logits[places] = torch.where(seen, penalised, chosen)


def _penalise_output(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Subtract ``frequency_penalty`` per occurrence in the output, ``presence_penalty`` once."""
    places = [
        i
        for i, row in enumerate(rows)
        if row.output_index
        and (row.sampling.presence_penalty != 0.0 or row.sampling.frequency_penalty != 0.0)
    ]
    if not places:
        return
    chosen = logits[places]
    counts = _counts(chosen, [rows[i].token_ids[-rows[i].output_index :] for i in places])
    frequency = _column([rows[i].sampling.frequency_penalty for i in places], chosen)
    presence = _column([rows[i].sampling.presence_penalty for i in places], chosen)
    logits[places] = chosen - frequency * counts - presence * (counts > 0)


def _counts(like: torch.Tensor, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
    """How often each id stands in each row's tokens.  [num_rows, vocab_size], as ``like``"""
    counts = torch.zeros_like(like)
    for row, ids in zip(counts, tokens, strict=True):
        index = torch.tensor(ids, dtype=torch.int64, device=like.device)
        row.index_add_(0, index, torch.ones(len(index), dtype=like.dtype, device=like.device))
    return counts


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
