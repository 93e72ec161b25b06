"""Progress is seen where nobody watches a live line too, and nowhere if it is to be quiet."""

from __future__ import annotations

import io

import pytest

from kvferry.cluster.cli.progress import ProgressLine
from kvferry.cluster.ports import is_loopback

ARITHMETIC = "decode-0: KV pool: 64 blocks of 0.70 MiB (" + "as requested " * 20 + ")"


def test_off_a_terminal_each_message_is_a_whole_line_and_each_stage_is_named_once() -> None:
    stream = io.StringIO()
    with ProgressLine(quiet=False, stream=stream) as progress:
        progress.stage("download", 0, 10)
        progress.stage("download", 5, 10)
        progress.stage("convert", 0, 0)
        progress.say(ARITHMETIC)
        progress.say("[not markup]")
    lines = stream.getvalue().splitlines()
    assert lines == ["download ...", "convert ...", ARITHMETIC, "[not markup]"]


def test_quiet_says_nothing() -> None:
    stream = io.StringIO()
    with ProgressLine(quiet=True, stream=stream) as progress:
        progress.stage("download", 0, 10)
        progress.say("news")
    assert stream.getvalue() == ""


def test_news_may_end_what_goes_on() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        ProgressLine(quiet=True, stream=io.StringIO(), on_news=stop) as progress,
    ):
        progress.say("news")


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("127.0.0.1:50051", True),
        ("127.1.2.3:1", True),
        ("[::1]:50051", True),
        ("localhost:0", True),
        ("0.0.0.0:50051", False),
        ("[::]:50051", False),
        ("192.0.2.7:50051", False),
        ("example:50051", False),
    ],
)
def test_an_address_beyond_this_machine_is_told_from_one_on_it(address: str, wanted: bool) -> None:
    assert is_loopback(address) is wanted
