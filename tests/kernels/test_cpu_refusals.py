"""What the compiled kernels refuse, by name, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.families import compiled


@pytest.fixture
def cpu() -> Any:
    return compiled()


def given_to_attention(**changes: Any) -> dict[str, Any]:
    """Two sequences, of 5 and 9 positions in blocks of 4, with 2 and 1 queries."""
    return {
        "q": torch.ones(3, 4, 8),
        "pool": torch.ones(6, 2, 2, 2, 4, 8),
        "layer": 1,
        "block_tables": torch.tensor([[0, 1, -1], [2, 3, 4]], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 2, 3], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 9], dtype=torch.int32),
        "softmax_scale": 1.0,
        **changes,
    }


ATTENTION: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.ones(3, 4, 8, dtype=torch.float64)}, r"q is torch.float64, wanted torch.float32"),
    ({"q": torch.ones(3, 4, 8, device="meta")}, r"q is on meta, wanted on the CPU"),
    ({"q": torch.ones(3, 8)}, r"q is of shape \[3, 8\]"),
    ({"q": torch.ones(3, 3, 8)}, r"q is of 3 heads, wanted a multiple of the pool's 2"),
    ({"q": torch.ones(3, 8, 4).transpose(1, 2)}, r"q is of strides .* wanted 1 as the last"),
    ({"q": torch.ones(3, 4, 16)}, r"pool is of shape .* wanted \[.*, 16\]"),
    ({"q": torch.ones(4, 4, 8)}, r"cu_seqlens_q is 0 .. 3, wanted 0 .. 4"),
    ({"pool": torch.ones(6, 2, 2, 2, 4, 8, dtype=torch.int16)}, r"pool is torch.int16"),
    ({"pool": torch.ones(6, 2, 2, 2, 4, 8, dtype=torch.int8)}, r"strides .* at least 48 .* scales"),
    ({"pool": torch.ones(6, 2, 2, 2, 8, 4).transpose(4, 5)}, r"pool is of strides"),
    ({"pool": torch.ones(6, 2, 2, 2, 4, 8, device="meta")}, r"pool is on meta"),
    ({"pool": torch.ones(6, 2, 3, 2, 4, 8)}, r"pool is of shape"),
    ({"layer": 2}, r"layer is 2, wanted 0 to 1"),
    ({"layer": -1}, r"layer is -1"),
    ({"block_tables": torch.tensor([[0, 6, 0], [2, 3, 4]])}, r"block_tables\[0, 1\] is 6, wanted"),
    ({"block_tables": torch.tensor([[0, 1, 0], [2, 3, -7]])}, r"block_tables\[1, 2\] is -7"),
    ({"block_tables": torch.tensor([[0, 1], [2, 3]])}, r"seq_lens\[1\] is 9, wanted 1, .*, to 8"),
    ({"block_tables": torch.tensor([[0, 1, 2]])}, r"block_tables is of 1 rows, wanted 2"),
    ({"block_tables": torch.ones(2, 3)}, r"block_tables is torch.float32"),
    ({"cu_seqlens_q": torch.tensor([0, 3])}, r"cu_seqlens_q is of 2 numbers, wanted 3"),
    ({"cu_seqlens_q": torch.tensor([0, 4, 3])}, r"cu_seqlens_q\[2\] is below"),
    ({"cu_seqlens_q": torch.tensor([1, 2, 3])}, r"cu_seqlens_q is 1 .. 3"),
    ({"seq_lens": torch.tensor([1, 9])}, r"seq_lens\[0\] is 1, wanted 2, its queries"),
    ({"window": 0}, r"window is 0, wanted at least 1"),
    ({"soft_cap": 0.0}, r"soft_cap is 0.0, wanted above 0"),
]


@pytest.mark.parametrize(("changes", "message"), ATTENTION)
def test_attention_refuses(cpu: Any, changes: dict[str, Any], message: str) -> None:
    assert cpu.paged_attention(**given_to_attention()).isfinite().all()
    with pytest.raises(cpu.InvalidKernelArgument, match=message):
        cpu.paged_attention(**given_to_attention(**changes))


def given_to_store(**changes: Any) -> dict[str, Any]:
    return {
        "qk": torch.ones(2, 5, 8),
        "v": torch.ones(2, 2, 8),
        "cos": torch.ones(2, 1, 8),
        "sin": torch.ones(2, 1, 8),
        "pool": torch.full((3, 2, 2, 2, 4, 8), 7.0),
        "layer": 0,
        "slot_mapping": torch.tensor([3, 8]),
        **changes,
    }


STORE: list[tuple[dict[str, Any], str]] = [
    ({"qk": torch.ones(2, 5, 8).bfloat16()}, "q and k is torch.bfloat16, wanted torch.float32"),
    ({"qk": torch.ones(3, 5, 8)}, r"q and k is of shape \[3, 5, 8\], wanted \[2, 5, 8\]"),
    ({"qk": torch.ones(2, 1, 8)}, "q and k is of 1 heads, wanted at least 2"),
    ({"v": torch.ones(2, 3, 8)}, "pool is of 2 heads, wanted 3"),
    ({"v": torch.ones(2, 2, 8, dtype=torch.int32)}, "v is torch.int32"),
    ({"cos": torch.ones(2, 8)}, "cos is of shape"),
    ({"sin": torch.ones(2, 1, 8).bfloat16()}, "sin is torch.bfloat16"),
    ({"slot_mapping": torch.tensor([3])}, "slot_mapping is of 1 slots, wanted 2"),
    ({"slot_mapping": torch.tensor([3, 12])}, r"slot_mapping\[1\] is 12, wanted 0 to 11"),
    ({"slot_mapping": torch.tensor([3, -1])}, r"slot_mapping\[1\] is -1"),
    ({"slot_mapping": torch.tensor([3.0, 1.0])}, "slot_mapping is torch.float32"),
]


@pytest.mark.parametrize(("changes", "message"), STORE)
def test_writing_refuses_and_writes_nothing(
    cpu: Any, changes: dict[str, Any], message: str
) -> None:
    arguments = given_to_store(**changes)
    with pytest.raises(cpu.InvalidKernelArgument, match=message):
        cpu.rope_write_kv(**arguments)
    assert bool((arguments["pool"] == 7.0).all())


OTHERS: list[tuple[Callable[[Any], object], str]] = [
    (lambda cpu: cpu.rms_norm(torch.ones(2, 8), torch.ones(7), 1e-5), "weight is of shape"),
    (lambda cpu: cpu.rms_norm(torch.ones(8), torch.ones(8), 1e-5), "x is of shape"),
    (lambda cpu: cpu.rms_norm(torch.ones(2, 8).half(), torch.ones(8), 1e-5), "x is torch.float16"),
    (
        lambda cpu: cpu.add_rms_norm(torch.ones(2, 8), torch.ones(3, 8), torch.ones(8), 1e-5),
        "residual is of shape",
    ),
    (
        lambda cpu: cpu.add_rms_norm(torch.ones(2, 8), torch.ones(8, 2).t(), torch.ones(8), 1e-5),
        "residual is of strides",
    ),
    (lambda cpu: cpu.silu_mul(torch.ones(2, 7)), "gate_up is of shape"),
    (lambda cpu: cpu.rope(torch.ones(1, 1, 5), *2 * (torch.ones(1, 1, 5),)), "head_dim is 5"),
    (
        lambda cpu: cpu.rope_tables(torch.ones(2), torch.ones(4), 1.0, torch.float32),
        "positions is torch.float32",
    ),
    (
        lambda cpu: cpu.rope_tables(torch.arange(2), torch.ones(4), 1.0, torch.float16),
        "dtype is torch.float16",
    ),
]


@pytest.mark.parametrize(("call", "message"), OTHERS)
def test_others_refuse(cpu: Any, call: Callable[[Any], object], message: str) -> None:
    with pytest.raises(cpu.InvalidKernelArgument, match=message):
        call(cpu)


@pytest.mark.parametrize("pairs", [[(0, 3)], [(-1, 1)], [(1, 0), (0, 5)], [(2, 1), (1, -1)]])
def test_block_ids_out_of_the_pool_are_refused(cpu: Any, pairs: list[tuple[int, int]]) -> None:
    pool = torch.randn(3, 1, 2, 1, 2, 2)
    before = pool.clone()
    with pytest.raises(cpu.InvalidKernelArgument, match="block id"):
        cpu.copy_blocks(pool, pairs)
    assert torch.equal(pool, before)


def test_blocks_of_a_pool_that_is_no_whole_are_refused(cpu: Any) -> None:
    pool = torch.randn(3, 2, 2, 1, 2, 2)[:, :1]
    with pytest.raises(cpu.InvalidKernelArgument, match="pool is of strides"):
        cpu.copy_blocks(pool, [(0, 1)])
    with pytest.raises(cpu.InvalidKernelArgument, match="out is of shape"):
        cpu.gather_blocks(torch.randn(3, 4), torch.tensor([0, 1]), torch.empty(1, 4))


def test_an_unknown_instruction_set_is_refused_with_those_there_are(cpu: Any) -> None:
    before = cpu.isa()
    with pytest.raises(cpu.UnknownIsa, match=f"'mmx', wanted one of .*{before}"):
        cpu.select_isa("mmx")
    assert cpu.isa() == before
    assert cpu.select_isa(None) == cpu.isas()[0]
    cpu.select_isa(before)


def test_wrong_numbers_of_arguments_are_errors_not_reads(cpu: Any) -> None:
    native = cpu.extension.native
    for name in ("rms_norm", "silu_mul", "rope_tables", "rope", "move_blocks", "paged_attention"):
        for count in (0, 3, 60):
            with pytest.raises(TypeError):
                getattr(native, name)(*[1] * count)
        with pytest.raises(TypeError):
            getattr(native, name)(*["1"] * 3)


def recorded(cpu: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, tuple[Any, ...]], Any]:
    """The arguments that each kernel was called with, by its native name, and what must live."""
    native = cpu.extension.native
    seen: dict[str, tuple[Any, ...]] = {}

    def recording(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            seen[name] = arguments
            return getattr(native, name)(*arguments)

        return call

    layers = ("rms_norm", "silu_mul", "rope_tables", "rope", "pack_linear", "linear")
    names = (*layers, "move_blocks", "paged_attention")
    recorder = SimpleNamespace(**{name: recording(name) for name in names})
    linear_module = import_module("kvferry.kernels.cpu.linear")  # cpu.linear is its function
    for module in (cpu.attention, cpu.cache, cpu.layers, linear_module):
        monkeypatch.setattr(module, "native", recorder)
    attention, store = given_to_attention(), given_to_store()
    ids, blocks = torch.tensor([0, 1]), torch.empty(2, *store["pool"].shape[1:])
    inputs = torch.ones(4, 8), torch.ones(8), torch.arange(4), torch.ones(4)
    packed = cpu.PackedLinear(inputs[0])
    alive = [
        packed,
        packed(inputs[0]),
        cpu.paged_attention(**attention),
        cpu.rope_write_kv(**store),
        cpu.gather_blocks(store["pool"], ids, blocks),
        cpu.rms_norm(inputs[0], inputs[1], 1e-5),
        cpu.silu_mul(inputs[0]),
        cpu.rope_tables(inputs[2], inputs[3], 1.0, torch.float32),
    ]
    assert set(seen) == set(names)
    return seen, [alive, attention, store, ids, blocks, inputs]
