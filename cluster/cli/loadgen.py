"""``kvferry loadgen``: send a load that is made up or replayed, and measure what comes of it."""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib import import_module

from kvferry.cluster.cli import loadgen_report, loadgen_sweep
from kvferry.cluster.cli.command import Command, Result, UsageError
from kvferry.cluster.cli.document import Document
from kvferry.cluster.cli.flags import add_json, people, security_of
from kvferry.cluster.cli.loadgen_flags import configure_run, settings_of
from kvferry.cluster.cli.loadgen_loop import event_loop
from kvferry.cluster.cli.loadgen_view import show
from kvferry.cluster.cli.progress import ProgressLine
from kvferry.cluster.client_security import ClientSecurity
from kvferry.cluster.loadgen.document import FIELDS, document_fields
from kvferry.cluster.loadgen.grpc_target import GrpcTarget
from kvferry.cluster.loadgen.run import Run, run_load
from kvferry.cluster.loadgen.settings import Settings
from kvferry.cluster.loadgen.targets import Target

DRAWN_PER_S = 1
"""Drawing takes milliseconds, in which no token is noted."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    run = kinds.add_parser(
        "run",
        help="one load against a running server",
        description="Send one load to a running server, and measure it at the client.",
    )
    configure_run(run)
    add_json(run)
    run.set_defaults(run=run_one)
    loadgen_sweep.configure_sweep(
        kinds.add_parser(
            "sweep",
            help="several loads against clusters that it starts, as a recipe or by flags",
            description="Start clusters of several arrangements, send several loads to each.",
        )
    )
    loadgen_report.configure_compare(
        kinds.add_parser(
            "compare",
            help="two documents: what is better at what, beyond noise",
            description="Hold document B against document A, figure by figure.",
        )
    )
    loadgen_report.configure_report(
        kinds.add_parser(
            "report",
            help="a document as one HTML page, and its plots as PNG files",
            description="Draw a document of loadgen run or loadgen sweep.",
        )
    )


def run_one(args: argparse.Namespace) -> Result:
    """One load, with progress on standard error. One that breaks off shows what it has measured."""
    run = Run(settings_of(args))
    loop_name, new_loop = event_loop()
    error: BaseException | None = None
    with ProgressLine(quiet=args.json, per_second=DRAWN_PER_S) as line:

        def progress(repeat: int, ended: int, total: int, in_flight: int) -> None:
            name = "warm-up" if repeat < 0 else f"repeat {repeat + 1} of {run.settings.repeats}"
            line.stage(name, ended, total, detail=f"{ended}/{total} ended, {in_flight} in flight")

        opener = _opener(run.settings, args.api_key_env, security_of(args))
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(run_load(run, opener, progress))
        except KeyboardInterrupt as interrupt:
            error = interrupt
        except Exception as caught:  # the command's boundary: what was measured is shown
            if not run.repeats:
                raise
            error = caught
    fields = document_fields(run, {"event_loop": loop_name})
    if not args.json:
        show(fields, people(args))
    return Result(fields=fields, error=error or run.error)


def _opener(
    settings: Settings, key_name: str | None, security: ClientSecurity
) -> Callable[[], AbstractAsyncContextManager[Target]]:
    """What opens the target that the settings name."""
    if settings.url is not None:
        key = None
        if key_name is not None:
            key = os.environ.get(key_name)
            if not key:
                raise UsageError(f"--api-key-env: got {key_name}, which is not set")
        # Only here: its library takes half a second, which help and runs over gRPC save.
        target = import_module("kvferry.cluster.loadgen.http_target").HttpTarget
        return functools.partial(
            target, settings.url, settings.model or "", settings.body, key, security=security
        )
    return functools.partial(GrpcTarget, settings.endpoint, settings.model or "", security=security)


COMMAND = Command(
    configure,
    Document("loadgen_run", FIELDS),
    kinds={"sweep": loadgen_sweep.DOCUMENT, "compare": loadgen_report.COMPARE},
)
