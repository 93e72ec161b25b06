"""The parent's side of a process that chat templates run in: start, ask, time, end.

Knows frames and clocks, not conversations. Used by one thread at a time (``engine.chat_pool``).

    KVFerryError
    ├── InvalidRequest
    │   └── ChatTemplateError      the conversation or the template is at fault
    └── HelperUnavailable          this machine is
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.engine import chat_child
from kvferry.engine.request import InvalidRequest
from kvferry.kv_cache.errors import KVFerryError

RENDER_LIMIT_S = 2.0
START_LIMIT_S = 20.0
MEMORY_BYTES = 512 << 20

_ENVIRONMENT = ("LD_LIBRARY_PATH", "PYTHONHOME")  # what an interpreter may need to start


class ChatTemplateError(InvalidRequest):
    """The messages cannot be rendered; names the message or repeats what the template said."""


class HelperUnavailable(KVFerryError):
    """The process that chat templates run in could not be started, or does not answer."""


class _Ended(Exception):
    """The helper's pipes have ended."""


@dataclass(frozen=True, slots=True)
class HelperSettings:
    """What a helper runs and may take.

    Attributes:
        sources: templates by name.
        special_tokens: variables of every template.
        max_chars: of one rendered text.
        limit_s: wall-clock seconds of one rendering, from when the helper took the request.
        start_s: seconds to start, or to take a request.
        memory: bytes that a helper may take beyond what it has when it starts.
    """

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str]
    max_chars: int
    limit_s: float = RENDER_LIMIT_S
    start_s: float = START_LIMIT_S
    memory: int = MEMORY_BYTES

    def frame(self) -> bytes:
        """The first frame that a helper gets."""
        names = ("max_chars", "limit_s", "start_s", "memory")
        fields = {name: getattr(self, name) for name in names}
        fields |= {"sources": dict(self.sources), "special_tokens": dict(self.special_tokens)}
        return chat_child.frame(chat_child.SETUP, json.dumps(fields).encode())


class Helper:
    """One process (``engine.chat_child``) and its two pipes. Raises HelperUnavailable."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", chat_child.__name__],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=_environment(),
                start_new_session=True,  # a terminal's interrupt is not for it
            )
        except OSError as error:
            raise HelperUnavailable(
                f"the process that chat templates run in cannot be started ({error})"
            ) from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        for pipe in (self._input, self._output):
            os.set_blocking(pipe.fileno(), False)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def is_ours(self) -> bool:
        """False in a fork of the process that started it, which shares its pipes."""
        return self._owner == os.getpid()

    def set_up(self, settings: HelperSettings) -> None:
        """Give it its templates and wait until it can take requests."""
        deadline = time.monotonic() + settings.start_s
        try:
            self._write(settings.frame(), deadline)
            kind, text = self._read_frame(deadline, settings.max_chars)
        except TimeoutError as error:
            raise HelperUnavailable(
                "the process that chat templates run in has not started within "
                f"{settings.start_s:g} s: the machine is overloaded, or the template is too large"
            ) from error
        except _Ended as error:
            raise HelperUnavailable(
                f"the process that chat templates run in ended {self.end()} when it started"
            ) from error
        if kind == chat_child.REFUSED:
            raise ChatTemplateError(f"chat: the model's template {text}")

    def take(self, request: bytes, within_s: float) -> bool:
        """Hand over a request; False if the process is gone. Raises HelperUnavailable."""
        deadline = time.monotonic() + within_s
        try:
            self._write(chat_child.frame(chat_child.RENDER, request), deadline)
            kind, _ = self._read_frame(deadline, 0)
        except TimeoutError as error:
            raise HelperUnavailable(
                "the process that chat templates run in has taken no request for "
                f"{within_s:g} s: the machine is overloaded"
            ) from error
        except _Ended:
            return False
        return kind == chat_child.BEGUN

    def answer(self, settings: HelperSettings) -> tuple[bytes, str]:
        """What it makes of the request that it has taken. Raises ChatTemplateError."""
        try:
            kind, text = self._read_frame(time.monotonic() + settings.limit_s, settings.max_chars)
        except TimeoutError as error:
            raise ChatTemplateError(
                f"chat: the model's template was ended after {settings.limit_s:g} s; "
                "send a shorter conversation"
            ) from error
        except _Ended as error:
            raise ChatTemplateError(
                f"chat: the process that ran the model's template ended {self.end()}; "
                "send a shorter conversation"
            ) from error
        return kind, text

    def kill(self) -> None:
        """Kill the process; whoever uses it will find its pipes ended."""
        if self.is_ours():
            self._process.kill()

    def end(self) -> str:
        """Kill the process if it lives, wait for it, close the pipes; says how it ended."""
        if not self.is_ours():
            self._process.returncode = 0  # not ours to wait for
        elif self._process.poll() is None:
            self._input.close()
            self._process.kill()
        code = self._process.wait()
        self._input.close()
        self._output.close()
        return f"by signal {-code}" if code < 0 else f"with exit code {code}"

    def _write(self, data: bytes, deadline: float) -> None:
        rest = memoryview(data)
        while rest:
            _wait(self._input.fileno(), select.POLLOUT, deadline)
            try:
                rest = rest[os.write(self._input.fileno(), rest) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise _Ended from error

    def _read_frame(self, deadline: float, max_chars: int) -> tuple[bytes, str]:
        header = self._read(chat_child.HEADER.size, deadline)
        kind, length = chat_child.HEADER.unpack(header)
        # one character takes four bytes at most, also of the words of a refusal
        if length > 4 * (max_chars + 2 * chat_child.ERROR_CHARS):
            raise _Ended
        return kind, self._read(length, deadline).decode("utf-8", "replace")

    def _read(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            _wait(self._output.fileno(), select.POLLIN, deadline)
            chunk = os.read(self._output.fileno(), count - len(data))
            if not chunk:
                raise _Ended
            data += chunk
        return bytes(data)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    """Return when the descriptor is ready or has ended. Raises TimeoutError."""
    poller = select.poll()
    poller.register(descriptor, event)
    if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _environment() -> dict[str, str]:
    """The parent's import path, wherever it came from, and none of its secrets."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}
