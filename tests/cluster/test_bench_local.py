"""``bench kernels`` and ``bench engine``: what they compare computes the same."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvferry.cluster.bench import attention, kernels, machine
from kvferry.cluster.bench.eager import EagerKernels
from kvferry.cluster.bench.families import AllKernels, Family, families
from kvferry.cluster.bench.parts import (
    ATTENTION,
    LINEARS,
    OTHER,
    OTHER_KERNELS,
    PARTS,
    PartTimer,
    TimedKernels,
    TimedLinear,
)
from kvferry.cluster.bench.rows import Shape
from kvferry.cluster.bench.scheduler import scheduler_rows
from kvferry.cluster.cli.app import main
from kvferry.kernels import reference
from tests.cluster import documents
from tests.parity.variants import random_reference

SHAPES = [Shape(3, 1, 40, 6, 2, 8, 16), Shape(1, 24, 24, 4, 4, 8, 16), Shape(2, 7, 40, 6, 2, 8, 16)]


def test_measuring_loads_no_ray() -> None:
    code = (
        "import sys, kvferry.cluster.bench.kernels, kvferry.cluster.bench.engine\n"
        "print('ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_bench_kernels_prints_a_row_per_kernel_family_and_number_of_threads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "kernels", "--tiny", "--json"]) == 0
    document = documents.parse(capsys.readouterr().out)
    rows = document["rows"]
    assert {row["implementation"] for row in rows} == {family.name for family in families()}
    assert {row["kernel"] for row in rows} == {
        "paged_attention_decode",
        "paged_attention_prefill",
        "rms_norm",
        "rope",
        "silu_mul",
        "write_kv",
        "copy_blocks",
    }
    assert {row["kv_dtype"] for row in rows} == {"float32", "bfloat16", None}
    for row in rows:
        assert row["max_error_float64"] < 1e-5
        times = [baseline["time_s"] for baseline in row["baselines"]]
        assert row["baseline"]["time_s"] == min(times)
        assert row["ratio_to_baseline"] == pytest.approx(min(times) / row["time_s"]["p50"])
        assert row["bytes_per_s"] == pytest.approx(row["bytes"] / row["time_s"]["p50"])
    assert main(["bench", "kernels", "--tiny"]) == 0
    assert "paged_attention_decode" in capsys.readouterr().out


def test_a_kernel_that_is_wrong_shows_in_its_error() -> None:
    off = SimpleNamespace(**{name: getattr(reference, name) for name in reference.__all__})
    off.paged_attention = lambda *arguments: reference.paged_attention(*arguments) + 0.5
    off.rms_norm = lambda *arguments: reference.rms_norm(*arguments) * 2
    family = Family("off", None, cast(AllKernels, off))
    fields = kernels.bench_kernels(kernels.TINY, lambda _: None, [family])
    wrong = {row["kernel"] for row in fields["rows"] if row["max_error_float64"] > 0.1}
    assert wrong == {"paged_attention_decode", "paged_attention_prefill", "rms_norm"}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_every_baseline_computes_paged_attention(shape: Shape, kv_dtype: torch.dtype) -> None:
    work = attention.make_attention(shape, torch.float32, kv_dtype, 1 << 16)
    assert work.pool.nbytes >= 1 << 16
    layer = work.num_layers - 1
    exact = attention.in_float64(work, layer)
    for way in (attention.gather_sdpa, attention.folded_gqa, attention.per_sequence):
        assert torch.allclose(way(work, layer).double(), exact, atol=1e-5), way.__name__


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_the_eager_step_computes_paged_attention(shape: Shape) -> None:
    work = attention.make_attention(shape, torch.float32, torch.float32, 0)
    found = attention.paged(work, Family("eager", None, EagerKernels()), 0)
    assert torch.allclose(found.double(), attention.in_float64(work, 0), atol=1e-5)


def test_bytes_and_operations_are_those_of_the_shape() -> None:
    case = attention.attention_case(SHAPES[0], torch.float32, torch.bfloat16, 0)
    assert case.num_bytes == 3 * 40 * 2 * 2 * 8 * 2 + 2 * 3 * 6 * 8 * 4
    assert case.flops == 4 * 3 * 40 * 6 * 8
    prompt = replace(SHAPES[0], batch=1, query_len=40)
    assert attention.attention_case(prompt, torch.float32, torch.float32, 0).flops == (
        4 * (40 * 41 // 2) * 6 * 8
    )


def test_competitors_take_turns_and_the_first_turn_is_not_counted() -> None:
    made: list[str] = []
    times = machine.timed(
        {name: lambda turn, name=name: made.append(f"{name}{turn}") for name in "ab"},  # type: ignore[misc]
        0.0,
        at_least=2,
    )
    assert made == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert [len(values) for values in times.values()] == [2, 2]


def test_the_number_of_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    with machine.threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_a_moment_counts_for_the_innermost_part_only() -> None:
    timer = PartTimer()
    began = time.perf_counter()
    with timer.within(OTHER), timer.within(ATTENTION):
        inside = time.perf_counter()
        while time.perf_counter() - inside < 0.02:
            pass
    took = time.perf_counter() - began
    assert 0.02 <= timer.seconds[ATTENTION] <= took
    assert sum(timer.seconds.values()) <= took
    assert timer.seconds[OTHER] <= took - 0.02


def test_linears_are_timed_by_their_calls_and_kernels_by_their_names() -> None:
    timer = PartTimer()
    linear = TimedLinear(reference.linear(torch.ones(64, 64), None, "float32"), timer)
    assert torch.equal(linear(torch.ones(4, 64)), torch.full((4, 64), 64.0))
    timed = cast(Any, TimedKernels(reference, timer))
    assert timer.seconds[LINEARS] > 0 == timer.seconds[OTHER_KERNELS]
    timed.silu_mul(torch.ones(2, 8))
    assert timer.seconds[OTHER_KERNELS] > 0 == timer.seconds[ATTENTION]


def test_the_scheduler_schedules_a_token_of_every_sequence() -> None:
    rows = scheduler_rows((2, 7), 40, 0.0)
    for row, count in zip(rows, (2, 7), strict=True):
        assert (row["num_running"], row["context"]) == (count, 40)
        assert row["s_per_scheduled_token"] * row["steps_per_s"] == pytest.approx(1 / count)


def test_bench_engine_prints_steps_and_their_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_reference("llama").save_pretrained(tmp_path)
    argv = ["bench", "engine", "--model", str(tmp_path), "--threads", "1", "--tiny"]
    assert main([*argv, "--json"]) == 0
    document = documents.parse(capsys.readouterr().out)
    rows = document["rows"]
    assert [(row["phase"], row["batch"]) for row in rows] == [
        ("decode", 1),
        ("decode", 2),
        ("prefill", 1),
    ]
    for row in rows:
        assert set(row["parts"]) == set(PARTS)
        assert all(seconds > 0 for seconds in row["parts"].values())
        outside = row["parts"]["sampling_s"] + row["parts"]["scheduling_s"]
        outside += row["parts"]["other_s"]
        share = outside / sum(row["parts"].values())
        assert row["outside_kernels_fraction"] == pytest.approx(share)
        assert row["ratio_to_eager"] == pytest.approx(row["eager_step_s"] / row["step_s"]["p50"])
    assert [row["num_running"] for row in document["scheduler"]] == [1, 4]
    assert main([*argv, "--dtype", "bfloat16"]) == 0
    assert "per scheduled token" in capsys.readouterr().out


def test_bench_engine_without_its_model_is_exit_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--model", "no-such-model", "--json"]) == 3
    document = documents.parse(capsys.readouterr().out)
    assert document["error"]["type"] == "ModelMissing"
    assert document["rows"] is None
