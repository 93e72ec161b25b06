"""``kvferry bench kernels``: every kernel of every family that loads, beside plain torch.

Says first what the machine allows (reading memory, multiplying matrices), in the same run. Does
not know how results are printed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvferry.cluster.bench.attention import attention_case
from kvferry.cluster.bench.families import Family, families
from kvferry.cluster.bench.layers import small_cases
from kvferry.cluster.bench.machine import Memory, gemm_rate, read_bandwidth, threads
from kvferry.cluster.bench.rows import Case, Shape, measure
from kvferry.cluster.reports.common import Json

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured, and for how long.

    Attributes:
        batch, context: of decode attention.
        query_len: of prefill attention, and tokens of a prompt for the small kernels.
        heads: (query heads, KV heads, head dimension) of each model shape.
        pool_bytes: of the KV pool, at least, so that no cache holds it.
        working_set_bytes: read to measure the memory.
        gemm_size: inputs and outputs of the measured product.
        budget_s: of one case and number of threads.
    """

    batch: int = 16
    context: int = 1024
    query_len: int = 512
    heads: tuple[tuple[int, int, int], ...] = ((9, 3, 64), (32, 8, 128))
    pool_bytes: int = 512 << 20
    working_set_bytes: int = 512 << 20
    gemm_size: int = 2048
    block_size: int = 16
    budget_s: float = 0.5


TINY = Sizes(2, 40, 24, ((4, 2, 8),), 1 << 16, 1 << 16, 32, 16, 0.0)
"""Seconds for all of it: for tests of everything but the figures."""


def bench_kernels(sizes: Sizes, say: Say, found: list[Family] | None = None) -> Json:
    """The fields of ``bench kernels``; ``found`` replaces the families that load here."""
    measured = families() if found is None else found
    counts = sorted({1, len(os.sched_getaffinity(0))})
    say("memory and matrix products")
    bandwidth, gemm = {}, {}
    for count in counts:
        with threads(count), torch.inference_mode():
            bandwidth[count] = read_bandwidth(sizes.working_set_bytes, 2 * sizes.budget_s)
            gemm[count] = gemm_rate(sizes.gemm_size, sizes.budget_s)
    rows = []
    memory = Memory(sizes.working_set_bytes)
    for case in _cases(sizes):
        say(f"{case.kernel} {case.shape.batch} x {case.shape.context or case.shape.query_len}")
        rows += measure(case, measured, counts, memory, sizes.budget_s)
        del case  # and its pool, before the next one is made
    return {
        "bandwidth": {
            "threads_1_bytes_per_s": bandwidth[1],
            "threads_all_bytes_per_s": bandwidth[counts[-1]],
            "working_set_bytes": sizes.working_set_bytes,
        },
        "gemm": {"threads_1_flops": gemm[1], "threads_all_flops": gemm[counts[-1]]},
        "rows": rows,
    }


def _cases(sizes: Sizes) -> Iterator[Case]:
    """One after the other, so that one pool at a time is there."""
    for q_heads, kv_heads, head_dim in sizes.heads:
        sides = (q_heads, kv_heads, head_dim, sizes.block_size)
        for kv_dtype in (torch.float32, torch.bfloat16):
            decode = Shape(sizes.batch, 1, sizes.context, *sides)
            yield attention_case(decode, torch.float32, kv_dtype, sizes.pool_bytes)
        for context in (sizes.query_len, sizes.context):
            prefill = Shape(1, sizes.query_len, context, *sides)
            yield attention_case(prefill, torch.float32, torch.float32, 0)
    for q_heads, kv_heads, head_dim in sizes.heads:
        hidden_size = q_heads * head_dim
        for num_tokens in (sizes.batch, sizes.query_len):
            yield from small_cases(
                num_tokens, hidden_size, 8 * hidden_size // 3, (q_heads, kv_heads, head_dim)
            )
