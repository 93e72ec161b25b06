"""Attention of the Triton family on a GPU: its inputs, its times, and the best of its tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from triton.errors import TritonError

from benchmarks.gpu.timing import Timer
from benchmarks.gpu.work import (
    BLOCK_SIZE,
    DECODES,
    PREFILLS,
    AttentionShape,
    Roofs,
    Row,
    best,
    decode_row,
    prefill_row,
)
from kvferry.engine.model_runner import POOL_DTYPES, pool_tensor
from kvferry.kernels import triton as kernels
from kvferry.kernels.reference.scaled import has_scales, row_scales
from kvferry.kernels.triton.tuning import DECODE, PREFILL, Tile, Work, default_tile, power_of_two
from kvferry.kv_cache.layout import KVCacheLayout, KVGroup


@dataclass(frozen=True, slots=True)
class Inputs:
    """What ``paged_attention`` takes, on the device."""

    q: torch.Tensor
    pool: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor

    def attend(self, tile: Tile | None = None, splits: int | None = None) -> torch.Tensor:
        """One call."""
        return kernels.paged_attention(
            self.q,
            self.pool,
            0,
            self.block_tables,
            self.cu_seqlens_q,
            self.seq_lens,
            self.q.shape[2] ** -0.5,
            tile=tile,
            splits=splits,
        )


def make_inputs(shape: AttentionShape, device: str = "cuda") -> Inputs:
    """Random numbers; every sequence has blocks of its own, in no order."""
    torch.manual_seed(0)
    per_sequence = -(-shape.context // BLOCK_SIZE)
    num_blocks = shape.batch * per_sequence
    scales = "float32" if has_scales(POOL_DTYPES[shape.kv_dtype]) else ""
    group = KVGroup(0, 1, shape.kv_heads, shape.head_dim, shape.kv_dtype, scales=scales)
    layout = KVCacheLayout(BLOCK_SIZE, (group,))
    memory = torch.zeros(num_blocks * layout.block_bytes(), dtype=torch.uint8, device=device)
    pool = pool_tensor(memory, layout, num_blocks)
    if scales:
        elements = torch.randint(-100, 100, pool.shape, dtype=torch.int8, device=device)
        elements[elements & 0x7F == 0x7F] = 0  # a NaN of float8
        pool.view(torch.int8).copy_(elements)
        row_scales(pool).fill_(0.01)
    else:
        pool.copy_(torch.randn(pool.shape, device=device))
    num_tokens, num_heads = shape.batch * shape.query_len, shape.kv_heads * shape.group
    ids = torch.randperm(num_blocks, device=device).to(torch.int32)
    return Inputs(
        torch.randn(num_tokens, num_heads, shape.head_dim, device=device).to(
            getattr(torch, shape.dtype)
        ),
        pool,
        ids.view(shape.batch, per_sequence),
        torch.arange(0, num_tokens + 1, shape.query_len, dtype=torch.int32, device=device),
        torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device),
    )


def measured(timer: Timer, found: Roofs) -> Iterator[Row]:
    """Every shape."""
    for shape in (*DECODES, *PREFILLS):
        inputs = make_inputs(shape)
        took_s = timer(inputs.attend)
        if shape.query_len == 1:
            yield decode_row(shape, inputs.pool.itemsize, took_s, found.copy_rate)
        else:
            yield prefill_row(shape, took_s, found.matrix_rate)


def candidates(work: Work) -> Iterator[Tile]:
    """Tiles worth a try, the rules' among them: a dozen or two, for each is compiled."""
    least = max(16, power_of_two(work.group))
    rows = (least,) if work.kind == DECODE else (max(least, 64), max(least, 128))
    tiles = {default_tile(work)}
    for num_rows in rows:
        for keys in (32, 64, 128):
            for num_warps in (4, 8):
                for num_stages in (2, 3):
                    tiles.add(Tile(num_rows, keys, num_warps, num_stages))
    yield from sorted(tiles, key=str)


def work_of(shape: AttentionShape) -> Work:
    """What a shape's tile is looked up by."""
    kind = DECODE if shape.query_len == 1 else PREFILL
    return Work(kind, shape.head_dim, shape.group, shape.dtype, shape.kv_dtype)


def tuned_tiles(timer: Timer) -> Iterator[tuple[str, Tile]]:
    """The best tile for each kind of work that the shapes have, by its key."""
    done: set[str] = set()
    for shape in (*DECODES, *PREFILLS):
        work = work_of(shape)
        if work.key() in done:
            continue
        done.add(work.key())
        inputs = make_inputs(_smaller(shape))
        tiles = {str(tile): tile for tile in candidates(work)}
        chosen = best(list(tiles), lambda name: _time(timer, inputs, tiles[name]))  # noqa: B023
        if chosen is not None:
            yield work.key(), tiles[chosen]


def _time(timer: Timer, inputs: Inputs, tile: Tile) -> float | None:
    """None where it cannot be compiled, or the device has not the resources."""
    try:
        return timer(lambda: inputs.attend(tile))
    except (TritonError, RuntimeError):
        return None


def _smaller(shape: AttentionShape) -> AttentionShape:
    """A shape on which a tile's time is its compilation."""
    if shape.query_len == 1:
        return shape
    return replace(shape, batch=1, query_len=min(2048, shape.query_len), context=2048)
