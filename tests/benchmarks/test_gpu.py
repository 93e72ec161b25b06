"""What of the GPU's check needs none: shapes, shares, the table, and how it ends without one."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.attention import candidates, make_inputs, work_of
from benchmarks.gpu.cluster import CONFIG, summary, sweep_command
from benchmarks.gpu.work import (
    DECODES,
    PREFILLS,
    AttentionShape,
    best,
    decode_row,
    prefill_row,
    step_row,
    table,
)
from kvferry.cluster.cli import loadgen
from kvferry.cluster.config import load_config

ROOT = Path(__file__).parents[2]


def test_bytes_and_operations_are_those_of_the_definition() -> None:
    shape = AttentionShape(2, 3, 5, kv_heads=2, group=4, head_dim=8)
    assert shape.kv_bytes(2) == 2 * 2 * 5 * 2 * 8 * 2
    pairs = 3 + 4 + 5  # of one sequence
    assert shape.flops() == 4 * 2 * pairs * 8 * 8


def test_a_row_is_a_share_of_what_the_device_does_at_best() -> None:
    shape = AttentionShape(1, 1, 1000, 1, 1, 64)
    row = decode_row(shape, 2, took_s=1e-6, copy_rate=1e12)
    assert row.rate == pytest.approx(2 * 1000 * 64 * 2 / 1e-6)
    assert row.share == pytest.approx(0.256)
    prefill = prefill_row(AttentionShape(1, 10, 10, 1, 1, 64), 1e-6, 1e12)
    assert prefill.share == pytest.approx(4 * 55 * 64 / 1e-6 / 1e12)
    shown = table([row, prefill, step_row("a step", 0.001, 10**9, 2e12)])
    assert "| 0.26 |" in shown and "| 1000 µs | 1000 GB/s | 0.50 |" in shown


def test_the_best_is_the_fastest_that_can_be_launched() -> None:
    times = {"slow": 3.0, "impossible": None, "fast": 1.0}
    assert best(list(times), times.__getitem__) == "fast"
    assert best(["impossible"], times.__getitem__) is None


@pytest.mark.parametrize("shape", [*DECODES, *PREFILLS], ids=lambda shape: shape.label())
def test_every_shape_has_tiles_to_try(shape: AttentionShape) -> None:
    tiles = list(candidates(work_of(shape)))
    assert len(tiles) == len(set(tiles)) > 8
    assert all(tile.rows >= max(16, shape.group) for tile in tiles)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_inputs_hold_numbers_only(kv_dtype: str) -> None:
    inputs = make_inputs(AttentionShape(2, 3, 40, 2, 3, 16, kv_dtype=kv_dtype), device="cpu")
    assert inputs.q.shape == (6, 6, 16) and bool(inputs.q.isfinite().all())
    assert inputs.cu_seqlens_q.tolist() == [0, 3, 6] and inputs.seq_lens.tolist() == [40, 40]
    assert sorted(inputs.block_tables.flatten().tolist()) == list(range(6))
    assert bool(inputs.pool.float().isfinite().all())


def test_the_cluster_is_one_that_can_be_configured_and_started(tmp_path: Path) -> None:
    (tmp_path / "gpu.yaml").write_text(CONFIG)
    config = load_config(tmp_path / "gpu.yaml")
    assert config.prefill.gpus == config.decode.gpus == 0.5
    parser = argparse.ArgumentParser()
    loadgen.COMMAND.configure(parser)
    parsed = parser.parse_args(sweep_command(tmp_path)[4:])
    assert str(parsed.config) == str(tmp_path / "gpu.yaml")


def test_the_summary_reads_a_sweeps_document() -> None:
    results = {"output_tokens_per_s": 1234.4, "ttft_s": {"p50": 0.1}, "tpot_s": {"p50": 0.004}}
    document = {"points": [{"label": "1P+1D", "run": {"results": results}}]}
    (line,) = summary(document)
    assert line == "1P+1D: 1234 output tokens/s, TTFT 100.0 ms, TPOT 4.00 ms at the median"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check"],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "no GPU here: nothing was checked\n")
