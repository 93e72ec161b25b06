"""Tokens from the workers to a request's listener: every index of a branch once, in order.

Delivered is final: what the listener has accepted for an index is dropped when it comes again, and
what comes too early is asked for again. Pure; does not know which worker speaks, nor what becomes
of a request that ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvferry.cluster.errors import Internal
from kvferry.cluster.metrics.recorder import Recorder
from kvferry.cluster.routed_request import FAILED, RequestEnd, RoutedBranch, RoutedRequest
from kvferry.cluster.token_run import TokenRun
from kvferry.engine.beam_search import searches_beams
from kvferry.engine.request import FinishReason
from kvferry.engine.stopping import Finish
from kvferry.worker import messages as m

logger = logging.getLogger(__name__)

EndBranch = Callable[[RoutedRequest, RoutedBranch, Finish, float], None]
EndRequest = Callable[[RoutedRequest, RequestEnd, float], None]


class Delivery:
    """See the module.

    Args:
        end_branch: called when a branch has its last token.
        end: called when the listener cannot go on.
        recorder: hears of what was delivered.
    """

    def __init__(self, end_branch: EndBranch, end: EndRequest, recorder: Recorder) -> None:
        self._end_branch = end_branch
        self._end = end
        self._recorder = recorder

    def first_tokens(self, request: RoutedRequest, done: m.PrefillDone, now: float) -> None:
        """The current attempt's prefill has sampled token 1 of each branch."""
        assert request.decode is not None, "no prefill without a reservation"
        spec = request.decode.body.spec
        if len(done.token_ids) != spec.num_branches:
            name = request.request_id
            logger.warning("request %s: tokens for other branches", name, extra=request.about)
            return
        if searches_beams(spec):
            return  # its first token is not known before its last
        request.first_tokens_here = True
        for place, token_id in enumerate(done.token_ids):
            branch = request.branch(spec.branches[place])
            if request.end is not None or branch is None or spec.own_suffix(place):
                continue
            run = TokenRun(
                len(spec.suffixes[place]),
                (token_id,),
                done.logprobs[place : place + 1],
                done.prompt_logprobs if place == 0 else (),
                branch.number,
            )
            self._deliver(request, branch, run, now)
            if not branch.is_over(request) and len(branch.delivered) == run.first_index + 1:
                finish = branch.finish_of_delivered(request.spec)
                if finish is not None:
                    self._end_branch(request, branch, finish, now)

    def event(self, request: RoutedRequest, event: m.TokenEvent, now: float) -> m.Replay | None:
        """Decode's newest tokens of a branch; what to ask for if some are missing before them."""
        branch = request.branch(event.branch)
        if branch is None:
            return None  # it has ended; the next list says so
        known = len(branch.delivered)
        if event.first_index > known:
            return m.Replay(event.request_id, event.attempt, known, branch.number)
        run = TokenRun(
            event.first_index,
            event.token_ids,
            event.logprobs,
            event.prompt_logprobs,
            branch.number,
        )
        self._deliver(request, branch, run, now)
        if len(branch.delivered) > known:
            request.failures = 0  # decode has made progress; token 1 alone is none
        complete = len(branch.delivered) == event.first_index + len(event.token_ids)
        if not branch.is_over(request) and event.finish_reason is not None and complete:
            finish = Finish(FinishReason(event.finish_reason), event.stop_reason)
            self._end_branch(request, branch, finish, now)
        return None

    def _deliver(
        self, request: RoutedRequest, branch: RoutedBranch, run: TokenRun, now: float
    ) -> None:
        """Give the listener what it has not had; an index delivered before is dropped."""
        fresh = run.from_index(len(branch.delivered))
        if not fresh.token_ids:
            return
        try:
            match = request.listener.on_tokens(fresh, now)
        except Exception as error:  # one request's boundary: its neighbours go on
            name = request.request_id
            logger.exception("request %s: its tokens are not taken", name, extra=request.about)
            failed = Internal(f"the front door failed: {type(error).__name__}: {error}")
            self._end(request, RequestEnd(FAILED, failed), now)
            return
        accepted = fresh if match is None else fresh.first(match.num_tokens)
        request.accept(accepted, now)
        self._recorder.delivered(request, branch, len(accepted.token_ids), now)
        decision = request.decision
        if fresh.first_index == 0 and decision is not None and decision.actual_ttft_s is None:
            decision.actual_ttft_s = now - request.received_at
        if match is not None:
            self._end_branch(request, branch, match.finish, now)
