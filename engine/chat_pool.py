"""The few processes that chat templates run in: started when needed, kept, replaced, ended.

A helper that dies or takes too long is ended by its process id, and the next request gets a new
one. Knows neither frames nor conversations.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref

from kvferry.engine import chat_child
from kvferry.engine.chat_helper import ChatTemplateError, Helper, HelperSettings, HelperUnavailable

MAX_HELPERS = 2


class Helpers:
    """Up to ``MAX_HELPERS`` processes, each used by one thread at a time.

    A slot holds a helper or None, and is taken last in first out: a second process is started
    only where two threads render at once. Whoever holds a slot owns its helper, and alone touches
    its pipes; ``close`` only kills what others hold.
    """

    def __init__(self, settings: HelperSettings) -> None:
        self._settings = settings
        self._slots: queue.LifoQueue[Helper | None] = queue.LifoQueue()
        for _ in range(MAX_HELPERS):
            self._slots.put(None)
        self._lock = threading.Lock()
        self._live: set[Helper] = set()
        self._is_closed = False
        self._finalizer = weakref.finalize(self, _end_all, self._live)

    def pids(self) -> list[int]:
        """Process ids of the helpers that have been started and not ended."""
        with self._lock:
            return sorted(helper.pid for helper in self._live)

    def render(self, request: bytes) -> str:
        """The text of a request. Raises ChatTemplateError, HelperUnavailable."""
        helper = self._slots.get()
        try:
            helper = self._asked(helper, request)
            kind, text = helper.answer(self._settings)
        except BaseException:
            self._retire(helper)
            helper = None
            raise
        finally:
            self._slots.put(helper)
        if kind == chat_child.REFUSED:
            raise ChatTemplateError(f"chat: {text}")
        return text

    def close(self) -> None:
        """End every helper; what is being rendered fails, and so does what comes later."""
        with self._lock:
            self._is_closed = True
            for helper in self._live:
                helper.kill()
        for _ in range(MAX_HELPERS):
            self._retire(self._slots.get())
        for _ in range(MAX_HELPERS):
            self._slots.put(None)

    def _asked(self, helper: Helper | None, request: bytes) -> Helper:
        """A helper that has taken the request: this one, or a new one where it is gone."""
        if helper is not None:
            if helper.is_ours() and helper.take(request, self._settings.start_s):
                return helper
            self._retire(helper)
        helper = self._started()
        if not helper.take(request, self._settings.start_s):
            self._retire(helper)
            raise HelperUnavailable("the process that chat templates run in ends when asked")
        return helper

    def _started(self) -> Helper:
        with self._lock:
            if self._is_closed:
                raise HelperUnavailable("chat templates are no longer rendered: shutting down")
            helper = Helper()
            self._live.add(helper)
        try:
            helper.set_up(self._settings)
        except BaseException:
            self._retire(helper)
            raise
        return helper

    def _retire(self, helper: Helper | None) -> None:
        if helper is not None:
            helper.end()
            with self._lock:
                self._live.discard(helper)


def _end_all(live: set[Helper]) -> None:
    for helper in live:
        with contextlib.suppress(OSError):
            helper.end()
    live.clear()
