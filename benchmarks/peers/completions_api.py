"""The closed loop's way to a peer: the load generator's HTTP target, held to every token's id.

The peer must give token ids (``return_token_ids``) and the usage, and the two must agree.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise

from kvferry.cluster.closed_loop import Send
from kvferry.cluster.errors import Internal
from kvferry.cluster.loadgen.http_target import HttpTarget
from kvferry.cluster.loadgen.measures import BY_IDS, Receipt
from kvferry.cluster.loadgen.sessions import Prompt
from kvferry.cluster.loadgen.targets import Request
from kvferry.kv_cache.errors import KVFerryError

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


@asynccontextmanager
async def client(
    url: str, model: str, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[Send]:
    """Connections to the server at ``url``, and what sends the closed loop's requests there."""
    async with HttpTarget(url, model, clock=clock, read_timeout_s=READ_TIMEOUT_S) as target:

        async def send(prompt: list[int], output_tokens: int) -> PeerAnswer:
            receipt = Receipt()
            try:
                await target.send(peer_request(prompt, output_tokens), receipt)
            except KVFerryError as error:
                raise PeerFailed(f"{type(error).__name__}: {error}") from error
            return answer_of(receipt)

        yield send


def peer_request(prompt: list[int], output_tokens: int) -> Request:
    """A request for exactly ``output_tokens``, greedy."""
    return Request(Prompt(token_ids=tuple(prompt)), output_tokens)


def answer_of(receipt: Receipt) -> PeerAnswer:
    """The whole answer. Raises PeerFailed unless every token has its id and the usage agrees."""
    if receipt.token_times and receipt.counted_by != BY_IDS:
        raise PeerFailed("the server gives no token ids: it does not know return_token_ids")
    ids, times = tuple(receipt.token_ids), receipt.token_times
    if receipt.completion_tokens != len(ids):
        raise PeerFailed(f"got {len(ids)} tokens, but usage says {receipt.completion_tokens}")
    return PeerAnswer(
        output_token_ids=ids,
        ttft_s=times[0] - receipt.sent_at if times else None,
        itl_s=tuple(b - a for a, b in pairwise(times)),
        e2e_s=receipt.ended_at - receipt.sent_at,
    )
