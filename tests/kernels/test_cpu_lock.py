"""The interpreter's lock is released around every compiled kernel."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from tests.kernels.families import compiled
from tests.kernels.test_cpu_refusals import recorded

MANY = 200_000


@pytest.fixture
def lock_is_kept() -> Iterator[None]:
    """A thread gives the lock up only of its own accord."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    "name",
    [
        "rms_norm",
        "silu_mul",
        "rope_tables",
        "rope",
        "move_blocks",
        "paged_attention",
        "pack_linear",
        "linear",
    ],
)
def test_another_thread_advances_during_a_kernel(
    monkeypatch: pytest.MonkeyPatch, lock_is_kept: None, name: str
) -> None:
    cpu = compiled()
    calls, _alive = recorded(cpu, monkeypatch)
    kernel, arguments = getattr(cpu.extension.native, name), calls[name]
    advanced: list[bool] = []
    begin = threading.Lock()
    begin.acquire()

    def advance() -> None:
        begin.acquire()
        advanced.append(True)

    thread = threading.Thread(target=advance)
    thread.start()
    begin.release()
    for _ in range(MANY):  # neither this loop nor the list lets the other thread in
        kernel(*arguments)
        if advanced:
            break
    inside = bool(advanced)
    thread.join()
    assert inside
