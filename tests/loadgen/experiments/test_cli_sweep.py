"""``loadgen sweep``, ``compare`` and ``report`` as commands, on servers that answer by scripts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster.cli import loadgen_sweep, main
from kvferry.cluster.loadgen.experiments.recipes import RECIPES
from kvferry.cluster.loadgen.experiments.serve_process import ClusterFailed
from tests.cluster import documents
from tests.cluster.fake_server import FakeServer
from tests.loadgen.experiments.making import repeat, run_document

SMALL = ["--input-tokens", "5", "--output-tokens", "3", "--num-requests", "4", "--warm-up", "0"]


class Clusters:
    """Takes the place of ServeProcess; ``configs`` are those that were started."""

    def __init__(self) -> None:
        self.configs: list[dict[str, Any]] = []
        self.interrupt_at: int | None = None
        self.signal = signal.SIGINT
        self.fail = False

    @contextmanager
    def __call__(self, config: Any, on_wait: Callable[[], None]) -> Iterator[Any]:
        if len(self.configs) == self.interrupt_at:
            os.kill(os.getpid(), self.signal)
            signal.pause()
        if self.fail:
            raise ClusterFailed("kvferry serve ended with 2", 2)
        self.configs.append(json.loads(json.dumps(config)))
        on_wait()
        with FakeServer() as server:
            yield _Running(server.endpoint)


class _Running:
    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.startup_s = 0.1


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clusters:
    made = Clusters()
    monkeypatch.setattr(loadgen_sweep, "ServeProcess", made)
    monkeypatch.chdir(tmp_path)
    return made


def test_a_sweep_measures_writes_and_draws(
    clusters: Clusters, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "base.yaml").write_text("cache: {num_blocks: 64}\nmodel: {path: x}\n")
    argv = ["loadgen", "sweep", "--arrangements", "1x2,1P+1D", "--concurrencies", "1,2", *SMALL]
    argv += ["--repeats", "2", "--slo", "ttft=9", "--config", "base.yaml", "--model", "tiny"]
    argv += ["--html", "page.html", "--out", "s.json", "--png", "plots"]
    assert main([*argv, "--json"]) == 0
    printed = capsys.readouterr()
    document = documents.parse(printed.out)
    kept = json.loads((tmp_path / "s.json").read_text())
    assert {**kept, "created_at": document["created_at"]} == document
    assert [point["label"] for point in document["points"]] == [
        *("1x2, concurrency 1", "1x2, concurrency 2"),
        *("1P+1D, concurrency 1", "1P+1D, concurrency 2"),
    ]
    assert document["points"][0]["run"]["results"]["completed"] == 4
    assert document["points"][0]["run"]["arrangement"] is not None
    assert "point 4 of 4: 1P+1D, concurrency 2, round 1 of 1" in printed.err
    assert len(clusters.configs) == 2
    assert clusters.configs[0] == {
        "cache": {"num_blocks": 64},
        "model": {"name": "tiny"},
        "prefill": {"replicas": 0},
        "decode": {"replicas": 0},
        "colocated": {"replicas": 1, "threads": 2},
    }
    assert document["verdicts"][0]["disaggregated"] == "1P+1D"
    assert "<svg" in (tmp_path / "page.html").read_text()
    assert (tmp_path / "plots" / "goodput.png").exists()
    assert main(argv) == 0  # nothing is left to measure
    assert len(clusters.configs) == 2
    shown = capsys.readouterr().out
    assert "1P+1D, concurrency 2" in shown
    assert "4 points in s.json" in shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_leaves_a_document_and_goes_on(
    number: signal.Signals, clusters: Clusters, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = ["loadgen", "sweep", "--arrangements", "1x2,2x1", "--rates", "50", *SMALL, "--json"]
    clusters.interrupt_at, clusters.signal = 1, number
    assert main(argv) == 130
    document = documents.parse(capsys.readouterr().out)
    kept = json.loads((tmp_path / "sweep.json").read_text())
    documents.check(kept)
    assert kept["points"] == document["points"]
    assert [point["arrangement"] for point in document["points"]] == ["1x2"]
    assert document["error"]["message"] == "interrupted"
    clusters.interrupt_at = None
    assert main(argv) == 0
    document = documents.parse(capsys.readouterr().out)
    assert len(document["points"]) == 2
    assert len(clusters.configs) == 2


def test_a_cluster_that_does_not_start_ends_the_sweep(
    clusters: Clusters, capsys: pytest.CaptureFixture[str]
) -> None:
    clusters.fail = True
    assert main(["loadgen", "sweep", *SMALL, "--json"]) == 2
    document = documents.parse(capsys.readouterr().out)
    assert document["error"]["message"] == "kvferry serve ended with 2"
    assert document["points"] == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--arrangements", "2"], "arrangement: got '2'"),
        (["--rates", "1", "--concurrency", "2"], "concurrency: this sweep varies the rate"),
        (["--rates", "1", "--stretches", "2"], "not allowed with"),
        (["--stretches", "2"], "only a trace's times"),
        (["--turns", "3"], "turns: the workload random does not look at it"),
        (["--html", "no-such-folder/x.html"], "there is no folder"),
        (["--config", "no-such-file"], "no-such-file: cannot be read"),
        (["--out", "mine.txt"], "mine.txt cannot be read and is left as it is"),
    ],
)
def test_what_makes_no_sweep_is_exit_2_and_starts_nothing(
    flags: list[str],
    said: str,
    clusters: Clusters,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.txt").write_text("my own text")
    assert main(["loadgen", "sweep", *flags]) == 2
    assert said in capsys.readouterr().err
    assert clusters.configs == []
    assert (tmp_path / "mine.txt").read_text() == "my own text"
    assert not (tmp_path / "sweep.json").exists()


def test_help_lists_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["loadgen", "sweep", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for recipe in RECIPES.values():
        assert f"{recipe.name}: {recipe.question}" in printed


def write(path: Path, document: dict[str, Any]) -> str:
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


def test_two_documents_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast = [repeat(n, goodput=2.0 + n / 100) for n in range(3)]
    slow = [repeat(n, goodput=1.0 + n / 100) for n in range(3)]
    a = write(tmp_path / "a.json", run_document(fast))
    b = write(tmp_path / "b.json", run_document(slow))
    argv = ["loadgen", "compare", a, b]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "good requests: 2.01 in A, 1.01 in B /s" in printed
    assert "the run: A is better at good requests; " in printed
    assert main([*argv, "--fail-if-worse", "60"]) == 0
    capsys.readouterr()
    assert main([*argv, "--fail-if-worse", "10", "--json"]) == 1
    document = documents.parse(capsys.readouterr().out)
    assert document["worse"][0]["figure"] == "goodput_per_s"
    assert document["worse"][0]["percent"] == pytest.approx(49.75, rel=1e-3)
    assert document["a"]["commit"] == "c" * 40
    assert main(["loadgen", "compare", b, a, "--fail-if-worse", "0", "--json"]) == 0
    documents.parse(capsys.readouterr().out)
    once = write(tmp_path / "c.json", run_document(fast[:1]))
    assert main(["loadgen", "compare", once, b, "--fail-if-worse", "10"]) == 2
    assert "wanted two of each" in capsys.readouterr().err
    assert main(["loadgen", "compare", a, "no-such-file"]) == 2
    assert "no-such-file: cannot be read" in capsys.readouterr().err


def test_a_document_is_drawn_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config: dict[str, Any] = {}
    path = write(tmp_path / "a.json", run_document([repeat(1)], config=config))
    page = tmp_path / "page.html"
    assert main(["loadgen", "report", path, "--html", str(page)]) == 0
    assert "<svg" in page.read_text()
    assert main(["loadgen", "report", path]) == 2
    assert "wanted --html or --png" in capsys.readouterr().err
