"""How much processor time a cluster uses, read from outside.

Adds up user and system time of the processes that a Status names. Works only where all of them
run on this machine; knows nothing of what they do.
"""

from __future__ import annotations

import ipaddress
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
    def of_cluster(cls, status: pb.StatusResponse, endpoint: str) -> Self | None:
        """A meter of the routers and workers of ``status``; None unless all run on this machine.

        They do if ``endpoint`` is a loopback address and all of them name one host: what a host
        is called is the cluster's business.
        """
        places = [(router.host, router.pid) for router in status.routers]
        places += [(worker.worker.host, worker.worker.pid) for worker in status.workers]
        hosts = {host for host, _ in places}
        if not _is_loopback(endpoint) or len(hosts) != 1 or any(pid <= 0 for _, pid in places):
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


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
