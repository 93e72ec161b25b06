"""Starting or joining Ray, without losing what signals mean to us.

Ray takes SIGTERM for itself, and a signal that ends ``ray.init`` half way leaves a process that
crashes at its end. Knows no actors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import ray

from kvferry.cluster.config import Config
from kvferry.cluster.errors import ClusterUnreachable

REACH_S = 5.0

Handler = Callable[[int, FrameType | None], object] | int | None


def init_ray(config: Config) -> bool:
    """Join the configured Ray cluster, or start a small local one; True if there was none before.

    Raises ClusterUnreachable if the one to join does not answer or does not let us in.
    """
    if ray.is_initialized():
        return False
    if config.ray.address not in (None, "auto"):
        _reach(config.ray.address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = config.ray.address
    local: dict[str, Any] = {
        "include_dashboard": False,
        "object_store_memory": config.ray.object_store_memory,
        # Ray's own is 15: any other program on the host would starve heartbeats and steps.
        "_system_config": {"worker_niceness": 0},
    }
    try:
        with _own_signals():
            ray.init(
                address=address or "local",
                namespace=config.ray.namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **({} if address else local),
            )
    except (ray.exceptions.AuthenticationError, ConnectionError) as error:
        if not address:
            raise
        raise ClusterUnreachable(
            f"cannot join Ray at {address}: {error}; if it runs, does it ask for another token "
            "than ~/.ray/auth_token or RAY_AUTH_TOKEN has here?"
        ) from error
    return True


def _reach(address: str) -> None:
    """Raise ClusterUnreachable if nothing listens at HOST:PORT; Ray would try for a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise ClusterUnreachable(f"no Ray cluster answers at {address}: {why}") from error


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Answer signals after ``ray.init``, and take back the handlers that it puts in place of ours.

    SIGINT is held back (a second one is not). Ray answers SIGTERM with SystemExit, which Python
    drops if it meets a hook; the wake-up socket has seen the signal nevertheless.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers, so Ray has left them alone
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    seen, wake_up = socket.socketpair()
    with seen, wake_up:
        wake_up.setblocking(False)
        before = signal.set_wakeup_fd(wake_up.fileno())
        signal.signal(signal.SIGINT, _held_once(handlers[signal.SIGINT]))
        try:
            yield
        except SystemExit as error:
            signal.alarm(0)  # Ray's crash handler has set one that would abort the process in 3 s
            raise KeyboardInterrupt from error
        finally:
            signal.set_wakeup_fd(before)
            for number, handler in handlers.items():
                if handler is not None:  # else it was not set from Python
                    signal.signal(number, handler)
        wake_up.shutdown(socket.SHUT_WR)
        numbers = set(seen.recv(4096))
    for number, handler in handlers.items():
        if number in numbers and callable(handler):
            signal.alarm(0)  # as above
            handler(number, None)


def _held_once(handler: Handler) -> Callable[[int, FrameType | None], None]:
    """A handler that does nothing the first time and what ``handler`` does from then on."""
    came = False

    def received(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came and callable(handler):
            handler(number, frame)
        came = True

    return received
