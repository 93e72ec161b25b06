"""What the clients share and what needs no network: requests, stream checks, completions.

Pure: events and clock readings in, requests, events and completions out. Knows neither channels
nor threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias, TypedDict, cast

from kvferry.cluster.chat_input import ChatOptions, build_chat
from kvferry.cluster.errors import StreamError
from kvferry.engine.request import InvalidRequest
from kvferry.protos import kvferry_pb2 as pb

Event: TypeAlias = pb.Accepted | pb.Delta | pb.Finished


class Sampling(TypedDict, total=False):
    """Sampling parameters by name; what is left out takes the server's default."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    seed: int
    n: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    skip_special_tokens: bool
    logprobs: int
    prompt_logprobs: int
    num_beams: int
    length_penalty: float
    early_stopping: str


class GenerateOptions(Sampling, ChatOptions, total=False):
    """Everything that can be said of a request beside its prompt.

    ``chat`` is a sequence of ``{"role": ..., "content": ...}``, where they apply with
    ``tool_calls`` (a list of objects), ``tool_call_id`` and ``name``; ``request_id`` is the
    caller's label, not the server's id; ``cache_salt`` keeps its KV apart from that of requests
    with another; ``tenant`` is the one whose key the client has; ``priority`` is lower for what
    comes earlier, where the server looks at it; ``timeout_s`` is the deadline of the whole request.
    """

    token_ids: Sequence[int]
    chat: Iterable[Mapping[str, Any]]
    model: str
    request_id: str
    cache_salt: str
    tenant: str
    priority: int
    echo_prompt_token_ids: bool
    timeout_s: float


def build_request(prompt: str | None, options: GenerateOptions) -> pb.GenerateRequest:
    """One request; exactly one of ``prompt``, ``token_ids`` and ``chat`` is given.

    Raises InvalidRequest, naming what was given or what cannot be encoded.
    """
    unknown = sorted(options.keys() - GenerateOptions.__annotations__.keys())
    if unknown:
        raise InvalidRequest(f"unknown option {', '.join(unknown)}")
    token_ids, chat = options.get("token_ids"), options.get("chat")
    inputs = {"prompt": prompt, "token_ids": token_ids, "chat": chat}
    given = [name for name, value in inputs.items() if value is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"got {' and '.join(given) or 'no input'}; give one of prompt, token_ids and chat"
        )
    chat_options = [name for name in ChatOptions.__annotations__ if options.get(name) is not None]
    if chat is None and chat_options:
        raise InvalidRequest(
            f"got {' and '.join(chat_options)} without chat; give messages as chat"
        )
    given_options: Mapping[str, Any] = options
    sampling = {k: v for k, v in given_options.items() if k in Sampling.__annotations__}
    for name, value in sampling.items():
        _check_encodes(pb.SamplingParams, name, value)
    for name in ("request_id", "model", "cache_salt", "tenant", "priority"):
        if options.get(name) is not None:
            _check_encodes(pb.GenerateRequest, name, given_options[name])
    try:
        request = pb.GenerateRequest(
            request_id=options.get("request_id", ""),
            model=options.get("model", ""),
            text=prompt,
            cache_salt=options.get("cache_salt", ""),
            tenant=options.get("tenant", ""),
            priority=options.get("priority", 0),
            sampling=pb.SamplingParams(**sampling),
            echo_prompt_token_ids=options.get("echo_prompt_token_ids", False),
        )
        if token_ids is not None:
            request.token_ids.CopyFrom(pb.TokenIds(ids=token_ids))
        if chat is not None:
            request.chat.CopyFrom(build_chat(chat, cast(ChatOptions, options)))
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidRequest(f"the request cannot be encoded: {exc}") from exc
    return request


def _check_encodes(message: Any, name: str, value: Any) -> None:
    """Name the field that the contract cannot say."""
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.is_repeated and isinstance(value, str | bytes):
        raise InvalidRequest(f"{name}: got {value!r:.80}, wanted a list")
    try:
        message(**{name: value})
    except (TypeError, ValueError) as exc:
        why = f"{exc!s:.80}"
        raise InvalidRequest(f"{name}: got {value!r:.80}, which cannot be encoded: {why}") from exc


@dataclass(slots=True)
class StreamChecker:
    """Holds a stream to its contract.

    Accepted comes first and once; per branch, deltas come with contiguous indexes, each index
    exactly once, and then one Finished; the Finished with ``is_last`` is the last event of all,
    and what it says was used equals what was received.
    """

    first_output_index: int = 0
    request_id: str = ""
    done: bool = False
    _accepted: bool = False
    _next_index: dict[int, int] = field(default_factory=dict)
    _finished: set[int] = field(default_factory=set)

    def check(self, response: pb.GenerateResponse) -> Event:
        """The response's event. Raises StreamError, naming the value got and the one wanted."""
        if self.done:
            raise self._fault("an event came after the last one")
        if self.request_id and response.request_id != self.request_id:
            raise self._fault(f"an event of request {response.request_id!r} came")
        self.request_id = response.request_id
        kind = response.WhichOneof("event")
        if kind == "accepted":
            return self._check_accepted(response.accepted)
        if not self._accepted:
            raise self._fault(f"got {kind} before accepted")
        if kind == "delta":
            return self._check_delta(response.delta)
        if kind == "finished":
            return self._check_finished(response.finished)
        raise self._fault("got a response without an event; is the server newer?")

    def end(self) -> None:
        """The stream has ended with status OK. Raises StreamError if it was not complete."""
        if not self.done:
            raise self._fault("the stream ended without its terminal event")

    def _check_accepted(self, event: pb.Accepted) -> pb.Accepted:
        if self._accepted:
            raise self._fault("got accepted twice")
        self._accepted = True
        return event

    def _check_delta(self, event: pb.Delta) -> pb.Delta:
        if event.branch in self._finished:
            raise self._fault(f"got a delta of branch {event.branch}, which has finished")
        wanted = self._next_index.get(event.branch, self.first_output_index)
        if event.index != wanted:
            fault = "repeats" if event.index < wanted else "leaves out"
            raise self._fault(
                f"branch {event.branch} {fault} tokens: index {event.index} came, not {wanted}"
            )
        if event.logprobs and [e.token_id for e in event.logprobs] != list(event.token_ids):
            raise self._fault(f"the log-probabilities at index {event.index} are of other tokens")
        self._next_index[event.branch] = wanted + len(event.token_ids)
        return event

    def _check_finished(self, event: pb.Finished) -> pb.Finished:
        if event.branch in self._finished:
            raise self._fault(f"branch {event.branch} finished twice")
        self._finished.add(event.branch)
        self.done = event.is_last
        received = sum(self._next_index.values()) or self.first_output_index
        if event.is_last and event.usage.completion_tokens != received:
            raise self._fault(
                f"got {received} tokens, but usage says {event.usage.completion_tokens}"
            )
        return event

    def _fault(self, fault: str) -> StreamError:
        return StreamError(f"request {self.request_id or 'without id'}: {fault}")


@dataclass(slots=True)
class BranchOutput:
    """What has come of one branch; ``finish_reason`` is empty before its end."""

    branch: int
    text: str = ""
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | None = None

    def finish(self, event: pb.Finished) -> None:
        """It has ended."""
        self.finish_reason = event.finish_reason
        self.stop_reason = event.stop_reason if event.HasField("stop_reason") else None


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request as the client saw it; what is one branch's is the first one's.

    Attributes:
        request_id: the server's id.
        prompt_token_ids: empty unless ``echo_prompt_token_ids`` was asked for.
        text, output_token_ids: what was streamed.
        logprobs: one per output token if they were asked for, else empty.
        prompt_logprobs: of the prompt's tokens but the first, likewise.
        branches: every branch's output, the first one's too, by number.
        finished: the terminal event: usage, timing, transfer, workers.
        ttft_s: client's own time to the first token; None without tokens.
        itl_s: client's own gaps between tokens; one fewer than tokens.
        e2e_s: client's own time to the terminal event.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    text: str
    output_token_ids: tuple[int, ...]
    finished: pb.Finished
    ttft_s: float | None
    itl_s: tuple[float, ...]
    e2e_s: float
    logprobs: tuple[pb.TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[pb.TokenLogprobs, ...] = ()
    branches: tuple[BranchOutput, ...] = ()

    @property
    def finish_reason(self) -> str:
        """``stop``, ``length``, ``abort`` or ``error``."""
        return self.branches[0].finish_reason if self.branches else self.finished.finish_reason

    @property
    def usage(self) -> pb.Usage:
        """Tokens, as the front door counted them."""
        return self.finished.usage

    @property
    def timing(self) -> pb.Timing:
        """Times as the server measured them, in seconds."""
        return self.finished.timing

    @property
    def transfer(self) -> pb.Transfer:
        """What was moved from prefill to decode."""
        return self.finished.transfer


@dataclass(slots=True)
class Transcript:
    """Collects one stream's events with the times of their arrival.

    ``started`` and ``now`` are readings of one monotonic clock, in seconds. After a failure it
    still holds what had come.
    """

    started: float
    prompt_tokens: int | None = None
    prompt_token_ids: tuple[int, ...] = ()
    branches: dict[int, BranchOutput] = field(default_factory=lambda: {0: BranchOutput(0)})
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finished: pb.Finished | None = None
    token_times: list[float] = field(default_factory=list)
    ended: float = 0.0

    @property
    def output_token_ids(self) -> list[int]:
        """The first branch's tokens."""
        return self.branches[0].output_token_ids

    @property
    def logprobs(self) -> list[pb.TokenLogprobs]:
        """Their log-probabilities."""
        return self.branches[0].logprobs

    @property
    def text(self) -> str:
        """Their text."""
        return self.branches[0].text

    def add(self, event: Event, now: float) -> None:
        """Take in one checked event that arrived at ``now``."""
        if isinstance(event, pb.Accepted):
            self.prompt_tokens = event.prompt_tokens
            self.prompt_token_ids = tuple(event.prompt_token_ids)
            return
        branch = self.branches.setdefault(event.branch, BranchOutput(event.branch))
        if isinstance(event, pb.Finished):
            branch.finish(event)
            if event.is_last:
                self.finished, self.ended = event, now
            return
        branch.output_token_ids.extend(event.token_ids)
        branch.logprobs.extend(event.logprobs)
        branch.text += event.text
        self.prompt_logprobs.extend(event.prompt_logprobs)
        if event.branch == 0:
            self.token_times.extend([now] * len(event.token_ids))

    def completion(self, request_id: str) -> Completion:
        """The whole request. Raises StreamError if it has not finished."""
        if self.finished is None:
            raise StreamError(f"request {request_id}: it never finished")
        times = self.token_times
        return Completion(
            request_id=request_id,
            prompt_token_ids=self.prompt_token_ids,
            text=self.text,
            output_token_ids=tuple(self.output_token_ids),
            logprobs=tuple(self.logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs),
            branches=tuple(branch for _, branch in sorted(self.branches.items())),
            finished=self.finished,
            ttft_s=times[0] - self.started if times else None,
            itl_s=tuple(b - a for a, b in pairwise(times)),
            e2e_s=self.ended - self.started,
        )
