"""The kernels as they are launched, as data: what is compiled ahead of time, and how.

A variant is a kernel with its types, constants and launch options, made by the same rules that the
launches follow. Strides and sizes that real models make multiples of 16 are said to be such, as
they are found to be at a launch; without that, loads stay narrow. Knows no device, and compiles
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvferry.kernels.triton.arguments import FP8, INT8, PLAIN
from kvferry.kernels.triton.attention_kernels import attend, reduce_splits
from kvferry.kernels.triton.cache import COPY_LANES
from kvferry.kernels.triton.cache_kernels import move_blocks, rope_and_store
from kvferry.kernels.triton.languages import TRITON_DTYPES
from kvferry.kernels.triton.layer_kernels import rms_norm_rows, silu_mul_rows
from kvferry.kernels.triton.layers import SILU_LANES, norm_warps
from kvferry.kernels.triton.tuning import DECODE, PREFILL, Work, power_of_two, tile_for

_ELEMENTS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_STORED = {**_ELEMENTS, "int8": "i8", "float8_e4m3fn": "i8"}
_FORMATS = {"int8": INT8, "float8_e4m3fn": FP8}
_NARROW_STRIDES = {"scales_block_stride", "scales_plane_stride", "scales_head_stride"}
"""Only of scales: a run of 1024 + 64 bytes is 272 of them, of 1024 rows of 96 bytes 24,832."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel as it is launched.

    Attributes:
        name: what it is, in words of a table.
        kernel: the function.
        types: of every argument, in order; constants are ``constexpr``.
        constants: their values.
        wide: arguments that are multiples of 16.
        num_warps, num_stages: launch options.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    wide: frozenset[str]
    num_warps: int
    num_stages: int = 3


@dataclass(slots=True)
class _Arguments:
    """Collects a kernel's types."""

    pointers: Mapping[str, str]
    scalars: Mapping[str, str]
    constants: Mapping[str, Any]
    narrow: frozenset[str] = field(default_factory=frozenset)

    def variant(self, name: str, kernel: Any, num_warps: int, num_stages: int = 3) -> Variant:
        types = {}
        for argument in kernel.arg_names:
            if argument in self.constants:
                types[argument] = "constexpr"
            elif argument in self.pointers:
                types[argument] = f"*{self.pointers[argument]}"
            else:
                types[argument] = self.scalars.get(argument, "i32")
        wide = {
            argument
            for argument, kind in types.items()
            if argument not in self.narrow and (kind.startswith("*") or kind in ("i32", "i64"))
        }
        return Variant(name, kernel, types, self.constants, frozenset(wide), num_warps, num_stages)


def attention(
    work: Work,
    architecture: str | None,
    splits: int = 1,
    window: bool = False,
    cap: bool = False,
) -> Variant:
    """``attend`` for a kind of work, with the tile that an architecture gets."""
    tile = tile_for(work, architecture)
    stored = _STORED[work.kv_dtype]
    pool_format = _FORMATS.get(work.kv_dtype, PLAIN)
    arguments = _Arguments(
        pointers={
            "out": _ELEMENTS[work.dtype],
            "partial": "fp32",
            "partial_max": "fp32",
            "partial_sum": "fp32",
            "q": _ELEMENTS[work.dtype],
            "pool": stored,
            "scales": stored if pool_format == PLAIN else "fp32",
            "block_tables": "i32",
            "cu_seqlens_q": "i32",
            "seq_lens": "i32",
        },
        scalars={"scale": "fp32", "soft_cap": "fp32"},
        constants={
            "GROUP": work.group,
            "HEAD_DIM": work.head_dim,
            "PADDED_DIM": max(16, power_of_two(work.head_dim)),
            "ROWS": tile.rows,
            "KEYS": tile.keys,
            "SPLITS": splits,
            "FORMAT": pool_format,
            "HAS_WINDOW": window,
            "HAS_CAP": cap,
            "COMPUTE": TRITON_DTYPES[getattr(torch, work.dtype)],
            "PRECISION": "ieee",
        },
        narrow=frozenset({"num_seqs", "window", "num_heads", "table_stride"} | _NARROW_STRIDES),
    )
    options = "".join(
        text
        for text, given in (
            (f", {splits} splits", splits > 1),
            (", window", window),
            (", cap", cap),
        )
        if given
    )
    name = (
        f"attend {work.kind}, {work.dtype} over {work.kv_dtype}, "
        f"group {work.group}, dim {work.head_dim}{options}"
    )
    return arguments.variant(name, attend, tile.num_warps, tile.num_stages)


def reduction(dtype: str, head_dim: int, splits: int) -> Variant:
    """``reduce_splits``."""
    arguments = _Arguments(
        pointers={
            "out": _ELEMENTS[dtype],
            "partial": "fp32",
            "partial_max": "fp32",
            "partial_sum": "fp32",
        },
        scalars={},
        constants={
            "HEAD_DIM": head_dim,
            "PADDED_DIM": max(16, power_of_two(head_dim)),
            "SPLITS": splits,
        },
    )
    name = f"reduce_splits, {dtype}, dim {head_dim}, {splits} splits"
    return arguments.variant(name, reduce_splits, 4 if head_dim > 64 else 2)


def rope_store(dtype: str, kv_dtype: str, head_dim: int) -> Variant:
    """``rope_and_store`` as a step launches it."""
    stored = _STORED[kv_dtype]
    pool_format = _FORMATS.get(kv_dtype, PLAIN)
    element = _ELEMENTS[dtype]
    arguments = _Arguments(
        pointers={
            **dict.fromkeys(("out", "qk", "v", "cos", "sin"), element),
            "pool": stored,
            "scales": stored if pool_format == PLAIN else "fp32",
            "slot_mapping": "i64",
        },
        scalars={},
        constants={
            "HEAD_DIM": head_dim,
            "PADDED": power_of_two(head_dim),
            "FORMAT": pool_format,
            "TURNS": True,
            "STORES": True,
        },
        narrow=frozenset({"num_heads", "num_kv_heads"} | _NARROW_STRIDES),
    )
    name = f"rope_and_store, {dtype} into {kv_dtype}, dim {head_dim}"
    return arguments.variant(name, rope_and_store, 1)


def norm(dtype: str, size: int, add: bool) -> Variant:
    """``rms_norm_rows``."""
    element = _ELEMENTS[dtype]
    padded = power_of_two(size)
    arguments = _Arguments(
        pointers=dict.fromkeys(("out", "x", "residual", "weight"), element),
        scalars={"eps": "fp32"},
        constants={"SIZE": size, "PADDED": padded, "ADD": add},
        narrow=frozenset({"inner"}),
    )
    name = f"{'add_' if add else ''}rms_norm, {dtype}, size {size}"
    return arguments.variant(name, rms_norm_rows, norm_warps(padded))


def silu(dtype: str, size: int) -> Variant:
    """``silu_mul_rows``."""
    arguments = _Arguments(
        pointers=dict.fromkeys(("out", "gate_up"), _ELEMENTS[dtype]),
        scalars={},
        constants={"SIZE": size, "LANES": min(SILU_LANES, power_of_two(size))},
    )
    return arguments.variant(f"silu_mul, {dtype}, size {size}", silu_mul_rows, 4)


def moved_blocks(has_target_ids: bool, has_source_ids: bool) -> Variant:
    """``move_blocks`` of words of 8 bytes."""
    arguments = _Arguments(
        pointers={"target": "i64", "source": "i64", "target_ids": "i64", "source_ids": "i64"},
        scalars={},
        constants={
            "HAS_TARGET_IDS": has_target_ids,
            "HAS_SOURCE_IDS": has_source_ids,
            "LANES": COPY_LANES,
        },
    )
    kind = {(True, True): "copy", (False, True): "gather", (True, False): "scatter"}
    return arguments.variant(f"{kind[has_target_ids, has_source_ids]}_blocks", move_blocks, 4)


def few(architecture: str | None) -> Iterator[Variant]:
    """At most twelve that stand for all: every kernel, every format, both kinds of work."""
    bf16 = "bfloat16"
    yield attention(Work(DECODE, 128, 8, bf16, bf16), architecture, splits=8)
    yield attention(Work(PREFILL, 128, 8, bf16, bf16), architecture)
    yield attention(Work(DECODE, 64, 3, bf16, "float8_e4m3fn"), architecture, splits=4)
    yield attention(Work(PREFILL, 64, 3, bf16, "int8"), architecture, window=True, cap=True)
    yield attention(Work(PREFILL, 64, 3, "float32", "float32"), architecture)
    yield reduction(bf16, 128, 8)
    yield rope_store(bf16, bf16, 128)
    yield rope_store(bf16, "float8_e4m3fn", 64)
    yield norm(bf16, 4096, add=True)
    yield silu(bf16, 14336)
    yield moved_blocks(True, True)


def many(architecture: str | None) -> Iterator[Variant]:
    """Every kind: types, heads and options as models have them."""
    shapes = ((64, 3), (64, 8), (80, 1), (96, 1), (128, 1), (128, 4), (128, 8), (256, 4))
    for head_dim, group in shapes:
        for dtype in ("bfloat16", "float16", "float32"):
            for kv_dtype in (dtype, "int8", "float8_e4m3fn"):
                work = Work(DECODE, head_dim, group, dtype, kv_dtype)
                yield attention(work, architecture)
                yield attention(work, architecture, splits=16)
                yield attention(Work(PREFILL, head_dim, group, dtype, kv_dtype), architecture)
    for kind in (DECODE, PREFILL):
        work = Work(kind, 128, 4, "bfloat16", "bfloat16")
        yield attention(work, architecture, window=True)
        yield attention(work, architecture, cap=True)
        yield attention(work, architecture, window=True, cap=True)
    for dtype in ("bfloat16", "float16", "float32"):
        for head_dim in (64, 96, 128, 256):
            yield reduction(dtype, head_dim, 32)
            for kv_dtype in (dtype, "int8", "float8_e4m3fn"):
                yield rope_store(dtype, kv_dtype, head_dim)
        for size in (576, 4096, 8192):
            yield norm(dtype, size, add=False)
            yield norm(dtype, size, add=True)
        yield silu(dtype, 1536)
        yield silu(dtype, 14336)
    yield moved_blocks(True, True)
    yield moved_blocks(False, True)
    yield moved_blocks(True, False)
