"""The load generator's other back end: streamed completions of an OpenAI-compatible server.

``CompletionStream`` reads the server-sent events of one answer and needs no network. The server
must give token ids (``return_token_ids``) and the usage, and the two must agree.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx2

from kvferry.cluster.closed_loop import Send
from kvferry.cluster.errors import Internal

PATH = "/v1/completions"
READ_TIMEOUT_S = 600.0  # between two pieces of an answer


class PeerFailed(Internal):
    """The peer refused a request or broke its stream; says what came."""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """One answered request, as ``closed_loop.Answer``."""

    output_token_ids: tuple[int, ...]
    ttft_s: float | None
    itl_s: tuple[float, ...]
    e2e_s: float


def completion_body(model: str, prompt: list[int], output_tokens: int) -> dict[str, Any]:
    """A request for exactly ``output_tokens``, greedy, streamed, with token ids and usage."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


@dataclass(slots=True)
class CompletionStream:
    """Gathers the lines of one stream of server-sent events.

    Attributes:
        started: clock reading when the request was sent.
        token_ids, token_times: what came, and when.
        usage: completion tokens by the server's own count.
        done: the stream's last event has come.
    """

    started: float
    token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    usage: int | None = None
    done: bool = False

    def add(self, line: str, now: float) -> None:
        """Take in one line that arrived at ``now``. Raises PeerFailed on what it cannot read."""
        name, colon, value = line.partition(":")
        if not line or not colon or name != "data":
            return  # blank, a comment, or a field that completions do not use
        value = value.strip()
        if self.done:
            raise PeerFailed(f"an event came after the last one: {value:.200}")
        if value == "[DONE]":
            self.done = True
            return
        try:
            event = json.loads(value)
        except ValueError as error:
            raise PeerFailed(f"an event is no JSON: {value:.200}") from error
        if not isinstance(event, dict) or "error" in event:
            raise PeerFailed(f"the stream holds an error: {value:.500}")
        for choice in event.get("choices") or ():
            self._add_tokens(choice, now)
        if event.get("usage"):
            self.usage = event["usage"]["completion_tokens"]

    def _add_tokens(self, choice: dict[str, Any], now: float) -> None:
        ids = choice.get("token_ids")
        if ids is None:
            raise PeerFailed("the server gives no token ids: it does not know return_token_ids")
        self.token_ids.extend(ids)
        self.token_times.extend([now] * len(ids))

    def answer(self, now: float) -> PeerAnswer:
        """The whole answer. Raises PeerFailed if the stream broke off or miscounted."""
        if not self.done:
            raise PeerFailed(f"the stream ended early, after {len(self.token_ids)} tokens")
        if self.usage != len(self.token_ids):
            raise PeerFailed(f"got {len(self.token_ids)} tokens, but usage says {self.usage}")
        times = self.token_times
        return PeerAnswer(
            output_token_ids=tuple(self.token_ids),
            ttft_s=times[0] - self.started if times else None,
            itl_s=tuple(b - a for a, b in pairwise(times)),
            e2e_s=now - self.started,
        )


def http_client() -> httpx2.AsyncClient:
    """A client with as many connections as the loop wants, and no proxy of the environment."""
    return httpx2.AsyncClient(
        timeout=httpx2.Timeout(READ_TIMEOUT_S),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    )


def sender(
    client: httpx2.AsyncClient,
    url: str,
    model: str,
    clock: Callable[[], float] = time.monotonic,
) -> Send:
    """Sends the closed loop's requests to the server at ``url``."""

    async def send(prompt: list[int], output_tokens: int) -> PeerAnswer:
        stream = CompletionStream(clock())
        body = completion_body(model, prompt, output_tokens)
        try:
            async with client.stream("POST", url + PATH, json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise PeerFailed(f"status {response.status_code}: {text:.500}")
                async for line in response.aiter_lines():
                    stream.add(line, clock())
        except httpx2.HTTPError as error:
            raise PeerFailed(f"{type(error).__name__}: {error}") from error
        return stream.answer(clock())

    return send
