"""``kvferry status``: workers, load and counters of a running cluster."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from kvferry.cluster.cli.command import Command, Result
from kvferry.cluster.cli.document import Document
from kvferry.cluster.cli.flags import add_endpoint, add_json, people, security_of
from kvferry.cluster.client import Client
from kvferry.cluster.reports.documents import status_json
from kvferry.protos import kvferry_pb2 as pb


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add_endpoint(parser)
    add_json(parser)
    parser.add_argument(
        "--decisions",
        action="store_true",
        help="also the router's last placements, newest last (default: no)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> Result:
    """Ask once and show. A cluster that is not ready is an answer, not a failure."""
    with Client(args.endpoint, security=security_of(args)) as client:
        status = client.status(decisions=args.decisions)
    if not args.json:
        _show(status, people(args))
        if args.decisions:
            _show_decisions(status, people(args))
    return Result(fields=status_json(status, args.decisions))


def _show(status: pb.StatusResponse, console: Console) -> None:
    state = "ready" if status.ready else f"not ready: {', '.join(status.not_ready_reasons)}"
    model = status.model
    console.print(f"{model.name} ({model.dtype}), {state}", markup=False)
    console.print(f"KV {model.kv_dtype}, {_blocks(status)}", markup=False)
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    headings = ("worker", "role", "state", "pid", "running", "waiting", "swapped", "blocks used")
    for heading in (*headings, "age"):
        table.add_column(heading, justify="left" if heading in ("worker", "role") else "right")
    for entry in status.workers:
        worker, kv = entry.worker, entry.kv
        table.add_row(
            worker.worker_id,
            worker.role,
            worker.state,
            str(worker.pid),
            str(entry.num_running),
            str(entry.num_waiting),
            str(entry.num_swapped),
            f"{kv.num_total - kv.num_free - kv.num_cached}/{kv.num_total}",
            f"{entry.heartbeat_age_s:.1f} s" if entry.HasField("heartbeat_age_s") else "?",
        )
    console.print(table)
    for entry in status.workers:
        if entry.worker.placement:
            line = f"{entry.worker.worker_id} is on {entry.worker.placement}"
            console.print(line, markup=False)
    for entry in status.workers:
        for peer in entry.peers:
            why = f" ({peer.reason})" if peer.reason else ""
            line = f"{entry.worker.worker_id} reads {peer.worker_id} by {peer.connector}{why}"
            console.print(f"{line}: {peer.state}", markup=False)
    counters = ((field.name, value) for field, value in status.counters.ListFields())
    console.print(", ".join(f"{name} {value}" for name, value in counters) or "no requests yet")


def _blocks(status: pb.StatusResponse) -> str:
    """How large the pools' blocks are."""
    model = status.model
    sizes = {e.worker.worker_id: e.kv.block_size for e in status.workers if e.kv.block_size}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{size} ({worker_id})" for worker_id, size in sizes.items())
        each = model.block_bytes // model.block_size
        return f"blocks of {listed} positions, {each:,} bytes each position"
    return f"blocks of {model.block_size} positions, {model.block_bytes:,} bytes"


def _show_decisions(status: pb.StatusResponse, console: Console) -> None:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for heading in ("request", "policy", "prefill", "decode", "first token", "reason"):
        table.add_column(heading, justify="right" if heading == "first token" else "left")
    for entry in status.decisions:
        table.add_row(
            entry.request_id,
            entry.policy,
            entry.prefill_worker or "(the decode worker)",
            entry.decode_worker,
            f"{entry.actual_ttft_s:.3f} s" if entry.HasField("actual_ttft_s") else "-",
            entry.reason,
        )
    console.print(table)


FIELDS = (
    "ready",
    "not_ready_reasons",
    "model",
    "endpoints",
    "routers",
    "workers",
    "counters",
    "decisions",
)
COMMAND = Command(configure, Document("status", FIELDS))
