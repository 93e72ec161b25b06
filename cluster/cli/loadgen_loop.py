"""The event loop that loads are sent from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import import_module


def event_loop() -> tuple[str, Callable[[], asyncio.AbstractEventLoop] | None]:
    """Name and factory of the event loop: uvloop's where it is installed, for it costs less."""
    try:
        return "uvloop", import_module("uvloop").new_event_loop
    except ModuleNotFoundError:
        return "asyncio", None
