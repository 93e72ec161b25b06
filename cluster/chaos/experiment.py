"""Runs cells on a cluster: load, a target in the wanted state, the signal, what came of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence

import grpc.aio

from kvferry.cluster.chaos.cells import Cell
from kvferry.cluster.chaos.cluster_watch import ClusterWatch, TookTooLong, is_gone, until
from kvferry.cluster.chaos.load import Load, References, judge
from kvferry.cluster.chaos.results import CellResult, Trial
from kvferry.cluster.chaos.streams import StreamRecord
from kvferry.cluster.chaos.workload import BACKGROUND, BLOCKERS, ENDLESS, TARGET
from kvferry.cluster.client import AsyncClient
from kvferry.cluster.routed_request import RequestState, RequestView
from kvferry.worker.messages import NodeRef

MAX_TRIES = 3
STATE_WITHIN_S = 30.0
DEATH_WITHIN_S = 20.0
CLIENT_ENDS_WITHIN_S = 15.0

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Experiments:
    """One cluster's experiments, one after the other. ``caused`` are the lives they ended."""

    def __init__(
        self, endpoint: str, watch: ClusterWatch, channel: grpc.aio.Channel, client: AsyncClient
    ) -> None:
        self.caused: list[NodeRef] = []
        self._endpoint = endpoint
        self._watch = watch
        self._channel = channel
        self._client = client
        self._references: References = {}

    async def take_references(self) -> References:
        """Run every prompt undisturbed. Raises TookTooLong if one does not end well."""
        load = Load(self._channel)
        for prompt in (TARGET, *BLOCKERS, *BACKGROUND):
            load.once(prompt)
        await load.end()
        for _, records in load.streams:
            if records[-1].error is not None:
                raise TookTooLong(f"a reference stream failed: {records[-1].error}")
        self._references = {prompt: records[-1].output for prompt, records in load.streams}
        return self._references

    async def run(self, cell: Cell) -> CellResult:
        """One cell: one trial, brought about in at most ``MAX_TRIES`` tries."""
        result = CellResult(cell)
        began = time.monotonic()
        for _ in range(MAX_TRIES):
            load = Load(self._channel)
            try:
                await self._watch.ready()
                trial = await self._trial(cell, load)
            except TookTooLong as missed:
                result.missed.append(str(missed))
                continue
            finally:
                await load.abandon()
            result.missed.clear()
            result.trials.append(trial)
            break
        result.duration_s = time.monotonic() - began
        return result

    async def _trial(self, cell: Cell, load: Load) -> Trial:
        """Raises TookTooLong if the state does not come about."""
        for prompt in BACKGROUND:
            load.repeat(prompt)
        if cell.state == "queued":
            await self._fill_pools(load)
        if cell.target == "client":
            return await self._end_client(cell, load)
        return await self._end_process(cell, load)

    async def _fill_pools(self, load: Load) -> None:
        """Let blockers take the decode workers' blocks."""
        blockers = [load.once(prompt)[1] for prompt in BLOCKERS]

        async def placed() -> bool | None:
            for records in blockers:
                view = await self._watch.view(records[-1].request_id) if records else None
                if view is None or view.state in (RequestState.QUEUED, RequestState.RESERVING):
                    return None
            return True

        await until("the blockers have blocks", placed, STATE_WITHIN_S)

    # --- a worker or the router -------------------------------------------------------------

    async def _end_process(self, cell: Cell, load: Load) -> Trial:
        stream, records = load.once(TARGET)

        async def arrived() -> RequestView | None:
            if stream.done():
                raise TookTooLong(f"the request ended before it was seen {cell.state}")
            return await self._watch.in_state(records[-1].request_id if records else "", cell.state)

        view = await until(f"the request is {cell.state}", arrived, STATE_WITHIN_S)
        victim = self._victim(cell, view)
        pid = self._watch.process(victim)
        self.caused.append(victim)
        at = time.monotonic()
        os.kill(pid, SIGNALS[cell.fault])
        notes: list[str] = []
        detection_s = await self._declared_after(victim, at, notes)
        await load.end()
        router_ended = cell.target == "router"
        faults, complaints = judge(load.streams, self._references, router_ended)
        notes += complaints
        if router_ended and len(records) == 1:
            notes.append("the stream outlived its router")
        leaked = await self._aftermath(notes)
        if not is_gone(pid):
            notes.append(f"{victim.node_id} is still there, process {pid}")
        last = records[-1].finished
        return Trial(
            survived=not notes,
            notes=tuple(notes),
            faults=faults,
            blocks_leaked=leaked,
            detection_s=detection_s,
            recovery_gap_s=longest_wait(records, at),
            recomputed_tokens=last.recomputed_prompt_tokens if last is not None else None,
        )

    def _victim(self, cell: Cell, view: RequestView) -> NodeRef:
        """The process that serves the request; where none does yet, the first of its role."""
        if cell.target == "router":
            return self._watch.named("router-0")
        placed = view.prefill if cell.target == "prefill" else view.decode
        return placed or self._watch.named(f"{cell.target}-0")

    async def _declared_after(self, victim: NodeRef, at: float, notes: list[str]) -> float | None:
        async def declared() -> float | None:
            death = self._watch.death(victim)
            return death.at - at if death is not None else None

        try:
            return await until(f"{victim.node_id} is declared dead", declared, DEATH_WITHIN_S)
        except TookTooLong as error:
            notes.append(str(error))
            return None

    async def _aftermath(self, notes: list[str]) -> int:
        """Wait until all is whole and quiet again; blocks that somebody still holds."""
        try:
            await self._watch.ready()
        except TookTooLong as error:
            notes.append(str(error))
            return 0
        leaked, problems = await self._watch.leftovers()
        notes += problems
        return leaked

    # --- a client ---------------------------------------------------------------------------

    async def _end_client(self, cell: Cell, load: Load) -> Trial:
        arguments = ("-m", "kvferry.cluster.chaos.client", self._endpoint, ENDLESS.text)
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, str(ENDLESS.max_tokens), stdout=asyncio.subprocess.PIPE
        )
        try:
            return await self._watch_client(cell, load, process)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _watch_client(
        self, cell: Cell, load: Load, process: asyncio.subprocess.Process
    ) -> Trial:
        assert process.stdout is not None
        request_id = (await process.stdout.readline()).decode().strip()
        if not request_id:
            raise TookTooLong("the client's request was not accepted")

        async def arrived() -> RequestView | None:
            if await self._watch.has_ended(request_id):
                raise TookTooLong(f"the request ended before it was seen {cell.state}")
            return await self._watch.in_state(request_id, cell.state)

        async def ended() -> float | None:
            return time.monotonic() - at if await self._watch.has_ended(request_id) else None

        await until(f"the request is {cell.state}", arrived, STATE_WITHIN_S)
        aborted = (await self._client.status()).counters.aborted
        at = time.monotonic()
        process.send_signal(SIGNALS[cell.fault])
        notes: list[str] = []
        detection_s: float | None = None
        try:
            detection_s = await until("the request ends", ended, CLIENT_ENDS_WITHIN_S)
        except TookTooLong as error:
            notes.append(str(error))
        if (await self._client.status()).counters.aborted == aborted:
            notes.append("the request was not cancelled")
        await load.end()
        faults, complaints = judge(load.streams, self._references, router_ended=False)
        notes += complaints
        leaked = await self._aftermath(notes)
        return Trial(not notes, tuple(notes), faults, leaked, detection_s)


def longest_wait(records: Sequence[StreamRecord], signalled_at: float) -> float | None:
    """A stream's longest wait between two tokens; None if there are no two.

    Of a stream that was served anew it is the wait for the first token of its last record: since
    the last one before, or since the signal if that was later.
    """
    if len(records) == 1:
        return records[0].longest_gap_s
    before = [token_at for record in records[:-1] for token_at in record.times]
    after = records[-1].times
    return after[0] - max([signalled_at, *before]) if after else None
