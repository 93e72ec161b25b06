"""What an experiment must know of a running cluster, and how it waits for it.

Asks the launcher (processes, deaths, states of requests; blocking calls, so in a thread) and the
gRPC door (readiness, audits). Changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import psutil

from kvferry.cluster.client import AsyncClient
from kvferry.cluster.deaths import Death
from kvferry.cluster.routed_request import RequestState, RequestView
from kvferry.kv_cache.errors import KVFerryError
from kvferry.protos import kvferry_pb2 as pb
from kvferry.worker.messages import NodeRef

POLL_S = 0.02
READY_WITHIN_S = 90.0
QUIET_WITHIN_S = 10.0

T = TypeVar("T")


class WatchedCluster(Protocol):
    """What is asked of ``kvferry.cluster.launcher.Cluster``."""

    grpc: str

    def processes(self) -> dict[NodeRef, int]:
        """Process ids of the present lives."""

    def deaths(self) -> list[Death]:
        """Deaths that were declared."""

    def request_views(self) -> list[RequestView] | None:
        """Live requests; None while no router answers."""


class TookTooLong(KVFerryError):
    """Something that an experiment waits for has not come about; says what."""


async def until(
    what: str, probe: Callable[[], Awaitable[T | None]], within_s: float, every_s: float = POLL_S
) -> T:
    """The first answer of ``probe`` that is not None. Raises TookTooLong."""
    deadline = time.monotonic() + within_s
    while (found := await probe()) is None:
        if time.monotonic() > deadline:
            raise TookTooLong(f"{what}: not within {within_s:g} s")
        await asyncio.sleep(every_s)
    return found


class ClusterWatch:
    """See the module."""

    def __init__(self, cluster: WatchedCluster, client: AsyncClient, num_workers: int) -> None:
        self._cluster = cluster
        self._client = client
        self._num_workers = num_workers

    async def view(self, request_id: str) -> RequestView | None:
        """One live request; None if it has ended or no router answers."""
        views = await asyncio.to_thread(self._cluster.request_views)
        return next((view for view in views or () if view.request_id == request_id), None)

    async def has_ended(self, request_id: str) -> bool:
        """Whether the router says that the request is not (any more) alive."""
        views = await asyncio.to_thread(self._cluster.request_views)
        return views is not None and all(view.request_id != request_id for view in views)

    async def in_state(self, request_id: str, state: str) -> RequestView | None:
        """The request if it is in that state now, as ``cells.STATES`` names them."""
        view = await self.view(request_id) if request_id else None
        if view is None:
            return None
        if state == "transferring":
            return view if await self._is_transferring(view) else None
        found = {
            "queued": view.state is RequestState.QUEUED or view.full,
            "prefilling": view.state is RequestState.PREFILLING and not view.num_delivered,
            "handed_off": view.state is RequestState.PREFILLING and view.num_delivered > 0,
            "decoding": view.state is RequestState.DECODING and view.num_delivered > 3,
        }
        return view if found[state] else None

    async def _is_transferring(self, view: RequestView) -> bool:
        """Blocks are being read into the decode worker, and token 1 is not there yet."""
        if view.state is not RequestState.PREFILLING or view.num_delivered or view.decode is None:
            return False
        (pool,) = (await self._client.audit(view.decode.node_id, include_blocks=True)).pools
        reading = any(
            owner.kind == "writer" and owner.request_id == view.request_id
            for block in pool.blocks
            for owner in block.owners
        )
        after = await self.view(view.request_id)
        return reading and after is not None and not after.num_delivered

    def process(self, ref: NodeRef) -> int:
        """The process id of a life. Raises TookTooLong if it has ended."""
        pid = self._cluster.processes().get(ref)
        if pid is None:
            raise TookTooLong(f"{ref.node_id} of epoch {ref.epoch} has ended already")
        return pid

    def named(self, node_id: str) -> NodeRef:
        """The present life of a node. Raises TookTooLong if it has none."""
        found = next((ref for ref in self._cluster.processes() if ref.node_id == node_id), None)
        if found is None:
            raise TookTooLong(f"there is no {node_id}")
        return found

    def death(self, ref: NodeRef) -> Death | None:
        """How a life was declared dead, if it was."""
        return next((death for death in self._cluster.deaths() if death.ref == ref), None)

    def deaths_but(self, caused: Sequence[NodeRef]) -> list[Death]:
        """Deaths that nobody has caused."""
        return [death for death in self._cluster.deaths() if death.ref not in caused]

    async def ready(self) -> None:
        """Wait until every worker is ready and every pair connected. Raises TookTooLong."""

        async def probe() -> bool | None:
            with contextlib.suppress(KVFerryError):
                return _whole(await self._client.status(), self._num_workers) or None
            return None

        await until("every worker is ready", probe, READY_WITHIN_S, every_s=0.1)

    async def leftovers(self) -> tuple[int, list[str]]:
        """Blocks that somebody still holds when all should be quiet, and what audits complain of.

        Waits for quiet first; a moment is needed after the last token.
        """
        deadline = time.monotonic() + QUIET_WITHIN_S
        while True:
            audit = await self._client.audit()
            held = sum(_held(pool) for pool in audit.pools)
            problems = [f"{p.worker_id}: {text}" for p in audit.pools for text in p.problems]
            if (not held and not problems) or time.monotonic() > deadline:
                return held, problems
            await asyncio.sleep(0.1)


def _whole(status: pb.StatusResponse, num_workers: int) -> bool:
    """Every worker is there and every decode worker has opened every prefill worker."""
    workers = [entry.worker for entry in status.workers]
    sources = {worker.worker_id: worker.epoch for worker in workers if worker.role == "prefill"}
    return (
        status.ready
        and len(workers) == num_workers
        and all(worker.state == "ready" for worker in workers)
        and all(
            sources.items()
            <= {p.worker_id: p.epoch for p in entry.peers if p.state == "connected"}.items()
            for entry in status.workers
            if entry.worker.role == "decode"
        )
    )


def _held(pool: pb.Pool) -> int:
    return pool.num_pinned + pool.num_in_transfer + pool.num_referenced + pool.num_quarantined


def is_gone(pid: int) -> bool:
    """Whether a process has ended (one that is only unburied has)."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
