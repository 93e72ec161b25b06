"""``kvferry chaos``: end real processes under load, in every state of a request, and count."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import cast

import grpc.aio
from rich.console import Console
from rich.table import Table

from kvferry.cluster.chaos.cells import CELLS, Cell, select
from kvferry.cluster.chaos.cluster_watch import ClusterWatch, WatchedCluster
from kvferry.cluster.chaos.experiment import Experiments
from kvferry.cluster.chaos.results import CellResult, Soak, cell_json, totals_json, verdict
from kvferry.cluster.chaos.soak import soak
from kvferry.cluster.chaos.workload import settings
from kvferry.cluster.cli.command import Command, Result, RunFailed
from kvferry.cluster.cli.document import Document
from kvferry.cluster.cli.flags import add_json, people, positive
from kvferry.cluster.cli.progress import ProgressLine
from kvferry.cluster.cli.signals import StopSignals
from kvferry.cluster.cli.startup import start
from kvferry.cluster.client import AsyncClient
from kvferry.cluster.config import Config, load_config
from kvferry.cluster.deaths import Death
from kvferry.cluster.reports.common import Json
from kvferry.cluster.reports.documents import to_json
from kvferry.protos import kvferry_pb2 as pb

# A router that is back at its address is found again at once.
CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)


@dataclass(frozen=True, slots=True)
class Findings:
    """What a run has shown."""

    model: pb.Model
    results: Sequence[CellResult]
    soak: Soak | None
    false_deaths: Sequence[Death]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = (
        "A cluster of two prefill and two decode workers is started for the run. Every process "
        "that is signalled belongs to it."
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--cells",
        metavar="PATTERN",
        nargs="+",
        default=[],
        help="experiments by TARGET/FAULT/STATE, such as 'decode/*/decoding' (default: all "
        f"{len(CELLS)})",
    )
    what.add_argument(
        "--soak",
        metavar="SECONDS",
        type=positive,
        help="no experiments: full load for so long, and count deaths declared for nothing",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> Result:
    """Start, experiment, stop; whatever did not come out as it must is a failure."""
    cells = () if args.soak else select(args.cells)
    config = load_config(None, settings(slow_transfers=not args.soak))
    with (
        contextlib.redirect_stdout(sys.stderr),  # Ray reports every death on standard output
        StopSignals() as signals,
        ProgressLine(quiet=args.json, on_news=signals.check) as progress,
    ):
        cluster = start(config, progress)
        try:
            signals.install()
            signals.check()
            watched = cast(WatchedCluster, cluster)
            found = asyncio.run(_find(watched, config, cells, args.soak, progress))
        finally:
            cluster.stop(0.0)
    fields = document_fields(found, config)
    if not args.json:
        show(found, people(args))
    failure = verdict(found.results, found.soak, found.false_deaths)
    return Result(fields=fields, error=RunFailed(failure) if failure else None)


async def _find(
    cluster: WatchedCluster,
    config: Config,
    cells: Sequence[Cell],
    soak_s: int | None,
    progress: ProgressLine,
) -> Findings:
    count = config.replicas()
    async with (
        AsyncClient(cluster.grpc) as client,
        grpc.aio.insecure_channel(cluster.grpc, options=CHANNEL_OPTIONS) as channel,
    ):
        watch = ClusterWatch(cluster, client, count.prefill + count.decode)
        model = (await client.status()).model
        experiments = Experiments(cluster.grpc, watch, channel, client)
        progress.say("undisturbed streams, for reference")
        references = await experiments.take_references()
        soaked = None
        if soak_s is not None:
            progress.say(f"full load for {soak_s} s")
            soaked = await soak(channel, references, soak_s)
        results = []
        for number, cell in enumerate(cells):
            progress.stage(cell.name, number, len(cells))
            results.append(await experiments.run(cell))
        results.sort(key=lambda result: result.cell.place)
        return Findings(model, results, soaked, watch.deaths_but(experiments.caused))


def document_fields(found: Findings, config: Config) -> Json:
    """The fields of ``kvferry chaos``."""
    count = config.replicas()
    return {
        "model": to_json(found.model),
        "topology": {"prefill": count.prefill, "decode": count.decode, "routers": 1},
        "cells": [cell_json(result) for result in found.results],
        "totals": totals_json(found.results),
        "soak": asdict(found.soak) if found.soak is not None else None,
        "false_deaths": len(found.false_deaths),
    }


def show(found: Findings, console: Console) -> None:
    """Print the table, the notes below it, and what the load has shown."""
    if found.results:
        table = Table(box=None, pad_edge=False, collapse_padding=True)
        for heading in ("target", "fault", "state"):
            table.add_column(heading)
        for heading in COLUMNS:
            table.add_column(heading, justify="right")
        for result in found.results:
            cell = result.cell
            table.add_row(cell.target, cell.fault, cell.state, *_row(cell_json(result)))
        console.print(table)
        for result in found.results:
            if result.why:
                console.print(f"{result.cell.name}: {result.why}")
    if found.soak is not None:
        console.print(
            f"{found.soak.num_requests} requests in {found.soak.duration_s:.0f} s, "
            f"{found.soak.num_failed} failed, cores {found.soak.cores_busy:.0%} busy"
        )
    console.print(f"deaths declared for nothing: {len(found.false_deaths)}")


COLUMNS = ("tried", "survived", "lost", "repeated", "wrong", "leaked", "detection", "gap")


def _row(cell: Json) -> list[str]:
    names = ("tried", "survived", "tokens_lost", "tokens_repeated", "tokens_wrong", "blocks_leaked")
    times = (cell["detection_s"], cell["recovery_gap_s"])
    return [
        *(str(cell[name]) for name in names),
        *("-" if dist is None else f"{dist['max']:.2f} s" for dist in times),
    ]


COMMAND = Command(
    configure,
    Document("chaos", ("model", "topology", "cells", "totals", "soak", "false_deaths")),
)
