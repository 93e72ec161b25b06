"""What every test relies on: a quiet, offline environment and deterministic property tests.

Set before any test module is imported, because libraries read these variables when they load.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

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


# System tests with a Ray of their own, which say its address: they may run beside others.
OF_THEIR_OWN = frozenset(
    f"tests/system/test_{name}.py" for name in ("hosts", "installed", "joining", "ray_serve")
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """In several processes a file stays in one, for its fixtures, and so do all system tests that
    share a cluster; those with a Ray of their own stay in another.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file in OF_THEIR_OWN:
                return "their own"
            return "system" if file.startswith("tests/system/") else file

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The system tests first: the longest of what stays in one process, others run beside it."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/system/"))


@pytest.fixture(autouse=True)
def _no_settings_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command line reads these; a developer's shell must not change what a test sees."""
    for name in ("ENDPOINT", "ISA", "KERNELS", "LOG", "TOKEN", "TLS_CA", "TLS_CERT", "TLS_KEY"):
        monkeypatch.delenv(f"KVFERRY_{name}", raising=False)
    yield
