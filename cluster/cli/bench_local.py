"""``kvferry bench kernels`` and ``kvferry bench engine``: measurements in this process.

What measures brings torch, so it is loaded when it is called, with the thread settings of a worker.
Loads no Ray.
"""

from __future__ import annotations

import argparse
import os
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.table import Table

from kvferry.cluster.cli.command import Result
from kvferry.cluster.cli.document import Document
from kvferry.cluster.cli.flags import add_json, people, positive
from kvferry.cluster.cli.progress import ProgressLine
from kvferry.cluster.reports.common import Json

DOCUMENTS = {
    "kernels": Document("bench_kernels", ("bandwidth", "gemm", "rows")),
    "engine": Document("bench_engine", ("rows", "scheduler")),
}


def configure(kinds: Any) -> None:
    """Add the two subcommands to the parsers of ``kvferry bench``."""
    kernels = kinds.add_parser(
        "kernels",
        help="every kernel beside plain torch, and what memory and arithmetic allow",
        description="Time every kernel of every family that loads here, beside plain torch.",
    )
    kernels.set_defaults(run=run_kernels)
    engine = kinds.add_parser(
        "engine",
        help="whole steps of a model, where their time goes, and the scheduler alone",
        description="Time decode and prefill steps of a model in this process, and the scheduler.",
    )
    engine.add_argument(
        "--model",
        metavar="NAME|PATH|HF_ID",
        help="as for 'serve' (default: the first name that 'models list' shows)",
    )
    engine.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="weights' and activations' type (default: %(default)s)",
    )
    engine.add_argument(
        "--threads",
        metavar="N",
        type=positive,
        default=len(os.sched_getaffinity(0)),
        help="compute threads (default: the cores that may be used, here %(default)s)",
    )
    engine.set_defaults(run=run_engine)
    for parser in (kernels, engine):
        parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
        add_json(parser)


def run_kernels(args: argparse.Namespace) -> Result:
    """Measure the kernels, with progress on standard error, and show the rows."""
    bench = load("kernels")
    with ProgressLine(quiet=args.json) as line:
        fields = bench.bench_kernels(bench.TINY if args.tiny else bench.Sizes(), line.say)
    if not args.json:
        _show_kernels(fields, people(args))
    return Result(fields=fields)


def run_engine(args: argparse.Namespace) -> Result:
    """Find the model, measure its steps, and show the rows."""
    bench = load("engine")
    store = import_module("kvferry.engine.weights.store")
    with ProgressLine(quiet=args.json) as line:
        cache = store.default_cache_dir(os.environ)
        folder = store.resolve_model(args.model, None, cache, line.stage)
        sizes = bench.TINY if args.tiny else bench.Sizes()
        fields = bench.bench_engine(folder.path, args.dtype, args.threads, sizes, line.say)
    if not args.json:
        _show_engine(fields, people(args))
    return Result(fields=fields)


def load(name: str) -> Any:
    """A module that measures; idle threads sleep, as a worker's do, instead of spinning."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is loaded
    return import_module(f"kvferry.cluster.bench.{name}")


def _show_kernels(fields: Json, console: Console) -> None:
    for name in ("threads_1", "threads_all"):
        console.print(
            f"{name}: reads {fields['bandwidth'][f'{name}_bytes_per_s'] / 1e9:.1f} GB/s, "
            f"multiplies {fields['gemm'][f'{name}_flops'] / 1e9:.0f} GFLOP/s"
        )
    table = _table(
        "kernel",
        "by",
        "kv",
        "threads",
        "batch",
        "queries",
        "context",
        "heads",
        "µs",
        "GB/s",
        "of memory",
        "baselines, µs",
        "speed-up",
        "error",
    )
    for row in fields["rows"]:
        shape = row["shape"]
        baselines = ", ".join(f"{b['name']} {b['time_s'] * 1e6:.0f}" for b in row["baselines"])
        heads = f"{shape['q_heads']}/{shape['kv_heads']} D{shape['head_dim']}"
        table.add_row(
            row["kernel"],
            row["implementation"] + (f" {row['isa']}" if row["isa"] else ""),
            row["kv_dtype"] or "",
            str(row["threads"]),
            str(shape["batch"]),
            str(shape["query_len"]),
            str(shape["context"] or ""),
            heads if shape["head_dim"] else "",
            f"{row['time_s']['p50'] * 1e6:.0f}",
            f"{row['bytes_per_s'] / 1e9:.1f}",
            f"{row['fraction_of_bandwidth']:.0%}",
            baselines,
            f"{row['ratio_to_baseline']:.2f}",
            f"{row['max_error_float64']:.0e}",
        )
    console.print(table)


def _show_engine(fields: Json, console: Console) -> None:
    names = tuple(fields["rows"][0]["parts"])
    headings = [name.removesuffix("_s").replace("_", " ") for name in names]
    table = _table(
        "phase", "batch", "context", "ms", *headings, "outside", "eager ms", "speed-up", "of roof"
    )
    for row in fields["rows"]:
        table.add_row(
            row["phase"],
            str(row["batch"]),
            str(row["context"]),
            f"{row['step_s']['p50'] * 1e3:.1f}",
            *(f"{row['parts'][name] * 1e3:.2f}" for name in names),
            f"{row['outside_kernels_fraction']:.1%}",
            f"{row['eager_step_s'] * 1e3:.1f}",
            f"{row['ratio_to_eager']:.2f}",
            f"{row['fraction_of_roof']:.0%}",
        )
    console.print(table)
    for row in fields["scheduler"]:
        console.print(
            f"scheduler: {row['num_running']} running of {row['context']} tokens, "
            f"{row['s_per_scheduled_token'] * 1e6:.2f} µs per scheduled token"
        )


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table
