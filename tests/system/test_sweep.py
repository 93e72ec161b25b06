"""A sweep on real clusters: each is started, measured and gone; an interruption ends all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster import documents
from tests.engine.tiny_gguf import write_tiny_gguf
from tests.system.processes import START_S, Command, eventually

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CONFIG = "{cache: {num_blocks: 96}, transfer: {heartbeat: 100ms}}"
LOAD = (
    *("--input-tokens", "20", "--output-tokens", "8", "--num-requests", "4"),
    *("--slo", "ttft=60", "--repeats", "2", "--config", "base.yaml", "--model", "tiny.gguf"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "base.yaml").write_text(CONFIG, encoding="utf-8")
    return tmp_path


def test_interrupted_while_it_measures_and_taken_up_again(folder: Path) -> None:
    argv = ("loadgen", "sweep", "--json", "--arrangements", "1x2,1P+1D", *LOAD, "--html", "p.html")
    document = folder / "sweep.json"
    with Command(*argv, folder=folder) as first:
        eventually(
            "the first point is measured",
            lambda: (document.exists(), first.process.poll()),
            lambda seen: seen != (False, None),
            START_S,
        )
        first.interrupt()
        ended = first.wait()
        assert ended.code == 130, ended.err
        first.assert_nothing_lives_on()
    kept = json.loads(document.read_text(encoding="utf-8"))
    documents.check(kept)
    assert [point["arrangement"] for point in kept["points"]] == ["1x2"]
    with Command(*argv, folder=folder) as second:
        ended = second.wait(START_S)
        assert ended.code == 0, ended.err
        second.assert_nothing_lives_on()
    whole = documents.parse(ended.out)
    assert whole["points"][0] == kept["points"][0]
    runs = [point["run"] for point in whole["points"]]
    assert [run["arrangement"]["colocated"] for run in runs] == [1, 0]
    assert [run["arrangement"]["threads"] for run in runs] == [2, 2]
    prints = [[repeat["fingerprint"] for repeat in run["repeats"]] for run in runs]
    assert prints[0] == prints[1]
    assert whole["verdicts"][0]["rows"][0]["method"] == "paired"
    assert "<svg" in (folder / "p.html").read_text(encoding="utf-8")
