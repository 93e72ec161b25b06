"""A served cluster with its HTTP door, and clients of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.stack import LONG_S, Stack

Call = Callable[[], Any]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One for each module; every test leaves it quiet."""
    with Stack(tmp_path_factory.mktemp("tiny"), http=True) as running:
        yield running
        running.assert_quiet()


@pytest.fixture(scope="module")
def http(stack: Stack) -> Iterator[httpx2.Client]:
    """A plain client of the door."""
    with httpx2.Client(base_url=stack.url, timeout=LONG_S) as client:
        yield client


@pytest.fixture
def in_background() -> Iterator[Callable[[Call], Call]]:
    """Begins a call on a thread of its own; what it gives waits for the result."""
    with ThreadPoolExecutor(8) as threads:

        def begin(call: Call) -> Call:
            future = threads.submit(call)
            return lambda: future.result(LONG_S)

        yield begin
