"""Reads a streamed answer of an OpenAI-compatible server from its bytes. Pure.

How tokens are counted, best first: by ``token_ids`` where the server gives them (asked for with
``return_token_ids``), by ``usage`` (asked for with ``stream_options.include_usage``), or by chunks
that hold text, which is all there is then. Of the last two a chunk has one moment, however many
tokens are in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.cluster.errors import STATUS, ClusterUnreachable, Internal, Overloaded, StreamError
from kvferry.cluster.loadgen.measures import BY_CHUNKS, BY_IDS, BY_USAGE, Receipt
from kvferry.engine.request import InvalidRequest, PromptTooLong
from kvferry.kv_cache.errors import KVFerryError

_ODD = {PromptTooLong, ClusterUnreachable}
_BY_CODE: dict[int, type[KVFerryError]] = {}
for _class, _status in STATUS.items():
    if _class not in _ODD:
        _BY_CODE.setdefault(_status.http, _class)
_BY_CODE[500] = Internal


@dataclass(slots=True)
class AnswerReader:
    """Takes in one answer's bytes as they come, and notes them in ``receipt``."""

    receipt: Receipt
    done: bool = False
    _rest: bytes = b""
    _num_chunks: int = 0
    _num_with_ids: int = 0

    def feed(self, piece: bytes, now: float) -> None:
        """Bytes that arrived at ``now``. Raises StreamError or what the server says went wrong."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)

    def _take(self, data: bytes, now: float) -> None:
        if self.done:
            raise StreamError(f"an event came after the last one: {data[:200]!r}")
        self.receipt.ended_at = now
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise StreamError(f"an event is no JSON: {data[:200]!r}") from error
        if not isinstance(event, dict):
            raise StreamError(f"an event is no object: {data[:200]!r}")
        if event.get("error"):
            raise error_of(event, 500)
        try:
            for choice in event.get("choices") or ():
                self._take_choice(choice, now)
            if event.get("usage"):
                self._take_usage(event["usage"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StreamError(f"an event has another shape: {data[:200]!r} ({error})") from error

    def _take_choice(self, choice: Mapping[str, Any], now: float) -> None:
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
        ids = choice.get("token_ids")
        finish = choice.get("finish_reason")
        if finish is not None:
            self.receipt.finish_reason = str(finish)
        if not text and not ids:
            return  # a role, or the reason of the end
        if not isinstance(text, str) or not _are_numbers(ids or ()):
            raise TypeError("text that is none, or token ids that are no numbers")
        receipt = self.receipt
        self._num_chunks += 1
        self._num_with_ids += ids is not None
        receipt.text.append(text)
        receipt.token_ids.extend(ids or ())
        receipt.token_times.extend([now] * (len(ids) if ids else 1))

    def _take_usage(self, usage: Mapping[str, Any]) -> None:
        receipt = self.receipt
        details = usage.get("prompt_tokens_details") or {}
        counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        counts.append(details.get("cached_tokens"))
        if not _are_numbers(count for count in counts if count is not None):
            raise TypeError("counts that are no numbers")
        receipt.prompt_tokens, receipt.completion_tokens, receipt.cached_tokens = counts

    def end(self) -> None:
        """The connection has no more. Raises StreamError if the answer broke off or miscounted."""
        receipt = self.receipt
        if not self.done:
            raise StreamError(f"the stream ended early, after {self._num_chunks} chunks")
        has_usage = receipt.completion_tokens is not None
        if self._num_chunks and self._num_with_ids == self._num_chunks:
            receipt.counted_by = BY_IDS
            if has_usage and receipt.completion_tokens != len(receipt.token_ids):
                raise StreamError(
                    f"got {len(receipt.token_ids)} token ids, but usage says "
                    f"{receipt.completion_tokens}"
                )
        else:
            receipt.counted_by = BY_USAGE if has_usage else BY_CHUNKS
            receipt.token_ids.clear()  # some, at most


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(each, int) and not isinstance(each, bool) for each in values)


def error_of(body: Any, status: int, retry_after: str | None = None) -> KVFerryError:
    """The typed error of a failed request: by its HTTP status, in the server's words.

    A status in the body of a stream (``error.code``) stands before ``status``.
    """
    error = body.get("error", body) if isinstance(body, dict) else body
    fields = error if isinstance(error, dict) else {}
    code = fields.get("code")
    status = code if isinstance(code, int) else status
    message = str(fields.get("message") or error or "no words")[:500]
    cls = _BY_CODE.get(status, InvalidRequest if 400 <= status < 500 else Internal)
    text = f"status {status}: {message}"
    if cls is Overloaded:
        seconds = retry_after or ""
        return Overloaded(text, float(seconds) if seconds.isdigit() else None)
    return cls(text)
