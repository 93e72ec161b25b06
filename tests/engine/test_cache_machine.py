"""The cache machine in the ordinary run: so many steps, each checked, and everything has happened.

The same steps every time; ``python -m tests.engine.cache_machine --seed N`` takes others.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase

from tests.engine.cache_house import CacheHouse
from tests.engine.cache_machine import run

NUM_EXAMPLES = 300
LEAST_STEPS = 10_000
HAPPENED = (
    "aborted",
    "aborted meanwhile",
    "beams chosen within the step",
    "beams continued",
    "beams dropped",
    "beams forked",
    "copied",
    "evicted",
    "expired",
    "finished",
    "forked",
    "joined",
    "lost blocks",
    "off-loaded",
    "parked beams preempted",
    "pinned",
    "poisoned",
    "preempted",
    "raised",
    "read for nobody",
    "reopened",
    "restored",
    "reused",
    "reused from the host",
    "spilled blocks",
    "stopped for lost blocks",
)


@pytest.mark.slow
def test_contents_equal_a_dictionary_for_ten_thousand_steps(
    record_property: Callable[[str, object], None],
) -> None:
    run(seed=0, num_examples=NUM_EXAMPLES)
    print(f"{CacheHouse.num_steps} steps: {dict(sorted(CacheHouse.seen.items()))}")
    record_property("steps", CacheHouse.num_steps)
    assert CacheHouse.num_steps >= LEAST_STEPS
    missing = [name for name in HAPPENED if not CacheHouse.seen[name]]
    assert not missing, "the machine does not get there any longer"


def test_a_wrong_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine can fail: here a runner's copies go nowhere."""
    monkeypatch.setattr("tests.engine.cache_model.CacheModel.copy", lambda *_: None)
    with pytest.raises(AssertionError):
        run(seed=0, num_examples=NUM_EXAMPLES, phases=(Phase.generate,))
    assert CacheHouse.failed_at is not None
