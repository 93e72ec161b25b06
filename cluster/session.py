"""One client's stream at the front door: tokens become text, stop strings end it.

Pure: tokens come from the router, items for the client go to ``emit``. Accepting a token makes it
final. Does not know gRPC, workers or attempts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.cluster.routed_request import RequestEnd, RoutedRequest, StopMatch
from kvferry.cluster.stop_strings import StopStrings
from kvferry.engine.detokenizer import IncrementalDetokenizer
from kvferry.engine.request import FinishReason, RequestSpec
from kvferry.engine.stopping import Finish, finish_after


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New tokens and the text that may be shown; the text may lag behind the ids."""

    first_index: int
    token_ids: tuple[int, ...]
    text: str

    def then(self, other: TextDelta) -> TextDelta:
        """Both as one, for a client that reads slowly."""
        return TextDelta(self.first_index, self.token_ids + other.token_ids, self.text + other.text)


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
        self._stops = StopStrings(spec.sampling.stop)
        self._emit = emit

    def on_tokens(
        self, first_index: int, token_ids: tuple[int, ...], now: float
    ) -> StopMatch | None:
        """Turn tokens into text; stop at the first stop string."""
        shown = []
        match: StopMatch | None = None
        for count, token_id in enumerate(token_ids, 1):
            finish = finish_after(self._spec, first_index + count - 1, token_id)
            is_stop_token = finish is not None and finish.reason is FinishReason.STOP
            text = "" if is_stop_token else self._detokenizer.push((token_id,))
            if finish is not None:
                text += self._detokenizer.finish()
            visible, stop = self._stops.push(text)
            shown.append(visible)
            if stop is not None:
                match = StopMatch(count, Finish(FinishReason.STOP, stop))
                break
            if finish is not None:
                shown.append(self._stops.finish())
                break
        accepted = token_ids[: match.num_tokens] if match is not None else token_ids
        self._emit(TextDelta(first_index, accepted, "".join(shown)))
        return match

    def on_end(self, request: RoutedRequest, end: RequestEnd, now: float) -> None:
        """Pass the end on; what an aborted stream has held back of its text comes first."""
        if end.finish.reason is FinishReason.ABORT:
            visible, stop = self._stops.push(self._detokenizer.finish())
            rest = visible + ("" if stop is not None else self._stops.finish())
            if rest:
                self._emit(TextDelta(len(request.delivered), (), rest))
        self._emit(SessionEnd(request, end, now))
