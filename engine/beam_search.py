"""Beam search over the log-probabilities of each step: which beams go on, which have ended. Pure.

A beam is an output so far and the sum of its log-probabilities. Each step looks at the best
continuations of all beams together: those that end the output compete for the places of the
**hypotheses**, the best of the others are the beams of the next step, each with the beam that it
goes on from, so that whoever keeps KV can share it. The rules are those of transformers
``generate`` with ``num_beams``.

Knows neither models nor blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from kvferry.engine.request import EarlyStopping, RequestSpec, SamplingParams
from kvferry.engine.stopping import finish_after


def searches_beams(spec: RequestSpec) -> bool:
    """Whether the request is a beam search; the best single token is what greedy sampling finds."""
    return spec.sampling.num_beams > 1 and spec.max_output_tokens > 1


def search_of(spec: RequestSpec) -> BeamSearch:
    """The request's search, at its beginning."""
    return BeamSearch(
        spec.sampling.num_beams,
        _num_ends(spec),
        spec.max_output_tokens,
        lambda index, token_id: finish_after(spec, index, token_id) is not None,
        spec.sampling.length_penalty,
        spec.sampling.early_stopping,
    )


def beam_sampling(spec: RequestSpec) -> SamplingParams:
    """How a beam is sampled: its likeliest continuations are the likeliest log-probabilities."""
    count = num_continuations(spec.sampling.num_beams, _num_ends(spec))
    return replace(spec.sampling, temperature=0.0, logprobs=count)


def num_continuations(num_beams: int, num_ends: int) -> int:
    """How many of the likeliest continuations a step looks at; enough stay that end nothing."""
    return max(2, 1 + num_ends) * num_beams


def _num_ends(spec: RequestSpec) -> int:
    ends = set(spec.sampling.stop_token_ids)
    if not spec.sampling.ignore_eos:
        ends.update(spec.eos_token_ids)
    return len(ends)


class Continuation(NamedTuple):
    """A token after a beam, and its log-probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Beam:
    """An output and its score; of a hypothesis it is divided by length ** length_penalty.

    ``parent`` is the place, among the beams of the step before, of the one that it goes on from.
    """

    token_ids: tuple[int, ...]
    score: float
    parent: int = 0


class BeamSearch:
    """See the module.

    Args:
        num_beams: beams, and hypotheses in the end.
        num_ends: distinct tokens that may end an output, for how many continuations are looked at.
        max_tokens: output tokens at most; must be what ``ends`` says of the last one, too.
        ends: whether an output is over with the token of that index.
        length_penalty: see ``Beam``; above 0 favours long outputs.
        early_stopping: when the search is over, once there are ``num_beams`` hypotheses.

    Attributes:
        beams: those that go on, best first. Of one at the beginning, of ``num_beams`` later.
        hypotheses: those that have ended, best first.
    """

    def __init__(
        self,
        num_beams: int,
        num_ends: int,
        max_tokens: int,
        ends: Callable[[int, int], bool],
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = EarlyStopping.FALSE,
    ) -> None:
        self.num_continuations = num_continuations(num_beams, num_ends)
        self.beams = [Beam((), 0.0)]
        self.hypotheses: list[Beam] = []
        self.is_over = False
        self._num_beams = num_beams
        self._max_tokens = max_tokens
        self._ends = ends
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._may_improve = True

    def advance(self, continuations: Sequence[Sequence[Continuation]]) -> None:
        """Take the ``num_continuations`` likeliest tokens after each beam, best first."""
        lines = [
            [(-(beam.score + logprob), place, token_id) for token_id, logprob in line]
            for place, (beam, line) in enumerate(zip(self.beams, continuations, strict=True))
        ]
        length = len(self.beams[0].token_ids)
        ended: list[Beam] = []
        going_on: list[Beam] = []
        ranked = islice(merge(*lines, key=itemgetter(0)), self.num_continuations)
        for standing, (score, place, token_id) in enumerate(ranked):
            if standing >= self._num_beams == len(going_on):
                break
            if self._ends(length, token_id):
                if standing < self._num_beams:
                    ended.append(self._extended(place, token_id, -score))
            elif len(going_on) < self._num_beams:
                going_on.append(self._extended(place, token_id, -score))
        self._take_hypotheses(ended)
        self.beams = going_on
        full = len(self.hypotheses) == self._num_beams
        if self.beams and full:
            self._may_improve = (
                self._may_improve and self._best_possible() > self.hypotheses[-1].score
            )
        done = full and self._early_stopping is EarlyStopping.TRUE
        self.is_over = done or not self._may_improve or not self.beams

    def _extended(self, place: int, token_id: int, score: float) -> Beam:
        return Beam((*self.beams[place].token_ids, token_id), score, place)

    def _take_hypotheses(self, ended: Sequence[Beam]) -> None:
        full = len(self.hypotheses) == self._num_beams
        if not self._may_improve or (full and self._early_stopping is EarlyStopping.TRUE):
            return
        scored = [
            Beam(b.token_ids, self._normalised(b.score, len(b.token_ids)), b.parent) for b in ended
        ]
        ranked = sorted([*self.hypotheses, *scored], key=lambda beam: -beam.score)
        self.hypotheses = ranked[: self._num_beams]

    def _best_possible(self) -> float:
        """What the best beam would score at the length at which it would score best."""
        length = len(self.beams[0].token_ids)
        if self._early_stopping is EarlyStopping.NEVER and self._length_penalty > 0:
            length = self._max_tokens
        return self._normalised(self.beams[0].score, length)

    def _normalised(self, score: float, length: int) -> float:
        penalty: float = length**self._length_penalty
        return score / penalty
