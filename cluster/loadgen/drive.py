"""Sends a plan: the loop of the load generator, and all of it that waits.

In an open loop each session is a task of its own that begins at its time, whatever became of the
others; in a closed one each client takes the next session when its last one has ended. Within a
session a turn follows its answer. What is measured goes into a ``Pass`` as it happens, so that an
interrupted run has measured what it has.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from kvferry.cluster.errors import DeadlineExceeded, StreamError
from kvferry.cluster.loadgen.goodput import CANCELLED, COMPLETED, FAILED
from kvferry.cluster.loadgen.measures import BY_CHUNKS, BY_IDS, Pass, Sample
from kvferry.cluster.loadgen.plan import Plan
from kvferry.cluster.loadgen.sessions import IDS, Conversation, Session, Turn
from kvferry.cluster.loadgen.settings import Settings
from kvferry.cluster.loadgen.targets import Clock, Request, Target
from kvferry.kv_cache.errors import KVFerryError

NO_ANSWER = ("abort", "error", "cancelled", "unspecified")
"""Reasons for which an answer ends that is no answer, by the names of servers in use."""


@dataclass(slots=True)
class Driver:
    """Sends plans to one target, as ``settings`` say; ``measured`` grows meanwhile.

    ``num_ended`` counts requests that have ended, ``num_in_flight`` those on their way.
    """

    target: Target
    settings: Settings
    clock: Clock = time.monotonic
    cache_salt: str = ""
    measured: Pass = field(default_factory=Pass)
    num_ended: int = 0
    num_in_flight: int = 0

    async def run(self, plan: Plan) -> None:
        """Until every session has ended. Raises what is no failure of a request, as it is."""
        self.measured.started_at = self.clock()
        try:
            if plan.offsets is None:
                await self._closed_loop(plan)
            else:
                await self._open_loop(plan, plan.offsets)
        except BaseExceptionGroup as group:
            raise _cause(group) from group

    async def _open_loop(self, plan: Plan, offsets: tuple[float, ...]) -> None:
        async with asyncio.TaskGroup() as group:
            for session, offset in zip(plan.sessions, offsets, strict=True):
                due = self.measured.started_at + offset
                await self._until(due)
                group.create_task(self._session(session, due))

    async def _closed_loop(self, plan: Plan) -> None:
        waiting = iter(plan.sessions)

        async def one_client(due: float) -> None:
            await self._until(due)
            for session in waiting:
                await self._session(session, due)
                due = self.clock()

        async with asyncio.TaskGroup() as group:
            for start in plan.client_starts[: len(plan.sessions)]:
                group.create_task(one_client(self.measured.started_at + start))

    async def _until(self, moment: float) -> None:
        wait_s = moment - self.clock()
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    async def _session(self, session: Session, due: float) -> None:
        """Turn after turn; after one that was not answered the rest is skipped."""
        conversation = Conversation(session, self.settings.send)
        for place, turn in enumerate(session.turns):
            if turn.think_s:
                due += turn.think_s
                await self._until(due)
            sample = await self._turn(session, turn, place, conversation, due)
            if sample.outcome != COMPLETED:
                self.measured.num_skipped += len(session.turns) - place - 1
                return
            if place + 1 < len(session.turns) and not check_history(sample, self.settings.send):
                self.measured.num_skipped += len(session.turns) - place - 1
                return
            conversation.answered(sample.receipt.token_ids, "".join(sample.receipt.text))
            due = self.clock()

    async def _turn(
        self,
        session: Session,
        turn: Turn,
        place: int,
        conversation: Conversation,
        due: float,
    ) -> Sample:
        prompt = conversation.ask(turn)
        request = Request(
            prompt,
            turn.output_tokens,
            self.settings.ignore_eos,
            self.settings.temperature,
            self.cache_salt if session.is_text else "",
        )
        sample = Sample(
            session=session.number,
            turn=place,
            group=session.group,
            intended_at=due,
            wanted_tokens=turn.output_tokens,
            prompt_tokens=len(prompt.token_ids or ()),
            is_counted=due - self.measured.started_at >= self.settings.ramp,
        )
        self.measured.samples.append(sample)
        self.num_in_flight += 1
        try:
            await self._send(request, turn.cancel_after_s, sample)
        finally:
            self.num_in_flight -= 1
            self.num_ended += 1
            if sample.receipt.ended_at <= 0 or sample.outcome != COMPLETED:
                sample.receipt.ended_at = self.clock()
        return sample

    async def _send(self, request: Request, cancel_after_s: float | None, sample: Sample) -> None:
        timeout_s = self.settings.timeout or None
        gives_up = cancel_after_s is not None and (timeout_s is None or cancel_after_s < timeout_s)
        try:
            async with asyncio.timeout(cancel_after_s if gives_up else timeout_s):
                await self.target.send(request, sample.receipt)
            check_answer(sample, exact=self.settings.ignore_eos)
            sample.outcome = COMPLETED
        except TimeoutError:
            if gives_up:
                sample.outcome = CANCELLED
                return
            sample.outcome = FAILED
            sample.error = DeadlineExceeded(f"no end within {timeout_s} s (timeout)")
        except KVFerryError as error:
            sample.outcome, sample.error = FAILED, error


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The typed error in a group, or else the first one."""
    leaves: list[BaseException] = []
    for each in group.exceptions:
        leaves.append(_cause(each) if isinstance(each, BaseExceptionGroup) else each)
    return next((each for each in leaves if isinstance(each, KVFerryError)), leaves[0])


def check_history(sample: Sample, form: str) -> bool:
    """Whether the next turn can hold this answer; a sample whose answer it cannot has failed."""
    if form != IDS or sample.receipt.counted_by == BY_IDS:
        return True
    sample.outcome = FAILED
    sample.error = StreamError(
        "the server gives no token ids, so no later turn can hold this answer: send text or chat"
    )
    return False


def check_answer(sample: Sample, exact: bool) -> None:
    """Raises StreamError if the answer is empty, was cut off, or is of another length than asked.

    Where only chunks came nothing is known of its length.
    """
    got, reason = sample.num_output_tokens, sample.receipt.finish_reason
    if reason in (None, *NO_ANSWER):
        raise StreamError(
            f"the answer is none: its finish_reason is {reason}, after {got} tokens; wanted "
            "stop, length or the like"
        )
    if not sample.receipt.token_times:
        raise StreamError(f"the answer holds no token, wanted {sample.wanted_tokens}")
    if exact and sample.receipt.counted_by != BY_CHUNKS and got != sample.wanted_tokens:
        raise StreamError(
            f"got {got} tokens, wanted {sample.wanted_tokens}: ignore_eos was not honoured"
        )
