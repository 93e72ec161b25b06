"""What strangers cause is counted each time, and fills no log."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from kvferry.cluster.access.refusals import Refusals
from kvferry.cluster.errors import Unauthenticated
from kvferry.cluster.metrics import catalog
from kvferry.cluster.metrics.recorder import Recorder
from kvferry.kv_cache.line_limit import BURST, MAX_LINE_CHARS

FLOOD = 20 * BURST


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(1)


@pytest.fixture
def refusals(recorder: Recorder) -> Refusals:
    return Refusals(recorder, lambda then: then(), lambda: 0.0)


def test_a_flood_is_counted_wholly_and_logged_in_part(
    refusals: Refusals, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(FLOOD):
        refusals.connection("http", "tls", f"192.0.2.7:{number}", "why")
        refusals.call("grpc", "/a/b", f"192.0.2.7:{number}", Unauthenticated("no token"))
    refusals.connection("metrics", "tls", "192.0.2.8:1", "why")
    assert recorder.counts == Counter(
        {
            (catalog.CONNECTIONS_REFUSED, ("http", "tls")): FLOOD,
            (catalog.CONNECTIONS_REFUSED, ("metrics", "tls")): 1,
            (catalog.REJECTED, ("Unauthenticated",)): FLOOD,
        }
    )
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 * BURST + 1
    assert lines[0] == "refused a connection to the http port (tls) from 192.0.2.7:0: why"
    assert lines[1] == "refused /a/b from 192.0.2.7:0: Unauthenticated: no token"
    assert "192.0.2.8:1" in lines[-1], "another port's is not silenced"


@pytest.mark.parametrize("filler", ["x", "\x00", "\n", "\udcff", "ü", "\U0001f600"])
def test_a_line_is_one_short_line_whatever_it_quotes(
    refusals: Refusals, caplog: pytest.LogCaptureFixture, filler: str
) -> None:
    long = filler * 65536
    with caplog.at_level(logging.WARNING):
        refusals.connection("metrics", "malformed", "192.0.2.7:1", f"400 {long}")
        refusals.call("http", long, "192.0.2.7:2", Unauthenticated("the end is here"))
    first, second = (record.getMessage() for record in caplog.records)
    assert "192.0.2.7:1: 400" in first
    assert second.endswith("from 192.0.2.7:2: Unauthenticated: the end is here")
    for line in (first, second):
        assert line.isprintable() and len(line) < MAX_LINE_CHARS
