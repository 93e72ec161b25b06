"""What every test relies on: a quiet, offline environment and deterministic property tests.

Set before any test module is imported, because libraries read these variables when they load.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

pytest_plugins = ("tests.model_fixture",)

# Nothing in the suite may reach out: models come from the local cache or from the package index.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# OpenMP threads that spin while they wait make a busy machine many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# On a shared machine a slow example says nothing about the code. The same examples every time: a
# red run is a finding and can be repeated; `--hypothesis-profile=explore` looks for new ones.
hypothesis.settings.register_profile("kvferry", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("kvferry")


# In a run in the background the shell has SIGINT ignored, and children would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_itemcollected(item: pytest.Item) -> None:
    """For a run in several processes: a file stays in one, for its fixtures; so does all that
    starts a Ray, of which there is one at a time.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        starts_ray = item.get_closest_marker("ray") or "system" in item.path.parts
        item.add_marker(pytest.mark.xdist_group("ray" if starts_ray else str(item.path)))


@pytest.fixture(autouse=True)
def _no_settings_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command line reads these; a developer's shell must not change what a test sees."""
    for name in ("KVFERRY_ENDPOINT", "KVFERRY_ISA", "KVFERRY_KERNELS", "KVFERRY_LOG"):
        monkeypatch.delenv(name, raising=False)
    yield
