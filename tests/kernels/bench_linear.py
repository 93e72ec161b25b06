"""``python -m tests.kernels.bench_linear``: all linears of one step, packed beside ``F.linear``.

The shapes are SmolLM2-135M's: 30 layers and, up to 32 rows, the head. One thread, whose CPU time is
measured: a busy machine disturbs it least, and ways take turns. The least of the rounds counts. The
rate is bytes of weights over time, beside that of reading 512 MB in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from kvferry.kernels import cpu

LAYERS = 30
LAYER_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD_SHAPE = (49152, 576)
ROWS = (1, 8, 16, 32, 512)
HEAD_ROWS = 32
READ_BYTES = 512 << 20

Way = Callable[[torch.Tensor], torch.Tensor]


def ways(isas: list[str]) -> dict[str, tuple[str | None, torch.dtype, int, list[Way]]]:
    """By name: instruction set, activations, bytes per weight, the linears, the head last."""
    torch.manual_seed(0)
    shapes = [*LAYER_SHAPES * LAYERS, HEAD_SHAPE]
    weights = [torch.randn(shape) / shape[1] ** 0.5 for shape in shapes]
    narrow = [weight.bfloat16() for weight in weights]
    packed = {
        kind: [cpu.PackedLinear(weight, None, kind) for weight in weights]
        for kind in ("float32", "bfloat16", "int8")
    }
    found: dict[str, tuple[str | None, torch.dtype, int, list[Way]]] = {
        "F.linear float32": (None, torch.float32, 4, [_dense(weight) for weight in weights]),
        "F.linear bfloat16": (None, torch.bfloat16, 2, [_dense(weight) for weight in narrow]),
    }
    for isa in isas:
        for name, kind, dtype, width in (
            ("float32", "float32", torch.float32, 4),
            ("bfloat16, float32 rows", "bfloat16", torch.float32, 2),
            ("bfloat16", "bfloat16", torch.bfloat16, 2),
            ("int8", "int8", torch.float32, 1),
        ):
            found[f"{isa} {name}"] = (isa, dtype, width, list(packed[kind]))
    return found


def _dense(weight: torch.Tensor) -> Way:
    return lambda x: F.linear(x, weight)


def _seconds(act: Callable[[], object]) -> float:
    begin = time.thread_time()
    act()
    return time.thread_time() - begin


def _step(linears: list[Way], inputs: list[torch.Tensor]) -> None:
    for linear, x in zip(linears, inputs, strict=True):
        linear(x)


def measure(isas: list[str], rounds: int) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    sizes = [shape[1] for shape in (*LAYER_SHAPES * LAYERS, HEAD_SHAPE)]
    all_ways = ways(isas)
    ram = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    best: dict[tuple[str, int], float] = {}
    read = float("inf")
    for _ in range(rounds):
        read = min(read, _seconds(ram.sum))
        for rows in ROWS:
            x = {size: torch.randn(rows, size) for size in set(sizes)}
            for name, (isa, dtype, _, linears) in all_ways.items():
                if isa:
                    cpu.select_isa(isa)
                count = len(linears) - (rows > HEAD_ROWS)
                inputs = [x[size].to(dtype) for size in sizes[:count]]
                took = _seconds(lambda a=linears[:count], b=inputs: _step(a, b))  # type: ignore[misc]
                best[name, rows] = min(best.get((name, rows), float("inf")), took)
    cpu.select_isa(None)
    elements = sum(a * b for a, b in (*LAYER_SHAPES * LAYERS, HEAD_SHAPE))
    print(f"read: {READ_BYTES / read / 1e9:.1f} GB/s")
    columns = [f"{rows} rows" for rows in ROWS] + [f"GB/s at {rows}" for rows in (1, 8)]
    print(f"| ms per step | {' | '.join(columns)} |")
    print("|---|" + "---|" * len(columns))
    for name, (_, _, width, _) in all_ways.items():
        times = [f"{best[name, rows] * 1e3:.1f}" for rows in ROWS]
        rates = [f"{elements * width / best[name, rows] / 1e9:.1f}" for rows in (1, 8)]
        print(f"| {name} | {' | '.join(times + rates)} |")


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", nargs="*", default=list(cpu.isas()), help="default: all")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    measure(options.isa, options.rounds)


if __name__ == "__main__":
    main()
