"""Contiguous reservation against paging: the arithmetic, the traces, and the command."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks.paging.__main__ import main
from benchmarks.paging.formula import Geometry, exact_fit, fit
from benchmarks.paging.lengths import Lengths, NotATrace, lognormal, trace, traces
from benchmarks.paging.measure import measure
from kvferry.kv_cache.layout import KVGroup

JSON_ROWS = '{"input_length": 6, "output_length": 2, "hash_ids": [0]}\n' * 3
CSV_ROWS = "TIMESTAMP,ContextTokens,GeneratedTokens\n0,5,3\n1,400,1\n2,7,1\n"


def test_bytes_of_a_token_are_two_planes_of_layers_heads_and_dim() -> None:
    geometry = Geometry(num_layers=30, num_kv_heads=3, head_dim=64, element_bytes=4)
    assert geometry.kv_bytes(1) == 2 * 30 * 3 * 64 * 4 == 46_080
    assert geometry.kv_bytes(16) == KVGroup(0, 30, 3, 64, "float32").block_bytes(16)


def test_the_mean_fit_is_that_of_every_step_counted() -> None:
    requests = [Lengths(5, 3), Lengths(1, 1), Lengths(16, 9)]
    for size in (1, 2, 3, 8, 32):
        lengths = [n for r in requests for n in range(r.num_input, r.total)]
        blocks = [-(-length // size) for length in lengths]
        mean = sum(blocks) / len(lengths)
        wasted = sum(b * size - n for b, n in zip(blocks, lengths, strict=True)) / len(lengths)
        found = fit(requests, 960, size)
        assert found.num_requests == pytest.approx(960 // size / mean)
        assert found.wasted_tokens == pytest.approx(wasted)
        assert 0 <= found.wasted_tokens < size


def test_who_knows_the_length_wastes_what_is_not_produced_yet() -> None:
    found = exact_fit([Lengths(10, 5)], 140)
    assert found.num_requests == pytest.approx(10)  # 14 positions at most: the last has no KV
    assert found.wasted_tokens == pytest.approx(2)


def test_contiguous_reservation_is_a_block_of_the_greatest_length() -> None:
    requests = [Lengths(10, 5)] * 40
    found = measure(requests, 320, 32)
    assert found.most_requests == 10 and found.num_requests == pytest.approx(10)
    assert found.wasted_tokens == pytest.approx(32 - 12)
    assert found.num_steps == 4 * 5


@pytest.mark.parametrize("size", [1, 16, 128])
def test_the_scheduler_holds_about_what_the_formula_says(size: int) -> None:
    distribution = lognormal(120, seed=1)
    expected = fit(distribution.requests, 12_000, size)
    found = measure(distribution.requests, 12_000, size)
    assert found.num_requests == pytest.approx(expected.num_requests, rel=0.15)
    assert found.wasted_tokens == pytest.approx(expected.wasted_tokens, rel=0.15)
    assert found.num_requests > 3 * measure(distribution.requests, 12_000, 2048).num_requests


def test_lengths_are_those_of_the_seed() -> None:
    assert lognormal(20, 3) == lognormal(20, 3) != lognormal(20, 4)
    assert all(r.total <= 2048 for r in lognormal(200, 5).requests)


@pytest.fixture
def workloads(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "one.first60s.jsonl").write_text(JSON_ROWS[: len(JSON_ROWS) // 3])
    (folder / "one.first600s.jsonl").write_text(JSON_ROWS)
    (folder / "two.csv").write_text(CSV_ROWS)
    return tmp_path


def test_traces_are_read_by_their_columns_and_the_largest_cut_of_each(workloads: Path) -> None:
    one, two = traces(workloads, count=10, most=100)
    assert (one.name, one.requests, one.max_len) == ("one", (Lengths(6, 2),) * 3, 8)
    assert (two.requests, two.num_left_out) == ((Lengths(5, 3), Lengths(7, 1)), 1)
    assert traces(workloads / "traces", 1, 100)[0].requests == (Lengths(6, 2),)


def test_another_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(NotATrace, match=r"x\.csv has the columns a, b"):
        trace(tmp_path / "x.csv", 1, 100)


def test_the_command_prints_a_table_a_document_and_a_plot(
    workloads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.svg"
    arguments = ["--memory-mib=128", "--requests=30", "--block-sizes", "1", "16"]
    arguments += [f"--workloads={workloads}"]
    assert main([*arguments, "--json", f"--plot={plot}"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory_tokens"] == (128 << 20) // 46_080
    assert [one["name"] for one in found["distributions"]] == ["lognormal", "one", "two"]
    for one in found["distributions"]:
        contiguous, *paged = one["rows"]
        assert contiguous["contiguous"] and [row["block_size"] for row in paged] == [1, 16]
        assert paged[0]["measured"]["wasted_tokens"] == 0
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "blocks of 16" in printed and "own length, if known" in printed


def test_a_bad_folder_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    assert main(["--memory-mib=128", "--requests=5", f"--workloads={tmp_path}"]) == 2
    assert "x.csv" in capsys.readouterr().err
