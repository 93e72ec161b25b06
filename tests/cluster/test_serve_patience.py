"""A cluster is given up after a while without readiness, counted anew each time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.errors import NotReady
from kvferry.cluster.serve_patience import Patience


def test_not_ready_for_a_while_is_borne_and_for_longer_is_not() -> None:
    patience = Patience(60.0)
    patience.judge(["no decode worker"], 100.0)
    patience.judge(["no decode worker"], 159.9)
    with pytest.raises(NotReady, match=r"not ready for 60\.0 s: no decode worker; no model"):
        patience.judge(["no decode worker", "no model"], 160.0)


def test_readiness_ends_the_count() -> None:
    patience = Patience(60.0)
    patience.judge(["starting"], 0.0)
    patience.judge([], 59.0)
    patience.judge(["no decode worker"], 61.0)
    patience.judge(["no decode worker"], 120.0)


def test_without_patience_the_first_look_decides() -> None:
    with pytest.raises(NotReady):
        Patience(0.0).judge(["starting"], 0.0)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 50)), max_size=30), st.floats(0.1, 100))
def test_it_gives_up_just_when_no_look_of_the_last_while_was_good(
    looks: list[tuple[bool, float]], patience_s: float
) -> None:
    patience = Patience(patience_s)
    now, first_bad = 0.0, None
    for ready, later in looks:
        now += later
        if ready:
            first_bad = None
        elif first_bad is None:
            first_bad = now
        given_up = first_bad is not None and now - first_bad >= patience_s
        if given_up:
            with pytest.raises(NotReady):
                patience.judge(["why"], now)
        else:
            patience.judge([] if ready else ["why"], now)
