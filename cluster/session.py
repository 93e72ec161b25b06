"""One client's stream at the front door: tokens become text, stop strings end it.

A ``Session`` follows one branch; ``BranchedSession`` is one per branch as one listener.

Pure: tokens come from the router, items for the client go to ``emit``. Accepting a token makes it
final. Does not know gRPC, workers or attempts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from kvferry.cluster.routed_request import RequestEnd, RoutedBranch, RoutedRequest, StopMatch
from kvferry.cluster.stop_strings import StopStrings
from kvferry.cluster.token_run import TokenRun
from kvferry.engine.detokenizer import IncrementalDetokenizer
from kvferry.engine.request import FinishReason, RequestSpec
from kvferry.engine.stopping import Finish, finish_after, may_stop


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New tokens and the text that may be shown; the text may lag behind the ids."""

    run: TokenRun
    text: str

    def then(self, other: TextDelta) -> TextDelta:
        """Both as one, for a client that reads slowly."""
        return TextDelta(self.run.then(other.run), self.text + other.text)


@dataclass(frozen=True, slots=True)
class BranchEnd:
    """A branch's last item; others go on."""

    branch: int
    finish: Finish


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """The stream's last item."""

    request: RoutedRequest
    end: RequestEnd
    ended_at: float


SessionItem = TextDelta | BranchEnd | SessionEnd


def coalesced(items: Iterable[SessionItem]) -> list[SessionItem]:
    """The items with at most one delta per branch, for a client that reads slowly."""
    merged: list[SessionItem] = []
    place: dict[int, int] = {}
    for item in items:
        if isinstance(item, TextDelta):
            earlier = place.setdefault(item.run.branch, len(merged))
            if earlier < len(merged):
                known = merged[earlier]
                assert isinstance(known, TextDelta)
                merged[earlier] = known.then(item)
                continue
        merged.append(item)
    return merged


class Session:
    """The listener of a request of one branch; see the module."""

    def __init__(
        self,
        spec: RequestSpec,
        detokenizer: IncrementalDetokenizer,
        emit: Callable[[SessionItem], None],
    ) -> None:
        self._spec = spec
        self._detokenizer = detokenizer
        self._stops = StopStrings(spec.sampling.stop, spec.sampling.include_stop_str_in_output)
        self._emit = emit

    def on_tokens(self, run: TokenRun, now: float) -> StopMatch | None:
        """Turn tokens into text; stop at the first stop string."""
        shown = []
        match: StopMatch | None = None
        for count, token_id in enumerate(run.token_ids, 1):
            index = run.first_index + count - 1
            finish = finish_after(self._spec, index, token_id)
            text = self._text(token_id, finish)
            visible, stop = self._stops.push(text, may_stop(self._spec.sampling, index))
            shown.append(visible)
            if stop is not None:
                match = StopMatch(count, Finish(FinishReason.STOP, stop))
                break
            if finish is not None:
                shown.append(self._stops.finish())
                break
        accepted = run if match is None else run.first(match.num_tokens)
        self._emit(TextDelta(accepted, "".join(shown)))
        return match

    def _text(self, token_id: int, finish: Finish | None) -> str:
        """What a token adds to the text; a token that stops the output is not shown."""
        is_stop_token = finish is not None and finish.reason is FinishReason.STOP
        is_hidden = is_stop_token and not self._spec.sampling.include_stop_str_in_output
        text = "" if is_hidden else self._detokenizer.push((token_id,))
        return text if finish is None else text + self._detokenizer.finish()

    def on_end(self, request: RoutedRequest, end: RequestEnd, now: float) -> None:
        """Pass the end on; what an aborted stream has held back of its text comes first."""
        if end.finish.reason is FinishReason.ABORT:
            self.show_rest(request.branches[end.branch])
        self._emit(SessionEnd(request, end, now))

    def on_branch_end(self, branch: int, finish: Finish, now: float) -> None:
        """Pass it on."""
        self._emit(BranchEnd(branch, finish))

    def show_rest(self, branch: RoutedBranch) -> None:
        """Give out what has been held back of the text."""
        visible, stop = self._stops.push(self._detokenizer.finish())
        rest = visible + ("" if stop is not None else self._stops.finish())
        if rest:
            run = TokenRun(len(branch.delivered), (), branch=branch.number)
            self._emit(TextDelta(run, rest))


class BranchedSession:
    """The listener of a request of several branches.

    Args:
        sessions: one per branch, in their order; all emit to the same stream.
        emit: that stream.
    """

    def __init__(self, sessions: Sequence[Session], emit: Callable[[SessionItem], None]) -> None:
        self._sessions = sessions
        self._emit = emit

    def on_tokens(self, run: TokenRun, now: float) -> StopMatch | None:
        """Turn tokens into their branch's text."""
        return self._sessions[run.branch].on_tokens(run, now)

    def on_branch_end(self, branch: int, finish: Finish, now: float) -> None:
        """Pass it on."""
        self._emit(BranchEnd(branch, finish))

    def on_end(self, request: RoutedRequest, end: RequestEnd, now: float) -> None:
        """End every branch that goes on, the last one as the stream's end."""
        if end.finish.reason is FinishReason.ABORT:
            *others, last = request.live
            for branch in others:
                self._sessions[branch.number].show_rest(branch)
                self._emit(BranchEnd(branch.number, end.finish))
            end = replace(end, branch=last.number)
        self._sessions[end.branch].on_end(request, end, now)
