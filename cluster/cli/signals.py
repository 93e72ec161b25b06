"""What SIGINT and SIGTERM do to a command that runs a cluster or follows a stream."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

from kvferry.cluster.cli.command import EXIT_INTERRUPTED

ASK_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """A context manager that owns both signals while it is open; main thread only.

    Before ``started`` the first signal raises KeyboardInterrupt, so that a start-up is unwound;
    afterwards it ends ``wait``. The second signal ends the process at once. An exception that is
    raised in a hook (after a fork, in a finalizer) is dropped by Python: ``check`` raises it again.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._started = False
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}

    def install(self) -> None:
        """Take the signals; again, after code that may have taken them."""
        for number in _SIGNALS:
            signal.signal(number, self._received)

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has come before ``started``."""
        if self._stop.is_set() and not self._started:
            raise KeyboardInterrupt

    def started(self) -> None:
        """From now on a signal asks ``wait`` to return."""
        self.check()
        self._started = True

    def wait(self, ended: Callable[[], bool] = lambda: False) -> bool:
        """Block until the first signal, or until ``ended``, asked now and then; True: a signal."""
        while not self._stop.wait(ASK_S):
            if ended():
                return False
        return True

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self._stop.is_set():
            os._exit(EXIT_INTERRUPTED)
        self._stop.set()
        self.check()

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class CancelOnInterrupt:
    """A context manager under which the first SIGINT calls ``cancel`` from a thread of its own.

    KeyboardInterrupt would be raised wherever the main thread happens to be, also between two
    lines of a library that belong together; a stream that is cancelled ends by itself instead.
    The second SIGINT raises KeyboardInterrupt. Main thread only; ``received``: one has come.
    """

    def __init__(self, cancel: Callable[[], object]) -> None:
        self._cancel = cancel
        self._wake = threading.Event()
        self.received = False

    def _run(self) -> None:
        self._wake.wait()
        if self.received:
            self._cancel()

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = True
        self._wake.set()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="cancel-on-interrupt", daemon=True)
        self._thread.start()
        self._before = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.signal(signal.SIGINT, self._before)
        self._wake.set()
        self._thread.join()
