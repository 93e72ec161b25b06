"""Running the requests of one HTTP request, and sending their answer, whole or as events.

A client that goes away cancels its requests in whatever state they are; a slow one gets what
waits as one, and one that takes nothing for ``slow_client_limit_s`` has them cancelled and
counted. The status is sent with the first tokens: what fails before them has its own. A stream
that fails later ends with an event that says so, and without ``[DONE]``.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Response

from kvferry.cluster.access.gate import Caller
from kvferry.cluster.errors import REQUEST_ID_KEY, Cancelled
from kvferry.cluster.http_door.exchange import Exchange
from kvferry.cluster.http_door.failures import (
    OPENAI_REQUEST_ID_KEY,
    Failure,
    encoded,
    failure,
    is_ours,
)
from kvferry.cluster.http_door.shapes import Json, Output, Shape, usage
from kvferry.cluster.http_door.translate import Ask
from kvferry.cluster.router_node import RouterNode

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON_TYPE, EVENTS_TYPE = "application/json", "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Plan:
    """How one HTTP request is to be answered.

    Attributes:
        asks: its requests of the contract.
        caller: whose they are.
        peer: where they came from.
        received_at: when it came, router's clock.
        created: the same as seconds of the epoch.
        include_usage: whether the last chunk says what was used.
    """

    asks: Sequence[Ask]
    caller: Caller
    peer: str
    shape: Shape
    received_at: float
    created: int
    model: str
    stream: bool
    include_usage: bool


def failure_response(error: Exception, exchange: Exchange | None = None) -> Response:
    """An error as a whole answer; logged where it is the server's fault."""
    told = _told(error, exchange)
    return Response(encoded(told.body), told.status, told.headers, JSON_TYPE)


def _told(error: Exception, exchange: Exchange | None) -> Failure:
    request_id = exchange.request_id if exchange is not None else ""
    if is_ours(error):
        extra = exchange.about if exchange is not None else None
        name = request_id or "(none)"
        logger.error("request %s failed: %s", name, error, exc_info=error, extra=extra)
    return failure(error, request_id)


class Answer(Response):
    """See the module. An ASGI application, for one request whose body has been read."""

    def __init__(self, node: RouterNode, slow_client_limit_s: float, plan: Plan) -> None:
        super().__init__()
        self._node = node
        self._slow_client_limit_s = slow_client_limit_s
        self._plan = plan
        self._exchange = Exchange(node, plan.caller, plan.peer)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Run to the end, or until the client leaves."""
        try:
            await while_connected(receive, self._run(scope, receive, send))
        finally:
            self._exchange.cancel()

    async def _run(self, scope: Message, receive: Receive, send: Send) -> None:
        exchange, plan = self._exchange, self._plan
        try:
            await exchange.begin(plan.asks, plan.received_at)
            news = exchange.news()
            if plan.stream:
                first = await anext(news)
            else:
                body = self._whole([output async for outputs in news for output in outputs])
        except Exception as error:  # the call's boundary: every error becomes a status
            exchange.cancel()
            await failure_response(error, exchange)(scope, receive, send)
            return
        if plan.stream:
            await self._start(send, EVENTS_TYPE)
            await self._stream(send, first, news)
        else:
            await self._start(send, JSON_TYPE)
            await _finish(send, body)

    async def _start(self, send: Send, content_type: str) -> None:
        request_id = self._exchange.request_id
        headers = {
            "content-type": content_type,
            "cache-control": "no-cache",
            REQUEST_ID_KEY: request_id,
            OPENAI_REQUEST_ID_KEY: request_id,
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _stream(
        self, send: Send, first: list[Output], news: AsyncIterator[list[Output]]
    ) -> None:
        try:
            await self._write(send, self._opening_events() + self._events(first))
            async for outputs in news:
                await self._write(send, self._events(outputs))
            last = self._usage_event() + DONE
        except Exception as error:  # the call's boundary: every error becomes an event
            self._exchange.cancel()
            last = _event(_told(error, self._exchange).body)
        await _finish(send, last)

    async def _write(self, send: Send, events: bytes) -> None:
        """Hand events to the transport, which takes none while the client takes none.

        The last words to one that takes nothing wait behind what was sent before them: until it
        reads on or goes.
        """
        try:
            async with asyncio.timeout(self._slow_client_limit_s):
                await send({"type": "http.response.body", "body": events, "more_body": True})
        except TimeoutError:
            limit = f"{self._slow_client_limit_s:g} s (server.slow_client_limit)"
            slow = Cancelled(f"the client took nothing of its stream for {limit}: read faster")
            exchange = self._exchange
            logger.warning("request %s: %s", exchange.request_id, slow, extra=exchange.about)
            self._node.router.counters["slow_clients"] += 1
            raise slow from None

    def _opening_events(self) -> bytes:
        outputs = (
            Output(place * request.spec.num_branches + branch, prompt_token_ids=prompt)
            for place, request in enumerate(self._exchange.requests)
            for prompt in (request.spec.prompt_token_ids,)
            for branch in request.spec.branches
        )
        choices = map(self._plan.shape.opening, outputs)
        return b"".join(self._chunk(choice) for choice in choices if choice is not None)

    def _events(self, outputs: Sequence[Output]) -> bytes:
        shape = self._plan.shape
        return b"".join(
            self._chunk(shape.delta(each) if each.finish is None else shape.ending(each))
            for each in outputs
        )

    def _chunk(self, choice: Json) -> bytes:
        chunk = self._envelope(self._plan.shape.chunk_object, [choice])
        if self._plan.include_usage:
            chunk["usage"] = None  # as OpenAI writes it in all but the last
        return _event(chunk)

    def _usage_event(self) -> bytes:
        if not self._plan.include_usage:
            return b""
        chunk = self._envelope(self._plan.shape.chunk_object, [])
        return _event({**chunk, "usage": usage(self._exchange.requests)})

    def _whole(self, outputs: Sequence[Output]) -> bytes:
        """The whole answer, of all that came."""
        choices: dict[int, Output] = {}
        for output in outputs:
            known = choices.get(output.index)
            choices[output.index] = output if known is None else known.then(output)
        num_branches = self._exchange.requests[0].spec.num_branches
        for index, output in choices.items():  # what is of the prompt came with the first branch
            output.prompt_logprobs = choices[index - index % num_branches].prompt_logprobs
        shape = self._plan.shape
        listed = [shape.whole(output) for _, output in sorted(choices.items())]
        body = self._envelope(shape.whole_object, listed)
        return json_bytes({**body, "usage": usage(self._exchange.requests)})

    def _envelope(self, name: str, choices: list[Json]) -> Json:
        plan = self._plan
        return {
            "id": f"{plan.shape.id_prefix}{self._exchange.request_id}",
            "object": name,
            "created": plan.created,
            "model": plan.model,
            "choices": choices,
        }


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do some work, or give it up at once when the client leaves."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
    if not working.cancelled():
        working.result()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass  # nothing else is to come: the body has been read


async def _finish(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": False})


def json_bytes(body: Json) -> bytes:
    """An answer as a JSON text."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _event(body: Json) -> bytes:
    return b"data: " + json_bytes(body) + b"\n\n"
