"""A cluster in processes of its own: ``kvferry serve``, started, awaited and ended by its id.

Knows processes and nothing of loads.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import psutil
import yaml

from kvferry.kv_cache.errors import KVFerryError

MARK = "KVFERRY_SWEEP_CLUSTER"  # in the environment of its processes, and read by nobody else
KVFERRY = (sys.executable, "-m", "kvferry.cluster.cli")
START_S = 600.0  # a model may have to be fetched first
STOP_S = 60.0
KILLED_S = 30.0
ROUNDS = 3
POLL_S = 0.05
_TOLD_LINES = 15
_OF_THE_USER = (2, 3)  # usage or configuration, model or port: nothing that another try would mend


class ClusterFailed(KVFerryError):
    """A cluster did not start, or ended by itself; holds the last lines that it wrote."""

    is_one_line = False

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = code if code in _OF_THE_USER else 1


class ServeProcess:
    """A context manager: ready inside, ended with all its processes outside.

    It has a session of its own, so that Ctrl-C at a terminal reaches it only through us.

    Attributes:
        endpoint: HOST:PORT of its gRPC.
        startup_s: from the start to its READY line.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        command: tuple[str, ...] = KVFERRY,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._command = command
        self._on_wait = on_wait
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-sweep-")
        self._log = Path(self._folder.name) / "serve.log"
        self._id = uuid.uuid4().hex
        self.endpoint = ""
        self.startup_s = 0.0

    def __enter__(self) -> Self:
        folder = Path(self._folder.name)
        settings, ready = folder / "config.yaml", folder / "ready"
        settings.write_text(yaml.safe_dump(dict(self._config)), encoding="utf-8")
        flags = ("--config", str(settings), "--grpc", "127.0.0.1:0", "--ready-file", str(ready))
        began = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._command, "serve", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, MARK: self._id},
            )
        try:
            while not ready.exists():
                self._on_wait()
                self.check()
                if time.monotonic() - began > START_S:
                    raise ClusterFailed(
                        f"the cluster is not ready after {START_S:g} s{self._tail()}"
                    )
                time.sleep(POLL_S)  # another process writes the file; nothing tells of it
            self.startup_s = time.monotonic() - began
            line = ready.read_text(encoding="utf-8")
            self.endpoint = json.loads(line.removeprefix("READY "))["grpc"]
        except BaseException:
            self.__exit__()
            raise
        return self

    def check(self) -> None:
        """Raises ClusterFailed if it has ended."""
        code = self._process.poll()
        if code is not None:
            raise ClusterFailed(f"kvferry serve ended with {code}{self._tail()}", code)

    def _tail(self) -> str:
        """The last lines of its log."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "".join(f"\n  {line}" for line in lines[-_TOLD_LINES:])

    def __exit__(self, *exc_info: object) -> None:
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        finally:
            for _ in range(ROUNDS):  # again, for what was born meanwhile
                family = self._family()
                for member in family:
                    with contextlib.suppress(psutil.Error):
                        member.kill()
                self._process.poll()
                psutil.wait_procs(family, KILLED_S)
            self._process.wait()
            self._folder.cleanup()

    def _family(self) -> list[psutil.Process]:
        """Every live process that it started, known by its mark: a start that is interrupted leaves
        some whose parent is gone.
        """
        return [process for process in psutil.process_iter() if _mark(process) == self._id]


def _mark(process: psutil.Process) -> str | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else process.environ().get(MARK)
    except psutil.Error:
        return None
