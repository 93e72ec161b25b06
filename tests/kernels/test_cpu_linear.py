"""Packed linears against float64, on every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.models.llama import Kernels
from kvferry.engine.models.loading import load_model
from kvferry.engine.tokenizer import Tokenizer
from kvferry.engine.weights.store import ModelFolder
from kvferry.kernels import reference
from tests.kernels.families import LINEAR_ISAS, compiled, isa_in_force
from tests.parity.measure import nll_per_token, paged_logits
from tests.parity.text import PARAGRAPH

GUARD = 7.0
ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
INT8_NLL_COST = 0.08  # nats per token on PARAGRAPH, measured 0.026 to 0.062, by instruction set

KINDS = ("float32", "bfloat16", "int8")
FLOATS = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module", params=LINEAR_ISAS)
def cpu(request: pytest.FixtureRequest) -> Iterator[Any]:
    with isa_in_force(request.param) as kernels:
        yield kernels


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def strided(tensor: torch.Tensor, gap: int) -> torch.Tensor:
    """The same numbers in rows that are ``gap`` further apart, with poison in between."""
    rows, size = tensor.shape
    wide = torch.full((rows, size + gap), torch.nan, dtype=tensor.dtype)
    wide[:, :size] = tensor
    return wide[:, :size]


def guarded(rows: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned tensor, and the memory around it, whose ends are guards."""
    memory = torch.full((rows * size + 128,), GUARD, dtype=dtype)
    inside = memory[64:-64].view(rows, size)
    inside.fill_(torch.nan)
    return inside, memory


def exact(
    weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64 what the kind of weight stands for, and the sum of the magnitudes in it."""
    wide = x.double()
    if kind == "int8":
        oracle = reference.QuantisedLinear(weight, None)
        rows = reference.QuantisedLinear(x, None)  # quantises rows likewise
        factors = rows.factors.double() * oracle.factors.double().T
        result = rows.weight.double() @ oracle.weight.double().T * factors
        magnitude = result.abs()  # sums of integers do not round
    else:
        held = (weight.bfloat16() if kind == "bfloat16" else weight).double()
        result = wide @ held.T
        magnitude = wide.abs() @ held.T.abs()
    if bias is not None:
        result, magnitude = result + bias.double(), magnitude + bias.double().abs()
    return result, magnitude


@given(
    st.integers(1, 40),
    st.integers(1, 100),
    st.integers(1, 200),
    st.sampled_from(KINDS),
    st.sampled_from(FLOATS),
    st.sampled_from(FLOATS),
    st.booleans(),
    st.integers(0, 3),
    st.integers(0, 1000),
)
def test_is_close_to_float64(
    cpu: Any,
    rows: int,
    outputs: int,
    inputs: int,
    kind: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    biased: bool,
    gap: int,
    seed: int,
) -> None:
    weight = strided(drawn(seed, outputs, inputs), gap)
    bias = drawn(seed + 1, outputs) if biased else None
    x = strided(drawn(seed + 2, rows, inputs).to(dtype), gap)
    out, memory = guarded(rows, outputs, out_dtype)
    assert cpu.PackedLinear(weight, bias, kind)(x, out_dtype, out) is out
    wanted, magnitude = exact(weight, bias, x, kind)
    # sums in order: the error grows with their root, four times which none of these exceeds
    allowed = 4 * max(4, inputs) ** 0.5 * ULP[torch.float32] * magnitude
    if out_dtype == torch.bfloat16:
        allowed += wanted.abs() * ULP[torch.bfloat16]
    assert ((out.double() - wanted).abs() <= allowed).all()
    assert (memory[:64] == GUARD).all() and (memory[-64:] == GUARD).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_gets_the_same_bits_alone_and_in_any_batch(
    cpu: Any, kind: str, dtype: torch.dtype
) -> None:
    linear = cpu.PackedLinear(drawn(1, 70, 601), None, kind)
    x = drawn(2, 1100, 601).to(dtype)
    together = linear(x)
    for begin, end in ((0, 1), (3, 11), (500, 530), (1099, 1100)):
        assert torch.equal(linear(x[begin:end]), together[begin:end])


@pytest.mark.parametrize("kind", KINDS)
def test_threads_do_not_change_the_bits(cpu: Any, kind: str) -> None:
    linear = cpu.PackedLinear(drawn(1, 4000, 300), drawn(2, 4000), kind)
    x, before = drawn(3, 40, 300), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(linear(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_what_bfloat16_holds_exactly_is_as_precise_as_float32(cpu: Any) -> None:
    weight, x = drawn(1, 64, 640).bfloat16(), drawn(2, 40, 640)
    wanted = x.double() @ weight.double().T
    held = cpu.linear(weight, None, "float32")
    assert held.kind == "bfloat16"
    error, full = (
        (linear(x).double() - wanted).abs().max()
        for linear in (held, cpu.PackedLinear(weight, None, "float32"))
    )
    assert error <= 1.5 * full


def test_int8_is_the_same_on_every_instruction_set() -> None:
    cpu = compiled()
    linear, x = cpu.PackedLinear(drawn(1, 65, 400), None, "int8"), drawn(2, 20, 400)
    found = []
    for isa in LINEAR_ISAS:
        with isa_in_force(isa):
            found.append(linear(x))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_a_number_stays_in_its_row(cpu: Any, kind: str, poison: float) -> None:
    linear, x = cpu.PackedLinear(drawn(1, 40, 50), None, kind), drawn(2, 9, 50)
    clean = linear(x)
    x[4, 17] = poison
    found = linear(x)
    assert not found[4].isfinite().any()
    keep = [row for row in range(9) if row != 4]
    assert torch.equal(found[keep], clean[keep])


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_give_the_bias(cpu: Any, kind: str) -> None:
    bias = drawn(1, 33)
    assert torch.equal(
        cpu.PackedLinear(torch.zeros(33, 5), bias, kind)(torch.zeros(3, 5)), bias.expand(3, 33)
    )
    assert cpu.PackedLinear(torch.ones(33, 5), None, kind)(torch.zeros(0, 5)).shape == (0, 33)


def test_weights_take_no_more_than_their_kind() -> None:
    cpu, weight = compiled(), drawn(1, 960, 576)
    for kind, width in zip(KINDS, (4, 2, 1), strict=True):
        held = sum(
            t.numel() * t.element_size() for t in cpu.PackedLinear(weight, None, kind).tensors()
        )
        assert held <= weight.numel() * width * 1.02


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.ones(3, 4, dtype=torch.float64)}, r"weight is torch.float64, wanted"),
        ({"weight": torch.ones(12)}, r"weight is of shape \[12\], wanted \[out, in\]"),
        ({"weight": torch.ones(0, 4)}, r"weight is of shape \[0, 4\]"),
        ({"weight": torch.ones(4, 3).T}, r"weight is of strides \(1, 3\), wanted 1 as the last"),
        ({"weight": torch.ones(3, 4, device="meta")}, r"weight is on meta, wanted on the CPU"),
        ({"kind": "int4"}, r"kind is 'int4', wanted float32, bfloat16, int8"),
        ({"bias": torch.ones(4)}, r"bias is of shape \[4\], wanted \[3\]"),
        (
            {"weight": torch.ones(1, 65537), "kind": "int8"},
            r"of 65537 inputs, wanted at most 65536",
        ),
        ({"x": torch.ones(2, 5)}, r"x is of shape \[2, 5\], wanted \[rows, 4\]"),
        ({"x": torch.ones(2, 4, dtype=torch.float16)}, r"x is torch.float16, wanted"),
        ({"x": torch.ones(4, 2).T}, r"x is of strides \(1, 2\), wanted 1 as the last"),
        ({"x": torch.ones(2, 4, device="meta")}, r"x is on meta"),
        ({"out_dtype": torch.float16}, r"out_dtype is torch.float16, wanted"),
        ({"out": torch.ones(2, 4)}, r"out is of shape \[2, 4\], wanted \[2, 3\]"),
        ({"out": torch.ones(3, 2).T}, r"out is of strides"),
    ],
)
def test_refusals_name_the_argument(changes: dict[str, Any], message: str) -> None:
    cpu = compiled()
    made = {"weight": torch.ones(3, 4), "bias": None, "kind": "float32"}
    given_then = {"x": torch.ones(2, 4), "out_dtype": None, "out": None}
    made |= {key: value for key, value in changes.items() if key in made}
    given_then |= {key: value for key, value in changes.items() if key in given_then}
    with pytest.raises(cpu.InvalidKernelArgument, match=message):
        cpu.PackedLinear(**made)(**given_then)


@pytest.mark.model
@pytest.mark.slow
def test_what_int8_costs_in_likelihood(
    default_model: ModelFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu: Kernels = compiled()
    ids = Tokenizer(default_model.path).encode(PARAGRAPH)
    full, int8 = (
        nll_per_token(paged_logits(load_model(default_model.path, dtype, cpu), ids, "float32"), ids)
        for dtype in ("float32", "int8")
    )
    with capsys.disabled():
        print(f"\nnats per token of {len(ids) - 1}: float32 {full:.4f}, int8 {int8:.4f}")
    assert abs(int8 - full) <= INT8_NLL_COST
