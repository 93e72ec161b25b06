from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kernels.triton import tuning
from kvferry.kernels.triton.attention import plan
from kvferry.kernels.triton.resources import (
    UnreadableReport,
    amd_load_bits,
    nvidia_resources,
    ptx_load_bits,
)
from kvferry.kernels.triton.tuning import (
    DECODE,
    MAX_SPLITS,
    PREFILL,
    PREFILL_SPLITS,
    Tile,
    Work,
    default_tile,
    num_splits,
    power_of_two,
    table_json,
    tile_for,
)

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


@given(st.integers(1, 10_000))
def test_power_of_two(number: int) -> None:
    found = power_of_two(number)
    assert found & (found - 1) == 0 and number <= found < 2 * number


@given(
    st.integers(0, 5000), st.integers(0, 1 << 20), st.sampled_from([16, 64]), st.integers(1, 200)
)
def test_splits_are_powers_of_two_that_leave_four_tiles_each(
    programs: int, context: int, keys: int, processors: int
) -> None:
    splits = num_splits(programs, context, keys, processors)
    assert splits & (splits - 1) == 0 and 1 <= splits <= MAX_SPLITS
    if splits > 1:
        assert context >= splits * 4 * keys
        assert programs * splits <= max(2 * processors, splits)


def test_one_long_sequence_fills_the_device_and_a_full_batch_is_not_cut() -> None:
    assert num_splits(8, 32768, 64, 132) == MAX_SPLITS
    assert num_splits(512, 32768, 64, 132) == 1
    assert num_splits(1, 100, 64, 132) == 1


@given(
    st.sampled_from([DECODE, PREFILL]),
    st.sampled_from([2, 64, 80, 128, 256]),
    st.integers(1, 71),
    st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_a_default_tile_holds_a_whole_group(
    kind: str, head_dim: int, group: int, dtype: str
) -> None:
    tile = default_tile(Work(kind, head_dim, group, dtype, dtype))
    assert tile.rows >= max(16, group) and tile.rows & (tile.rows - 1) == 0
    assert tile.keys >= 16 and tile.keys & (tile.keys - 1) == 0


def test_a_table_that_was_written_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, tile = Work(DECODE, 128, 8, "bfloat16", "bfloat16"), Tile(32, 128, 8, 1)
    assert tile != default_tile(work)
    document = table_json("sm_90", "a device", "a command", {work.key(): tile})
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "sm_90.json").write_text(json.dumps(document))
    monkeypatch.setattr(tuning, "files", lambda package: tmp_path)
    tuning.tuned.cache_clear()
    try:
        assert tile_for(work, "sm_90") == tile
        assert tile_for(Work(PREFILL, 128, 8, "bfloat16", "bfloat16"), "sm_90") != tile
        assert tile_for(work, "sm_80") == tile_for(work, None) == default_tile(work)
    finally:
        tuning.tuned.cache_clear()


def test_load_widths_are_read_out_of_the_code() -> None:
    assert ptx_load_bits("ld.global.v4.b32 {%r1}, [%rd1];\nld.global.b16 %rs1, [%rd2];") == 128
    assert ptx_load_bits("@%p1 ld.global.L1::evict_last.v2.b64 {%r1}, [%rd1];") == 128
    assert ptx_load_bits("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;") == 128
    assert ptx_load_bits("cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x4, %r2;") == 32
    assert ptx_load_bits("ld.shared.v4.b32 {%r1}, [%r2];") == 0
    assert amd_load_bits("global_load_dwordx4 v[0:3], v[4:5], off") == 128
    assert amd_load_bits("buffer_load_ushort v0, v1, s[0:3], 0 offen") == 16
    assert amd_load_bits("global_load_dword v0, v[1:2], off\nglobal_load_ubyte v0") == 32


def test_a_report_without_registers_is_no_report() -> None:
    with pytest.raises(UnreadableReport):
        nvidia_resources("nothing", "nothing", "", 0)
    usage = " Function attend:\n  REG:168 STACK:16 SHARED:0 LOCAL:0"
    verbose = "ptxas info : 16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads"
    found = nvidia_resources(usage, verbose, "", 2048)
    assert (found.registers, found.spill_bytes, found.shared_bytes) == (168, 24, 2048)


@pytest.mark.parametrize("num_seqs", [1, 3, 40])
@pytest.mark.parametrize("context", [16, 4000, 100_000])
def test_chunks_of_prompts_need_two_kernels_at_most(num_seqs: int, context: int) -> None:
    work = Work(PREFILL, 128, 8, "bfloat16", "bfloat16")
    for num_tokens in (num_seqs + 1, 64 * num_seqs, 4096):
        found = plan(work, default_tile(work), num_tokens, num_seqs, 8, context, 132)
        assert found.splits in (1, PREFILL_SPLITS)


def test_what_differs_from_step_to_step_is_not_compiled_in() -> None:
    from kvferry.kernels.triton.attention_kernels import attend

    assert {"num_seqs", "table_stride"} <= set(attend.do_not_specialize)
