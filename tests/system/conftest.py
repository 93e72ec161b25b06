"""A served cluster for the whole session: Ray and the model are slow to start."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cluster.client import Client
from kvferry.engine.weights.store import ModelFolder
from tests.system.processes import Served

# Chunks of 32 tokens, so that prompts of a hundred tokens take several.
CONFIG = """
model: {max_model_len: 576}
cache: {num_blocks: 192}
scheduler: {max_num_batched_tokens: 64, chunk_tokens: 32}
"""


@pytest.fixture(scope="session")
def served(
    default_model: ModelFolder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """One prefill and one decode worker on the real model; started outside the repository."""
    folder: Path = tmp_path_factory.mktemp("served")
    with Served(folder, CONFIG, "--http", "127.0.0.1:0") as running:
        yield running
        assert running.process.poll() is None, f"serve died during the tests: {running.err}"
        running.process.send_signal(signal.SIGTERM)
        ended = running.wait()
        assert (ended.code, ended.complaints) == (0, [])
        running.assert_nothing_lives_on()


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    """A client of the served cluster."""
    with Client(served.endpoint) as connected:
        yield connected
