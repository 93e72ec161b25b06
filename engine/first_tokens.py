"""The first tokens of a request's branches, from the one step that samples them all."""

from __future__ import annotations

from kvferry.engine.batch import BranchToken, TokenLogprobs
from kvferry.engine.beam_search import searches_beams
from kvferry.engine.request import RequestSpec
from kvferry.engine.sequence import SequenceProgress
from kvferry.engine.stopping import finish_after


def first_tokens(
    progress: SequenceProgress,
) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
    """One token per branch of the sequence, and their log-probabilities, if wanted."""
    assert progress.token_id is not None
    sampled = (BranchToken(progress.token_id, progress.logprobs), *progress.further)
    logprobs = tuple(token.logprobs for token in sampled if token.logprobs is not None)
    return tuple(token.token_id for token in sampled), logprobs


def goes_on(spec: RequestSpec, token_ids: tuple[int, ...]) -> bool:
    """Whether any branch has more to come after its token of ``token_ids``.

    What a beam search ends with is not the token that was sampled.
    """
    if searches_beams(spec):
        return True
    return any(
        spec.own_suffix(place) or finish_after(spec, len(spec.suffixes[place]), token_id) is None
        for place, token_id in enumerate(token_ids)
    )
