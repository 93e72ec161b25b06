"""``kvferry bench``: measurements. ``serve`` measures a running cluster through its gRPC;
``kernels`` and ``engine`` measure in this process.
"""

from __future__ import annotations

import argparse
import asyncio

from rich.console import Console
from rich.table import Table

from kvferry.cluster.bench.served_roof import Arrangement, Reading
from kvferry.cluster.bench_serve import bench_json, bench_serve
from kvferry.cluster.cli import bench_local
from kvferry.cluster.cli.command import Command, Result
from kvferry.cluster.cli.document import Document
from kvferry.cluster.cli.flags import (
    add_endpoint,
    add_json,
    people,
    positive,
    security_of,
)
from kvferry.cluster.cli.progress import ProgressLine
from kvferry.cluster.closed_loop import Workload
from kvferry.cluster.reports.common import Json


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    serve = kinds.add_parser(
        "serve",
        help="closed loop of fixed lengths against a running cluster",
        description="Send random prompts of a fixed length, several at a time, and measure.",
    )
    add_endpoint(serve)
    for flag, default, text in (
        ("--input-tokens", 256, "prompt length"),
        ("--output-tokens", 64, "output length, exact"),
        ("--concurrency", 8, "requests in flight"),
        ("--num-requests", 32, "requests of one repeat"),
        ("--repeats", 1, "passes; results are those of the one of median throughput"),
    ):
        serve.add_argument(
            flag, metavar="N", type=positive, default=default, help=f"{text} (default: {default})"
        )
    serve.add_argument(
        "--seed", metavar="S", type=int, default=0, help="of the prompts (default: %(default)s)"
    )
    serve.add_argument(
        "--roof",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="beside a cluster on this machine's processors, measure what they allow, some seconds "
        "before and after each repeat (default: %(default)s)",
    )
    add_json(serve)
    serve.set_defaults(run=run_serve)
    bench_local.configure(kinds)


def run_serve(args: argparse.Namespace) -> Result:
    """Run the workload, with progress on standard error, and show the figures."""
    workload = Workload(
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        concurrency=args.concurrency,
        num_requests=args.num_requests,
        seed=args.seed,
    )
    security = security_of(args)
    with ProgressLine(quiet=args.json) as line:

        def progress(repeat: int, ended: int) -> None:
            name = f"repeat {repeat + 1} of {args.repeats}, {ended}/{args.num_requests} requests"
            line.stage(name, ended, args.num_requests)

        line.say("warming up")

        def measure(arrangement: Arrangement) -> Reading:
            line.say("memory and matrix products")
            return bench_local.load("machine").read_for(arrangement)  # type: ignore[no-any-return]

        bench = asyncio.run(
            bench_serve(
                args.endpoint,
                workload,
                args.repeats,
                progress,
                measure if args.roof else None,
                security=security,
            )
        )
    fields = bench_json(bench)
    if not args.json:
        _show(fields, people(args))
    return Result(fields=fields, error=bench.error)


def _show(fields: Json, console: Console) -> None:
    results, workload, arrangement = (fields[key] for key in ("results", "workload", "arrangement"))
    console.print(
        "{input_tokens} in, {output_tokens} out, concurrency {concurrency}, "
        "{num_requests} requests".format(**workload)
        + "; {prefill} prefill, {decode} decode, {colocated} colocated, {dtype}".format(
            **arrangement
        )
    )
    cpu = results["cpu_s_per_output_token"]
    console.print(
        f"{results['output_tokens_per_s']:.1f} output tokens/s over {results['duration_s']:.1f} s, "
        f"{results['completed']} completed, {results['failed']} failed"
        + ("" if cpu is None else f", {cpu * 1000:.1f} CPU ms per output token")
    )
    roof = fields["roof"]
    if roof is not None:
        console.print(
            f"{roof['fraction']:.0%} of the {roof['output_tokens_per_s']:.0f} output tokens/s that "
            f"{roof['gemm_flops'] / 1e9:.0f} GFLOP/s and {roof['read_bytes_per_s'] / 1e9:.1f} GB/s "
            "allow"
            + ("" if roof["steady"] else f"; disturbed: readings {roof['spread']:.0%} apart")
        )
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("ms")
    for heading in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="right")
    for name in ("ttft_s", "ttst_s", "tpot_s", "itl_s", "e2e_s"):
        dist = results[name]
        if dist is not None:
            cells = (f"{dist[key] * 1000:.1f}" for key in ("mean", "p50", "p90", "p99", "max"))
            table.add_row(name.removesuffix("_s"), *cells)
    console.print(table)


FIELDS = (
    "target",
    "arrangement",
    "workload",
    "results",
    "repeats",
    "roof",
    "peer",
    "ratio_to_peer",
)
COMMAND = Command(configure, Document("bench_serve", FIELDS), bench_local.DOCUMENTS)
