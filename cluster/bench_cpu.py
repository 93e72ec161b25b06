"""How much processor time a cluster uses, read from outside.

Adds up user and system time of the processes that a Status names. Works only where all of them
run on this machine; knows nothing of what they do.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Self

import psutil

from kvferry.protos import kvferry_pb2 as pb


class CpuMeter:
    """CPU seconds of some processes since the meter was made."""

    def __init__(self, processes: Iterable[psutil.Process]) -> None:
        self._processes = tuple(processes)
        self._before = self._total()

    @classmethod
    def of_cluster(cls, status: pb.StatusResponse, hostname: str | None = None) -> Self | None:
        """A meter of the routers and workers of ``status``; None unless all run on this host."""
        here = hostname or socket.gethostname()
        places = [(router.host, router.pid) for router in status.routers]
        places += [(worker.worker.host, worker.worker.pid) for worker in status.workers]
        if not places or any(host != here or pid <= 0 for host, pid in places):
            return None
        try:
            return cls(psutil.Process(pid) for pid in sorted({pid for _, pid in places}))
        except psutil.Error:
            return None

    def elapsed(self) -> float | None:
        """Seconds of CPU since the start; None if a process has gone or been replaced."""
        if not all(process.is_running() for process in self._processes):
            return None
        try:
            return self._total() - self._before
        except psutil.Error:
            return None

    def _total(self) -> float:
        times = [process.cpu_times() for process in self._processes]
        return sum(time.user + time.system for time in times)
