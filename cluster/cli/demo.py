"""``kvferry demo``: a small cluster, a few prompts, what moved, and a clean end."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.cluster.cli.blocks import CLASSES, inconsistency
from kvferry.cluster.cli.command import Command, Result, RunFailed, UsageError
from kvferry.cluster.cli.demo_view import DemoView
from kvferry.cluster.cli.document import Document
from kvferry.cluster.cli.flags import add_cluster, add_json, cluster_overrides, people
from kvferry.cluster.cli.progress import ProgressLine
from kvferry.cluster.cli.signals import StopSignals
from kvferry.cluster.cli.startup import start
from kvferry.cluster.client import AsyncClient
from kvferry.cluster.client_stream import Transcript
from kvferry.cluster.config import Config, load_config
from kvferry.cluster.reports.common import Json
from kvferry.cluster.reports.documents import (
    Outcome,
    pools_json,
    request_json,
    to_json,
    totals_json,
)
from kvferry.kv_cache.errors import KVFerryError
from kvferry.protos import kvferry_pb2 as pb

MAX_TOKENS = 32
REQUEST_TIMEOUT_S = 300.0
# Leases and lists need a moment after the last token until the pools are quiet.
QUIET_WITHIN_S = 10.0
QUIET_POLL_S = 0.1

_SHORT_PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):",
)
_PASSAGE = (
    "A ferry left the north bank with its hold full of numbered crates . Each crate was weighed , "
    "sealed and written down before it went aboard , and the clerk on the south bank would not "
    "sign for one whose number was not on his list . "
)


@dataclass(frozen=True, slots=True)
class Demonstration:
    """What the requests left behind."""

    outcomes: Sequence[Outcome]
    duration_s: float
    status: pb.StatusResponse
    audit: pb.AuditResponse


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add_cluster(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> Result:
    """Start, serve the prompts at the same time, audit, stop."""
    overrides = {**cluster_overrides(args), "server.grpc": "127.0.0.1:0"}
    config = load_config(args.config, overrides)
    if config.is_locked:
        raise UsageError(
            "server.tls, server.auth and tenants are for kvferry serve: a demo serves nobody but "
            "itself; leave them out"
        )
    view = DemoView(people(args))
    with StopSignals() as signals:
        with ProgressLine(quiet=args.json, on_news=signals.check) as progress:
            cluster = start(config, progress)
        try:
            signals.install()
            signals.check()
            view.ready(cluster.startup_s, cluster.grpc)
            shown = asyncio.run(demonstrate(cluster.grpc, prompts(config), view))
        finally:
            cluster.stop(0.0)  # every prompt has been answered, or none will be
    fields = document_fields(shown, cluster.startup_s)
    view.summary(shown.outcomes, fields["totals"], shown.audit.pools)
    return Result(fields=fields, error=verdict(shown, fields))


def prompts(config: Config) -> list[str]:
    """Three short prompts and one that takes at least three prefill chunks.

    Every word of the passage stands alone and so is at least one token.
    """
    words = _PASSAGE.split()
    needed = 2 * config.scheduler.chunk_tokens + 1
    long = " ".join(words[at % len(words)] for at in range(needed))
    return [*_SHORT_PROMPTS, long]


async def demonstrate(endpoint: str, texts: Sequence[str], view: DemoView) -> Demonstration:
    """Send all prompts at once; afterwards wait, for a bounded time, until the pools are quiet."""
    async with AsyncClient(endpoint) as client:
        started = time.monotonic()
        with view:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_one(client, text, view)) for text in texts]
        duration_s = time.monotonic() - started
        audit = await _quiet_audit(client, time.monotonic)
        status = await client.status()
    return Demonstration([task.result() for task in tasks], duration_s, status, audit)


async def _one(client: AsyncClient, prompt: str, view: DemoView) -> Outcome:
    transcript = Transcript(time.monotonic())
    error: KVFerryError | None = None
    stream = client.generate(
        prompt,
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        echo_prompt_token_ids=True,
        timeout_s=REQUEST_TIMEOUT_S,
    )
    try:
        async with stream:
            async for event in stream:
                transcript.add(event, time.monotonic())
                view.streaming(prompt, transcript.text)
    except KVFerryError as exc:
        error = exc
    return Outcome(prompt, stream.request_id, transcript, error)


async def _quiet_audit(client: AsyncClient, clock: Callable[[], float]) -> pb.AuditResponse:
    deadline = clock() + QUIET_WITHIN_S
    while True:
        audit = await client.audit()
        if clock() > deadline or not any(_busy(pool) for pool in audit.pools):
            return audit
        await asyncio.sleep(QUIET_POLL_S)


def _busy(pool: pb.Pool) -> int:
    """Blocks that somebody still holds."""
    return pool.num_pinned + pool.num_in_transfer + pool.num_referenced + pool.num_quarantined


def document_fields(shown: Demonstration, startup_s: float) -> Json:
    """The fields of ``kvferry demo``."""
    requests = [request_json(outcome) for outcome in shown.outcomes]
    return {
        "model": to_json(shown.status.model),
        "workers": [to_json(entry.worker) for entry in shown.status.workers],
        "startup_s": startup_s,
        "requests": requests,
        "totals": totals_json(requests, shown.duration_s),
        "pools": pools_json(shown.audit, with_blocks=False),
    }


def verdict(shown: Demonstration, fields: Json) -> RunFailed | None:
    """An error if a request failed, an audit is inconsistent or a block was left behind."""
    failed = fields["totals"]["num_failed"]
    if failed:
        return RunFailed(f"{failed} of {len(shown.outcomes)} requests failed")
    wrong = inconsistency(shown.audit.pools)
    if wrong is not None:
        return wrong
    left = [
        f"{pool.worker_id}: {getattr(pool, f'num_{name}')} {name.replace('_', ' ')}"
        for pool in shown.audit.pools
        for name in CLASSES[2:]
        if getattr(pool, f"num_{name}")
    ]
    return RunFailed(f"blocks are left behind: {', '.join(left)}") if left else None


COMMAND = Command(
    configure,
    Document("demo", ("model", "workers", "startup_s", "requests", "totals", "pools")),
)
