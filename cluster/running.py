"""Processes that run: the actors and handles by which the supervision knows them, and how it asks.

Knows how to look at one and how to end it, not when.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from typing import Any

import ray

from kvferry.cluster.ray_actors import node_id
from kvferry.worker.description import WorkerDescription
from kvferry.worker.messages import NodeRef


@dataclass(slots=True)
class RunningWorker:
    """A worker's actor; ``ended`` is a pending call that fails or returns when it has ended."""

    actor: Any
    description: WorkerDescription
    ended: Any

    @property
    def pid(self) -> int:
        """The worker's process id on its node."""
        return self.description.pid

    @property
    def node_id(self) -> str | None:
        """Ray's id of that node."""
        return self.description.node_id

    @property
    def ref(self) -> NodeRef:
        """The worker in this life."""
        return self.description.member.ref


@dataclass(slots=True)
class RunningRouter:
    """The router's actor in one life, and its process on a node."""

    actor: Any
    ref: NodeRef
    pid: int
    node_id: str


class Handles:
    """Handles of the watched processes on this node, by life.

    A process id may be another's by the time it is signalled; a handle never is.
    """

    def __init__(self, this_node: str) -> None:
        self._this_node = this_node
        self._open: dict[NodeRef, int] = {}

    def watch(self, process: RunningWorker | RunningRouter) -> None:
        """Open a handle while the process is known to live."""
        if process.node_id == self._this_node and process.ref not in self._open:
            with contextlib.suppress(ProcessLookupError):
                self._open[process.ref] = os.pidfd_open(process.pid)

    def kill(self, ref: NodeRef) -> None:
        """End the process, however it stands, and close the handle."""
        handle = self._open.pop(ref, None)
        if handle is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)

    def close(self) -> None:
        """Close what is open; ends nobody."""
        while self._open:
            os.close(self._open.popitem()[1])


class Calls:
    """What the supervision asks of Ray itself; of another kind where there is none."""

    def this_node(self) -> str:
        """Ray's id of the node that this process is on."""
        return node_id(None)

    def is_done(self, pending: Any) -> bool:
        """Whether a call has returned or failed."""
        ready, _ = ray.wait([pending], timeout=0)
        return bool(ready)

    def result(self, pending: Any, timeout_s: float | None = None) -> Any:
        """What it returned. Raises what it raised, and GetTimeoutError."""
        return ray.get(pending, timeout=timeout_s)

    def kill(self, actor: Any) -> None:
        """End an actor."""
        ray.kill(actor)
