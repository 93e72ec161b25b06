"""OpenAI's JSON of answers: choices, chunks, usage, log-probabilities.

A shape belongs to one HTTP request. Pure: tokens and texts in, JSON out. Does not know how they
come, nor how JSON is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvferry.cluster.routed_request import RoutedRequest
from kvferry.engine.batch import TokenLogprobs
from kvferry.engine.detokenizer import IncrementalDetokenizer
from kvferry.engine.stopping import Finish
from kvferry.engine.tokenizer import Tokenizer

Json = dict[str, Any]


@dataclass(slots=True)
class Output:
    """What has come of one choice, or what is new of it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_token_ids: Sequence[int] = ()
    finish: Finish | None = None

    def then(self, other: Output) -> Output:
        """This and what follows it, as one."""
        return Output(
            self.index,
            self.text + other.text,
            self.token_ids + other.token_ids,
            self.logprobs + other.logprobs,
            self.prompt_logprobs + other.prompt_logprobs,
            self.prompt_token_ids or other.prompt_token_ids,
            other.finish,
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an answer is to show beside its text."""

    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    echo: bool = False
    skip_special_tokens: bool = True


class Shape(Protocol):
    """One kind of answer."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, output: Output) -> Json | None:
        """The choice of the chunk that comes before a choice's first text, if there is one."""
        ...

    def delta(self, output: Output) -> Json:
        """The choice of a chunk with new tokens."""
        ...

    def ending(self, output: Output) -> Json:
        """The choice of the chunk that says why it has ended."""
        ...

    def whole(self, output: Output) -> Json:
        """The choice of an answer that is not streamed."""
        ...


class CompletionShape:
    """``text_completion``."""

    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, wanted: Wanted) -> None:
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._offsets: dict[int, _Offsets] = {}
        self._opened: set[int] = set()

    def opening(self, output: Output) -> Json | None:
        """None: the first text opens."""
        return None

    def delta(self, output: Output) -> Json:
        """Text, and what is wanted beside it; an echo of the prompt comes before the first."""
        is_first = output.index not in self._opened
        self._opened.add(output.index)
        shows_prompt = is_first and self._wanted.echo
        choice: Json = {
            "index": output.index,
            "text": (self._prompt(output) if shows_prompt else "") + output.text,
            "logprobs": self._logprobs(output, shows_prompt),
            "finish_reason": None,
            "stop_reason": None,
        }
        if self._wanted.token_ids:
            choice["token_ids"] = output.token_ids
            if is_first:
                choice["prompt_token_ids"] = list(output.prompt_token_ids)
        return choice

    def ending(self, output: Output) -> Json:
        """No text any more."""
        choice = {"index": output.index, "text": "", "logprobs": None, **_finish(output)}
        return {**choice, "token_ids": []} if self._wanted.token_ids else choice

    def whole(self, output: Output) -> Json:
        """All of it."""
        choice = {**self.delta(output), **_finish(output)}
        if self._wanted.prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, output)
        return choice

    def _prompt(self, output: Output) -> str:
        ids = output.prompt_token_ids
        return self._tokenizer.decode(ids, self._wanted.skip_special_tokens)

    def _logprobs(self, output: Output, with_prompt: bool) -> Json | None:
        if not self._wanted.logprobs:
            return None
        offsets = self._offsets.get(output.index)
        if offsets is None:
            skip = self._wanted.skip_special_tokens
            offsets = _Offsets(IncrementalDetokenizer(self._tokenizer, skip))
            self._offsets[output.index] = offsets
        entries: list[TokenLogprobs | None] = [*output.logprobs]
        ids = [entry.token_id for entry in output.logprobs]
        if with_prompt:  # of its first token nothing is known
            entries = [None, *output.prompt_logprobs, *entries]
            ids = [*output.prompt_token_ids, *ids]
        return {
            "tokens": [token_text(self._tokenizer, token_id) for token_id in ids],
            "token_logprobs": [entry and entry.logprob for entry in entries],
            "top_logprobs": [entry and self._top(entry) for entry in entries],
            "text_offset": [offsets.of(token_id) for token_id in ids],
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest by their text, and the token itself; of equal texts the likeliest."""
        top: dict[str, float] = {}
        for token_id, logprob in (*_likeliest(entry), (entry.token_id, entry.logprob)):
            top.setdefault(token_text(self._tokenizer, token_id), logprob)
        return top


@dataclass(slots=True)
class _Offsets:
    """Where in the text of its choice each token begins, in characters."""

    detokenizer: IncrementalDetokenizer
    here: int = 0

    def of(self, token_id: int) -> int:
        """The next token's."""
        begin = self.here
        self.here += len(self.detokenizer.push((token_id,)))
        return begin


class ChatShape:
    """``chat.completion``."""

    id_prefix = "chatcmpl-"
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, wanted: Wanted) -> None:
        self._tokenizer = tokenizer
        self._wanted = wanted

    def opening(self, output: Output) -> Json | None:
        """Whose message it is."""
        choice = self._choice(output, {"delta": {"role": "assistant", "content": ""}})
        if self._wanted.token_ids:
            choice["prompt_token_ids"] = list(output.prompt_token_ids)
        return choice

    def delta(self, output: Output) -> Json:
        """Text, and what is wanted beside it."""
        choice = self._choice(output, {"delta": {"content": output.text}})
        choice["logprobs"] = self._logprobs(output)
        if self._wanted.token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def ending(self, output: Output) -> Json:
        """No text any more."""
        return {**self._choice(output, {"delta": {}}), **_finish(output)}

    def whole(self, output: Output) -> Json:
        """All of it."""
        message = {"role": "assistant", "content": output.text, "refusal": None}
        choice = {**self._choice(output, {"message": message}), **_finish(output)}
        choice["logprobs"] = self._logprobs(output)
        if self._wanted.token_ids:
            choice["token_ids"] = output.token_ids
            choice["prompt_token_ids"] = list(output.prompt_token_ids)
        if self._wanted.prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, output)
        return choice

    def _choice(self, output: Output, said: Json) -> Json:
        return {"index": output.index, **said, "logprobs": None, "finish_reason": None}

    def _logprobs(self, output: Output) -> Json | None:
        if not self._wanted.logprobs:
            return None
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(*likely) for likely in _likeliest(entry)],
            }
            for entry in output.logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        return {
            "token": token_text(self._tokenizer, token_id),
            "logprob": logprob,
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    r"""A token by itself; what is no whole character as OpenAI writes it, ``bytes:\xe2\x82``."""
    content = tokenizer.token_bytes(token_id)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def prompt_logprobs(tokenizer: Tokenizer, output: Output) -> list[dict[str, Json] | None]:
    """As vLLM gives them: nothing for the first token, then by token id, its own one first."""
    shown: list[dict[str, Json] | None] = [None]
    for entry in output.prompt_logprobs:
        ranks = {token_id: place for place, (token_id, _) in enumerate(_likeliest(entry), 1)}
        tokens = {entry.token_id: entry.logprob, **dict(_likeliest(entry))}
        shown.append(
            {
                str(token_id): {
                    "logprob": logprob,
                    "rank": ranks.get(token_id),
                    "decoded_token": token_text(tokenizer, token_id),
                }
                for token_id, logprob in tokens.items()
            }
        )
    return shown


def usage(requests: Iterable[RoutedRequest]) -> Json:
    """What the requests of one answer have used, together."""
    prompt = cached = completion = 0
    for request in requests:
        prompt += len(request.spec.prompt_token_ids)
        cached += request.num_cached_tokens
        completion += request.num_delivered
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _likeliest(entry: TokenLogprobs) -> list[tuple[int, float]]:
    return list(zip(entry.top_ids, entry.top_logprobs, strict=True))


def _finish(output: Output) -> Mapping[str, Any]:
    """Why it has ended: OpenAI's reasons are ours, ``stop_reason`` is vLLM's."""
    assert output.finish is not None
    return {
        "finish_reason": output.finish.reason.value,
        "stop_reason": output.finish.stop_reason,
    }
