"""Starting or joining Ray, without losing what signals mean to us.

Ray takes SIGTERM for itself, and a signal that ends ``ray.init`` half way leaves a process that
crashes at its end. Knows no actors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import ray

from kvferry.cluster.config import Config


def init_ray(config: Config) -> bool:
    """Join the configured Ray cluster, or start a small local one; True if it is ours."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = config.ray.address
    local: dict[str, Any] = {
        "include_dashboard": False,
        "object_store_memory": config.ray.object_store_memory,
    }
    with _own_signals():
        ray.init(
            address=address or "local",
            namespace=config.ray.namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **({} if address else local),
        )
    return True


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Answer SIGINT after ``ray.init``, and take back the handlers that it puts in place of ours.

    Meanwhile Ray answers SIGTERM with SystemExit; here it means what SIGINT means.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers, so Ray has left them alone
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [(number, handler) for number in numbers if (handler := signal.getsignal(number))]
    interrupted = _LaterSignal(signal.SIGINT)
    try:
        yield
    except SystemExit as error:
        signal.alarm(0)  # Ray's crash handler has set one that would abort the process in 3 s
        raise KeyboardInterrupt from error
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)
    interrupted.answer()


class _LaterSignal:
    """Holds a signal back until ``answer``; the second one goes to the handler at once."""

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._came = False
        self._handler = signal.signal(number, self._received)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self._came and callable(self._handler):
            self._handler(number, frame)
        self._came = True

    def answer(self) -> None:
        """Do now what the signal was to do, if it came."""
        if self._came and callable(self._handler):
            self._handler(self._number, None)
