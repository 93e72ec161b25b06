"""When an output token ends its request: one rule for every process that must know.

Stop strings are the front door's business; everything here is a function of token ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.engine.request import FinishReason, RequestSpec, SamplingParams


@dataclass(frozen=True, slots=True)
class Finish:
    """Why output ended; ``stop_reason`` is the user's stop id or string, None for eos."""

    reason: FinishReason
    stop_reason: int | str | None = None


def may_stop(sampling: SamplingParams, output_index: int) -> bool:
    """Whether anything but a limit may end the output with the token at ``output_index``."""
    return output_index >= sampling.min_tokens


def finish_after(spec: RequestSpec, output_index: int, token_id: int) -> Finish | None:
    """Whether the token at ``output_index`` (0 is the request's first) ends the request."""
    sampling = spec.sampling
    if may_stop(sampling, output_index):
        if token_id in sampling.stop_token_ids:
            return Finish(FinishReason.STOP, token_id)
        if not sampling.ignore_eos and token_id in spec.eos_token_ids:
            return Finish(FinishReason.STOP)
    num_output = output_index + 1
    if num_output >= sampling.max_tokens:
        return Finish(FinishReason.LENGTH)
    if len(spec.prompt_token_ids) + num_output >= spec.max_model_len:
        return Finish(FinishReason.LENGTH)
    return None
