"""One client's stream at the front door: tokens become text, stop strings end it.

Pure: tokens come from the router, items for the client go to ``emit``. Accepting a token makes it
final. Does not know gRPC, workers or attempts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.cluster.routed_request import RequestEnd, RoutedRequest, StopMatch
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
class SessionEnd:
    """The stream's last item."""

    request: RoutedRequest
    end: RequestEnd
    ended_at: float


SessionItem = TextDelta | SessionEnd


class Session:
    """A request's listener; see the module."""

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
            visible, stop = self._stops.push(self._detokenizer.finish())
            rest = visible + ("" if stop is not None else self._stops.finish())
            if rest:
                self._emit(TextDelta(TokenRun(len(request.delivered), ()), rest))
        self._emit(SessionEnd(request, end, now))
