"""The requests behind one HTTP request: taken in together, cancelled together.

A completion of several prompts is one request of the contract for each; the choices of the first
come first. Knows the router's node and its items; does not know JSON or sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial

from kvferry.cluster.access.gate import Caller
from kvferry.cluster.errors import Cancelled, KVFerryError
from kvferry.cluster.http_door.shapes import Output
from kvferry.cluster.http_door.translate import Ask, renamed
from kvferry.cluster.routed_request import RoutedRequest
from kvferry.cluster.router_node import RouterNode
from kvferry.cluster.session import SessionEnd, SessionItem, TextDelta, coalesced
from kvferry.engine.request import FinishReason, InvalidRequest, RequestSpec


class Exchange:
    """See the module. Once it has begun, ``cancel`` must be called, whatever happens.

    Attributes:
        requests: one per prompt.
    """

    def __init__(self, node: RouterNode, caller: Caller, peer: str) -> None:
        self._node = node
        self._caller = caller
        self._peer = peer
        self._arrived: asyncio.Queue[tuple[int, SessionItem]] = asyncio.Queue()
        self.requests: list[RoutedRequest] = []

    @property
    def request_id(self) -> str:
        """The first request's, or empty."""
        return self.requests[0].request_id if self.requests else ""

    @property
    def about(self) -> dict[str, object] | None:
        """What a log record about it carries: of several requests a list; None before there are."""
        if len(self.requests) > 1:
            return {"requests": [request.about for request in self.requests]}
        return self.requests[0].about if self.requests else None

    async def begin(self, asks: Sequence[Ask], received_at: float) -> None:
        """Take all in, then submit all. Raises what the intake and the router refuse."""
        specs = [await self._prepare(ask) for ask in asks]
        for place, spec in enumerate(specs):
            emit = partial(self._emit, place)
            request = self._node.submit(
                spec, emit, received_at, self._caller, self._peer, is_more=place > 0
            )
            self.requests.append(request)

    async def _prepare(self, ask: Ask) -> RequestSpec:
        try:
            return await self._node.prepare(ask.request, self._caller, self._peer)
        except InvalidRequest as error:
            raise type(error)(renamed(str(error), ask.names)) from error

    def _emit(self, place: int, item: SessionItem) -> None:
        """Never blocks. What can wait here is bounded by the requests' tokens."""
        self._arrived.put_nowait((place, item))

    async def news(self) -> AsyncIterator[list[Output]]:
        """What is new of each choice, all that waits at once, until every request has ended.

        Raises the error of a request that fails, and Cancelled where one was cancelled: after what
        came before it, unless nothing has been given out yet.
        """
        left = len(self.requests)
        has_begun = False
        while left:
            items = await self._waiting()
            failed = next((error for _, item in items if (error := _failure(item))), None)
            outputs = [self._output(place, item) for place, item in items if not _failure(item)]
            if failed is not None and not (has_begun and outputs):
                raise failed
            yield outputs
            if failed is not None:
                raise failed
            left -= sum(isinstance(item, SessionEnd) for _, item in items)
            has_begun = True

    async def _waiting(self) -> list[tuple[int, SessionItem]]:
        """At most one delta and one end of each choice."""
        by_place: dict[int, list[SessionItem]] = {}
        place, item = await self._arrived.get()
        by_place[place] = [item]
        while not self._arrived.empty():
            place, item = self._arrived.get_nowait()
            by_place.setdefault(place, []).append(item)
        return [(place, item) for place, items in by_place.items() for item in coalesced(items)]

    def _output(self, place: int, item: SessionItem) -> Output:
        spec = self.requests[place].spec
        first = place * spec.num_branches
        if isinstance(item, TextDelta):
            run = item.run
            return Output(
                first + run.branch,
                item.text,
                list(run.token_ids),
                list(run.logprobs),
                list(run.prompt_logprobs),
                spec.prompt_token_ids,
            )
        if isinstance(item, SessionEnd):
            return Output(first + item.end.branch, finish=item.end.finish)
        return Output(first + item.branch, finish=item.finish)

    def cancel(self) -> None:
        """End what has not ended; harmless otherwise."""
        for request in self.requests:
            self._node.cancel(request.request_id)


def _failure(item: SessionItem) -> KVFerryError | None:
    """The error that an item tells, if any: a cancelled request has no answer either."""
    if isinstance(item, TextDelta):
        return None
    if isinstance(item, SessionEnd) and item.end.error is not None:
        return item.end.error
    finish = item.end.finish if isinstance(item, SessionEnd) else item.finish
    if finish.reason is FinishReason.ABORT:
        return Cancelled("the request was cancelled")
    return None
