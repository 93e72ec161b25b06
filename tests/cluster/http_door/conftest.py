"""A served cluster with its HTTP door, and the stub model's own answers."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from tests.stack import LONG_S, Stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One for each module; every test leaves it quiet."""
    with Stack(tmp_path_factory.mktemp("tiny"), http=True) as running:
        yield running
        running.assert_quiet()


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx2.Client]:
    """A plain client of the door."""
    with httpx2.Client(base_url=stack.url, timeout=LONG_S) as client:
        yield client
