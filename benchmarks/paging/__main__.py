"""``make paging``: the table and the plot. Exit codes are those of ``kvferry``."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.paging.formula import Geometry, exact_fit, fit
from benchmarks.paging.lengths import Distribution, lognormal, traces
from benchmarks.paging.measure import measure
from benchmarks.paging.plot import Series, draw
from kvferry.cluster.cli.command import Result
from kvferry.cluster.cli.flags import WIDTH, positive
from kvferry.cluster.reports.common import Json, common_fields
from kvferry.kv_cache.errors import KVFerryError

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
MIB = 1 << 20


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments; the geometry is that of the default model in float32 unless given."""
    parser = argparse.ArgumentParser(prog="make paging", description=__doc__)
    parser.add_argument("--memory-mib", type=positive, default=2048, help="KV memory")
    parser.add_argument("--requests", type=positive, default=300, help="of each distribution")
    parser.add_argument("--block-sizes", type=positive, nargs="+", default=list(BLOCK_SIZES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=positive, default=30)
    parser.add_argument("--kv-heads", type=positive, default=3)
    parser.add_argument("--head-dim", type=positive, default=64)
    parser.add_argument("--element-bytes", type=positive, default=4)
    folder = os.environ.get("KVFERRY_WORKLOADS")
    parser.add_argument(
        "--workloads",
        type=Path,
        default=Path(folder) if folder else None,
        help="folder of public traces (KVFERRY_WORKLOADS)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the plot as SVG")
    parser.add_argument("--json", action="store_true", help="print the document instead")
    args = parser.parse_args(arguments)
    args.given = list(arguments)
    return args


def rows(distribution: Distribution, memory_tokens: int, sizes: Sequence[int]) -> Iterator[Json]:
    """Contiguous reservation first, then each block size."""
    requests = distribution.requests
    for block_size in (distribution.max_len, *sizes):
        if memory_tokens < block_size:
            continue
        formula = fit(requests, memory_tokens, block_size)
        real = measure(requests, memory_tokens, block_size)
        yield {
            "block_size": block_size,
            "contiguous": block_size == distribution.max_len,
            "formula": {
                "requests": formula.num_requests,
                "wasted_tokens": formula.wasted_tokens,
            },
            "measured": {
                "requests": real.num_requests,
                "most_requests": real.most_requests,
                "wasted_tokens": real.wasted_tokens,
                "used": real.used,
                "steps": real.num_steps,
                "preemptions": real.num_preemptions,
            },
        }


def document(args: argparse.Namespace) -> Json:
    """Everything that was set, computed and measured."""
    geometry = Geometry(args.layers, args.kv_heads, args.head_dim, args.element_bytes)
    memory_tokens = args.memory_mib * MIB // geometry.kv_bytes(1)
    distributions = [lognormal(args.requests, args.seed)]
    if args.workloads is not None:
        distributions += traces(args.workloads, args.requests, memory_tokens)
    found = []
    for distribution in distributions:
        say(f"{distribution.name}: {len(distribution.requests)} requests ...")
        requests = distribution.requests
        exact = exact_fit(requests, memory_tokens)
        found.append(
            {
                "name": distribution.name,
                "requests": len(requests),
                "left_out": distribution.num_left_out,
                "mean_input": sum(r.num_input for r in requests) / len(requests),
                "mean_output": sum(r.num_output for r in requests) / len(requests),
                "max_len": distribution.max_len,
                "known_lengths": {
                    "requests": exact.num_requests,
                    "wasted_tokens": exact.wasted_tokens,
                },
                "rows": list(rows(distribution, memory_tokens, args.block_sizes)),
            }
        )
    return {
        **common_fields("paging", [], datetime.now(UTC)),
        "command": f"make paging ARGS={shlex.quote(shlex.join(args.given))}",
        "memory_bytes": args.memory_mib * MIB,
        "token_bytes": geometry.kv_bytes(1),
        "memory_tokens": memory_tokens,
        "seed": args.seed,
        "distributions": found,
    }


def show(found: Json, console: Console) -> None:
    """A table for each distribution."""
    mib = found["memory_bytes"] // MIB
    console.print(
        f"{mib} MiB of KV: {found['memory_tokens']} tokens of {found['token_bytes']} bytes"
    )
    for one in found["distributions"]:
        console.print(
            f"\n{one['name']}: {one['requests']} requests, {one['mean_input']:.0f} tokens in and "
            f"{one['mean_output']:.0f} out on average, {one['left_out']} left out as too long"
        )
        table = Table("reserved in", *_HEADERS)
        known = one["known_lengths"]
        for row in one["rows"]:
            formula, real, size = row["formula"], row["measured"], row["block_size"]
            kind = f"max. length, {size}" if row["contiguous"] else f"blocks of {size}"
            waste = real["wasted_tokens"]
            table.add_row(
                kind,
                f"{formula['requests']:.1f}",
                f"{real['requests']:.1f}",
                f"{formula['wasted_tokens']:.1f}",
                f"{waste:.1f}",
                f"{waste * found['token_bytes'] / MIB:.2f}",
                f"{real['used']:.0%}",
                str(real["preemptions"]),
            )
            if row["contiguous"]:
                fits, wasted = f"{known['requests']:.1f}", f"{known['wasted_tokens']:.1f}"
                table.add_row("own length, if known", fits, "", wasted)
        console.print(table)


_HEADERS = ("fit: formula", "measured", "waste: formula", "measured", "MiB", "used", "preempted")


def plot(found: Json) -> str:
    """How many times contiguous reservation each block size holds."""
    series = []
    for one in found["distributions"]:
        base = [row for row in one["rows"] if row["contiguous"]]
        paged = [row for row in one["rows"] if not row["contiguous"]]
        if not base:
            continue
        series.append(
            Series(
                one["name"],
                *(
                    {
                        row["block_size"]: row[kind]["requests"] / base[0][kind]["requests"]
                        for row in paged
                    }
                    for kind in ("formula", "measured")
                ),
            )
        )
    return draw(series, "Requests at once, as a multiple of contiguous reservation")


def say(message: str) -> None:
    """News, on standard error."""
    print(message, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, draw; the exit code."""
    args = parse(arguments)
    try:
        found = document(args)
    except (KVFerryError, KeyboardInterrupt) as error:
        say(f"paging: {str(error) or 'interrupted'}")
        return Result(error=error).exit_code
    if args.plot is not None:
        args.plot.write_text(plot(found), encoding="utf-8")
    if args.json:
        print(json.dumps(found, allow_nan=False))
    else:
        show(found, Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
