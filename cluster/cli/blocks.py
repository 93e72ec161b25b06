"""``kvferry blocks``: the audit of a running cluster's KV pools."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kvferry.cluster.cli.command import Command, Result, RunFailed
from kvferry.cluster.cli.document import Document
from kvferry.cluster.cli.flags import add_endpoint, add_json, people, security_of
from kvferry.cluster.client import Client
from kvferry.cluster.errors import UnknownRequest
from kvferry.cluster.reports.documents import pools_json
from kvferry.protos import kvferry_pb2 as pb

CLASSES = ("free", "cached", "pinned", "in_transfer", "referenced", "quarantined")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("--worker", metavar="ID", default="", help="one worker (default: all)")
    add_endpoint(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> Result:
    """Audit and show; pools whose counts do not agree with their owners are a failure."""
    with Client(args.endpoint, security=security_of(args)) as client:
        audit = client.audit(args.worker, include_blocks=args.json)
    if args.worker and not audit.pools:
        raise UnknownRequest(f"no worker {args.worker!r}; 'kvferry status' lists them")
    if not args.json:
        show_pools(audit.pools, people(args))
    return Result(
        fields={"pools": pools_json(audit, with_blocks=True)}, error=inconsistency(audit.pools)
    )


def inconsistency(pools: Sequence[pb.Pool]) -> RunFailed | None:
    """An error that names every problem of every pool; None if there is none."""
    problems = [
        f"{pool.worker_id}: {problem}"
        for pool in pools
        if not pool.consistent
        for problem in pool.problems or ("inconsistent",)
    ]
    return RunFailed("audit: " + "; ".join(problems)) if problems else None


def show_pools(pools: Sequence[pb.Pool], console: Console) -> None:
    """Print one line per pool: how many blocks each class has."""
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("worker")
    for heading in ("blocks", *(name.replace("_", " ") for name in CLASSES), "audit"):
        table.add_column(heading, justify="right")
    for pool in pools:
        counts = [str(getattr(pool, f"num_{name}")) for name in CLASSES]
        verdict = "ok" if pool.consistent else "WRONG"
        table.add_row(pool.worker_id, str(pool.num_total), *counts, verdict)
    console.print(table)


COMMAND = Command(configure, Document("blocks", ("pools",)))
