"""Server processes: started, awaited, measured, and ended together with all that they started.

Each leads a process group of its own, so that a terminal's Ctrl-C reaches this process only, which
ends them in order. Knows nothing of what the servers serve.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

import psutil

from kvferry.cluster.errors import Internal

POLL_S = 0.2
STOP_S = 20.0  # after SIGTERM, before SIGKILL; vLLM does not hear it while it starts
KILLED_S = 10.0
TAIL_LINES = 40


class ServerFailed(Internal):
    """A server ended before it was ready, or was not ready in time; with its last lines."""

    is_one_line: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Launch:
    """What to start.

    Attributes:
        name: for people, and of the log.
        settings: environment variables that are set for it.
        inherited: all others that it gets.
    """

    name: str
    command: Sequence[str]
    settings: Mapping[str, str]
    inherited: Mapping[str, str] = field(repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """All of its variables."""
        return {**self.inherited, **self.settings}


class Server:
    """A context manager: one running ``launch``, whose output goes to a file in ``folder``.

    When it is left, nothing of it lives on: not what it started, nor what those started.
    """

    def __init__(self, launch: Launch, folder: Path) -> None:
        self.launch = launch
        self._folder = folder
        self._log = folder / f"{launch.name}.log"

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self.launch.command,
                cwd=self._folder,
                env=self.launch.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        return self

    def wait_until(self, ready: Callable[[], bool], within_s: float) -> None:
        """Return when ``ready``. Raises ServerFailed if the process ends before, or never is."""
        deadline = time.monotonic() + within_s
        while not ready():
            code = self._process.poll()
            if code is not None:
                raise ServerFailed(f"{self.launch.name} ended with {code}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"{self.launch.name} was not ready within {within_s:g} s:\n{self.tail()}"
                )
            time.sleep(POLL_S)  # a server says nothing when it becomes ready: it is asked

    def tail(self) -> str:
        """The last lines of its output."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def family(self) -> list[psutil.Process]:
        """The process, what it started and so on, and whoever is in its group."""
        # Once it has ended its number may be another's.
        found = set(_descendants(self._process.pid)) if self._process.poll() is None else set()
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(process.pid) == self._process.pid:
                    found.add(process)
        return sorted(found, key=lambda process: process.pid)

    def __exit__(self, *exc_info: object) -> None:
        family = self.family()
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_S)
            psutil.wait_procs(family, timeout=POLL_S)
        finally:  # a second Ctrl-C ends the waiting, not the ending
            for process in {*family, *self.family()}:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, timeout=KILLED_S)
            self._process.wait(KILLED_S)


def _descendants(pid: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        yield process
        yield from process.children(recursive=True)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
