"""From a step's hidden states to its tokens, wherever the tensors lie.

Owns which rows need logits, and what a ``RunnerOutput`` is made of. Does not know how the hidden
states came about.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.engine.batch import (
    BranchToken,
    PoisonedRows,
    RunnerOutput,
    ScheduledSequence,
    TokenLogprobs,
)
from kvferry.engine.models.llama import LlamaModel
from kvferry.engine.sampling.constraints import SamplingRow
from kvferry.engine.sampling.logprobs import logprobs_of
from kvferry.engine.sampling.sampler import ROWS_AT_ONCE, InvalidLogits, sample


def sample_hidden(
    model: LlamaModel,
    sequences: Sequence[ScheduledSequence],
    hidden: torch.Tensor,
    ends: Sequence[int],
) -> RunnerOutput:
    """Tokens in batch order, and their log-probabilities if anybody wants any.

    Logits are computed for the sampled rows only, and for the prompt positions that are asked for.

    Args:
        model: computes the logits.
        sequences: the batch.
        hidden: of every token of it.  [num_tokens, hidden_size]
        ends: cumulative numbers of tokens from 0.  [num_seqs + 1]

    Raises PoisonedRows, whose ``rows`` are places in the batch.
    """
    places = [place for place, seq in enumerate(sequences) if seq.sample]
    if not places:
        nothing: tuple[int | None, ...] = (None,) * len(sequences)
        return RunnerOutput(nothing, (), _prompt_logprobs(model, sequences, hidden, ends))
    last_rows = torch.tensor([ends[place + 1] - 1 for place in places], device=hidden.device)
    logits = model.logits(hidden.index_select(0, last_rows))
    tokens, logprobs, further = _sample_rows(sequences, places, logits)
    prompt_logprobs = _prompt_logprobs(model, sequences, hidden, ends)
    return RunnerOutput(tokens, logprobs, prompt_logprobs, further)


def sample_logits(sequences: Sequence[ScheduledSequence], logits: torch.Tensor) -> RunnerOutput:
    """The same where every sequence samples, its logits are there, and nobody asks for those of
    prompt positions. ``logits``: [num_seqs, vocab_size] float32
    """
    tokens, logprobs, further = _sample_rows(sequences, range(len(sequences)), logits)
    return RunnerOutput(tokens, logprobs, (), further)


def _sample_rows(
    sequences: Sequence[ScheduledSequence], places: Sequence[int], logits: torch.Tensor
) -> tuple[
    tuple[int | None, ...],
    tuple[TokenLogprobs | None, ...],
    tuple[tuple[BranchToken, ...], ...],
]:
    """What the sequences at ``places`` sample, each from its row of logits, in batch order."""
    rows = [_sampling_row(sequences[place]) for place in places]
    try:
        sampled = sample(logits, rows)
    except PoisonedRows as error:
        raise type(error)([places[row] for row in error.rows]) from error
    tokens: list[int | None] = [None] * len(sequences)
    for place, token in zip(places, sampled, strict=True):
        tokens[place] = token
    logprobs = _logprobs(logits, sampled, rows, places, len(sequences))
    further: list[tuple[BranchToken, ...]] = []
    if any(len(sequences[place].branches) > 1 for place in places):
        further = [()] * len(sequences)
        for row, place in enumerate(places):
            further[place] = _further(logits[row : row + 1], sequences[place])
    return tuple(tokens), logprobs, tuple(further)


def _prompt_logprobs(
    model: LlamaModel,
    sequences: Sequence[ScheduledSequence],
    hidden: torch.Tensor,
    ends: Sequence[int],
) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """Those of every sequence's ``prompt_targets``, a few rows at a time.

    Raises InvalidLogits.
    """
    if not any(seq.prompt_targets for seq in sequences):
        return ()
    found = []
    for place, seq in enumerate(sequences):
        entries: list[TokenLogprobs] = []
        for first in range(0, len(seq.prompt_targets), ROWS_AT_ONCE):
            targets = seq.prompt_targets[first : first + ROWS_AT_ONCE]
            begin = ends[place] + first
            logits = model.logits(hidden[begin : begin + len(targets)])
            if not torch.isfinite(logits.amax(-1)).all():
                raise InvalidLogits([place])
            num_top = [seq.sampling.prompt_logprobs or 0] * len(targets)
            entries += logprobs_of(logits, targets, num_top)
        found.append(tuple(entries))
    return tuple(found)


def _sampling_row(seq: ScheduledSequence, place: int = 0) -> SamplingRow:
    return SamplingRow(
        seq.sampling,
        seq.branches[place],
        seq.output_index,
        seq.known_token_ids,
        seq.eos_token_ids,
    )


def _logprobs(
    logits: torch.Tensor,
    sampled: Sequence[int],
    rows: Sequence[SamplingRow],
    places: Sequence[int],
    num_sequences: int,
) -> tuple[TokenLogprobs | None, ...]:
    """Those of the sampled tokens, by place in the batch; empty if nobody wants any."""
    wanted = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    if not wanted:
        return ()
    logprobs: list[TokenLogprobs | None] = [None] * num_sequences
    found = logprobs_of(
        logits[wanted],
        [sampled[i] for i in wanted],
        [rows[i].sampling.logprobs or 0 for i in wanted],
    )
    for i, entry in zip(wanted, found, strict=True):
        logprobs[places[i]] = entry
    return tuple(logprobs)


def _further(logits: torch.Tensor, seq: ScheduledSequence) -> tuple[BranchToken, ...]:
    """The tokens of a sequence's branches but the first. ``logits``: [1, vocab_size]"""
    rows = [_sampling_row(seq, place) for place in range(1, len(seq.branches))]
    if not rows:
        return ()
    spread = logits.expand(len(rows), -1)
    tokens = sample(spread, rows)  # what makes it raise has raised for the first branch
    places = range(len(rows))
    logprobs = _logprobs(spread, tokens, rows, places, len(rows)) or (None,) * len(rows)
    return tuple(map(BranchToken, tokens, logprobs))
