"""The ``kvferry`` command as a real process, watched together with all that it starts.

A process and its descendants carry a mark in their environment, by which they are found again
even where their parent has died.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

KVFERRY = (sys.executable, "-m", "kvferry.cluster.cli")
MARK = "KVFERRY_TEST_MARK"

# Bounds that only a fault exceeds, however slow the machine is.
START_S = 180.0
STOP_S = 120.0
SOON_S = 60.0
POLL_S = 0.05

# What a command that runs a cluster tells on standard error when nothing is amiss.
_PROGRESS = re.compile(
    r"starting Ray|joining the Ray cluster at \S+|starting \d+ workers and the router"
    r"|found a running cluster in .*"
    r"|block sizes?: .*|\S+: KV pool: .* \(as requested\)|waiting for the workers to connect|ready"
    r"|stopping: streams have [\d.]+ s to finish"
)

T = TypeVar("T")


def eventually(
    what: str, probe: Callable[[], T], holds: Callable[[T], bool], within_s: float = SOON_S
) -> T:
    """The first value of ``probe`` that ``holds``; fails, showing the last one, after a while."""
    deadline = time.monotonic() + within_s
    while not holds(value := probe()):
        assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s, but {value}"
        time.sleep(POLL_S)
    return value


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def complaints(self) -> list[str]:
        """The lines of standard error that are not the progress of a start and a stop."""
        return [line for line in self.err.splitlines() if not _PROGRESS.fullmatch(line)]


class Command:
    """One run of ``kvferry``; a context manager that lets nothing live on.

    It runs in ``folder`` and leads a process group, as in a shell. Output goes to files, so that
    nobody has to read it for the command to go on.
    """

    def __init__(
        self, *arguments: str, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.mark = uuid.uuid4().hex
        self._files = [folder / f"{self.mark}.{name}" for name in ("out", "err")]
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            self.process = subprocess.Popen(
                [*KVFERRY, *arguments],
                cwd=folder,
                env={**os.environ, **(environment or {}), MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                process_group=0,
            )

    @property
    def out(self) -> str:
        """Standard output so far."""
        return self._files[0].read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        """Standard error so far."""
        return self._files[1].read_text(encoding="utf-8")

    def family(self) -> list[psutil.Process]:
        """Every live process of this run, the command included."""
        return [process for process in psutil.process_iter() if _mark(process) == self.mark]

    def interrupt(self) -> None:
        """What a terminal does on Ctrl-C: SIGINT to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, within_s: float = STOP_S) -> Ended:
        """Wait for the command's own end."""
        code = self.process.wait(within_s)
        return Ended(code, self.out, self.err)

    def assert_nothing_lives_on(self) -> None:
        """Every process of this run ends by itself, soon after the command."""
        eventually("every process of the run has ended", self.family, lambda alive: not alive)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(SOON_S)


def _mark(process: psutil.Process) -> str | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else process.environ().get(MARK)
    except psutil.Error:
        return None


class Served(Command):
    """``kvferry serve`` on a free port, once it is ready.

    Attributes:
        ready: the facts of the READY line.
        endpoint: HOST:PORT of its gRPC.
    """

    def __init__(self, folder: Path, config: str, *arguments: str) -> None:
        name = uuid.uuid4().hex
        settings, self.ready_file = folder / f"{name}.yaml", folder / f"{name}.ready"
        settings.write_text(config, encoding="utf-8")
        flags = ("--config", str(settings), "--ready-file", str(self.ready_file))
        super().__init__("serve", "--grpc", "127.0.0.1:0", *flags, *arguments, folder=folder)
        self.ready: dict[str, Any] = {}
        self.endpoint = ""

    def __enter__(self) -> Self:
        try:
            eventually(
                "serve gets ready or ends",
                lambda: (self.ready_file.exists(), self.process.poll()),
                lambda seen: seen != (False, None),
                START_S,
            )
            assert self.ready_file.exists(), self.err
        except BaseException:
            self.__exit__()
            raise
        line = self.ready_file.read_text(encoding="utf-8")
        self.ready = json.loads(line.removeprefix("READY "))
        self.endpoint = self.ready["grpc"]
        return self


def abstract_sockets(process: psutil.Process) -> set[str]:
    """Names of the abstract Unix sockets that a process listens on or has accepted."""
    names = {str(connection.laddr) for connection in process.net_connections("unix")}
    return {name for name in names if name.startswith("@")}


def all_abstract_sockets() -> set[str]:
    """Names of every abstract Unix socket of this network namespace."""
    lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    return {words[7] for line in lines if len(words := line.split()) == 8 and words[7][0] == "@"}
