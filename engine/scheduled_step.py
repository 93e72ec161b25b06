"""A step as it was planned: what the runner computes, and which sequences it is for."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.engine.batch import ScheduledSequence, SchedulerOutput
from kvferry.engine.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step as the runner sees it, beside the sequences it is for (same order)."""

    output: SchedulerOutput
    sequences: tuple[SequenceState, ...]

    def alone(self, index: int) -> ScheduledStep:
        """The share of one sequence as a step by itself, with the copies into its own blocks.

        These may be made again; those of others would undo what they have written since.
        """
        share = self.output.sequences[index]
        copies = tuple(pair for pair in self.output.copies if pair[1] in share.block_table)
        return ScheduledStep(SchedulerOutput((share,), copies), (self.sequences[index],))


def share_of(sequence: SequenceState, count: int) -> ScheduledSequence:
    """The sequence's next ``count`` positions, as the runner sees them."""
    start = sequence.num_computed_tokens
    sampling = sequence.sampling
    return ScheduledSequence(
        token_ids=sequence.token_ids[start : start + count],
        start=start,
        block_table=sequence.table.block_ids,
        sample=start + count == len(sequence.token_ids),
        sampling=sampling,
        branches=sequence.branches,
        output_index=sequence.num_output_tokens,
        known_token_ids=sequence.token_ids if sampling.looks_back else (),
        eos_token_ids=sequence.spec.eos_token_ids,
        prompt_targets=sequence.prompt_targets(start + 1, start + count + 1),
    )
