"""A target that answers by a clock of its own, without a network; and that clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from kvferry.cluster.loadgen.measures import Receipt
from kvferry.cluster.loadgen.targets import About, Request
from kvferry.kv_cache.errors import KVFerryError
from kvferry.protos import kvferry_pb2 as pb


class FakeTime:
    """Seconds that pass only while everybody waits: ``run`` moves on to the next moment wanted."""

    def __init__(self) -> None:
        self.now = 0.0
        self._loop = asyncio.new_event_loop()
        self._loop.time = self._read  # type: ignore[method-assign]
        select = self._loop._selector.select  # type: ignore[attr-defined]

        def skip(timeout: float | None) -> object:
            if timeout:
                self.now += timeout
            return select(0)

        self._loop._selector.select = skip  # type: ignore[attr-defined]

    def _read(self) -> float:
        return self.now

    def __call__(self) -> float:
        return self.now

    def run(self, coroutine: object) -> None:
        """Until the coroutine has ended."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(coroutine)  # type: ignore[arg-type]


class FakeTarget:
    """First token after ``ttft_s``, the others each after ``itl_s``; ids count up from 100.

    ``fail`` gives the error of a request by its number, or None; ``requests`` are those that came,
    ``most_in_flight`` how many there were at once.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        ttft_s: float = 0.5,
        itl_s: float = 0.1,
        fail: Callable[[int], KVFerryError | None] = lambda _: None,
        max_model_len: int | None = None,
        statuses: list[pb.StatusResponse] | None = None,
    ) -> None:
        self.clock = clock
        self.ttft_s, self.itl_s = ttft_s, itl_s
        self.fail = fail
        self.max_model_len = max_model_len
        self.statuses = statuses
        self.requests: list[Request] = []
        self.sent_at: list[float] = []
        self.in_flight = self.most_in_flight = 0

    async def about(self) -> About:
        return About("kvferry", "nowhere", "fake", None, 1000, self.max_model_len)

    async def send(self, request: Request, receipt: Receipt) -> None:
        number = len(self.requests)
        self.requests.append(request)
        self.sent_at.append(self.clock())
        receipt.sent_at = self.clock()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            for place in range(request.output_tokens):
                await asyncio.sleep(self.itl_s if place else self.ttft_s)
                error = self.fail(number)
                if error is not None:
                    raise error
                receipt.token_times.append(self.clock())
                receipt.token_ids.append(100 + place)
            receipt.completion_tokens = request.output_tokens
            receipt.finish_reason = "length"
            receipt.ended_at = self.clock()
        finally:
            self.in_flight -= 1

    async def status(self) -> pb.StatusResponse | None:
        return self.statuses.pop(0) if self.statuses else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        return None
