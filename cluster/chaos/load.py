"""The streams around an experiment's target: a background that goes on, and blockers.

Every stream is recorded and later compared with its reference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import grpc.aio

from kvferry.cluster.chaos.streams import NO_FAULTS, UNAVAILABLE, Faults, StreamRecord, insist
from kvferry.cluster.chaos.workload import Prompt

RECOVERY_WITHIN_S = 60.0

References = Mapping[Prompt, Sequence[int]]
Stream = tuple[Prompt, list[StreamRecord]]  # one stream: every try, the last one decides


class Load:
    """Streams that run until ``end``."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.streams: list[Stream] = []
        self._channel = channel
        self._ending = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def repeat(self, prompt: Prompt) -> None:
        """Send a prompt again and again."""
        self._tasks.append(asyncio.create_task(self._repeat(prompt)))

    def once(self, prompt: Prompt) -> tuple[asyncio.Task[None], list[StreamRecord]]:
        """Send a prompt once; the task ends with its stream."""
        records: list[StreamRecord] = []
        self.streams.append((prompt, records))
        task = asyncio.create_task(insist(self._channel, prompt, records, RECOVERY_WITHIN_S))
        self._tasks.append(task)
        return task, records

    async def end(self) -> None:
        """Begin nothing more, and wait for every stream's end."""
        self._ending.set()
        await asyncio.gather(*self._tasks)

    async def abandon(self) -> None:
        """Cancel every stream."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _repeat(self, prompt: Prompt) -> None:
        while not self._ending.is_set():
            records: list[StreamRecord] = []
            self.streams.append((prompt, records))
            await insist(self._channel, prompt, records, RECOVERY_WITHIN_S)


def judge(
    streams: Sequence[Stream], references: References, router_ended: bool
) -> tuple[Faults, list[str]]:
    """Faults of all streams, and what went otherwise than it must.

    Each ends well, at once; only where the router was ended may a try be UNAVAILABLE first.
    """
    faults = NO_FAULTS
    notes = []
    for prompt, records in streams:
        own = sum((record.faults(references[prompt]) for record in records), NO_FAULTS)
        if own != NO_FAULTS:
            notes.append(f"a stream has {own}")
        faults += own
        for record in records[:-1]:
            if not router_ended:
                notes.append(f"a stream ended with {type(record.error).__name__}: {record.error}")
        last = records[-1].error
        if last is not None:
            kind = "at last " if isinstance(last, UNAVAILABLE) else ""
            notes.append(f"a stream {kind}ended with {type(last).__name__}: {last}")
    return faults, notes
