"""The short form of ``make cancel-storm``."""

from __future__ import annotations

from pathlib import Path

from tests.storm import storm


def test_requests_cancelled_at_random_moments_leave_nothing_and_are_all_counted(
    tmp_path: Path,
) -> None:
    outcome = storm(tmp_path, 240)
    assert outcome.problems() == []
    assert outcome.ends["length"] > 120
    # How many of each is a matter of chance and of the machine's speed.
    assert all(outcome.ends[how] for how in ("abort", "deadline", "left")), outcome.ends
