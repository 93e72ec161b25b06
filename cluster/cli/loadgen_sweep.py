"""``kvferry loadgen sweep``: loads against clusters that it starts and ends, in one document."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import signal
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from kvferry.cluster.cli.command import Result
from kvferry.cluster.cli.document import Document
from kvferry.cluster.cli.flags import add_json, people, positive
from kvferry.cluster.cli.loadgen_flags import add_load, given_of, implied
from kvferry.cluster.cli.loadgen_loop import event_loop
from kvferry.cluster.cli.loadgen_report import (
    add_report_files,
    check_report_files,
    write_readable,
    write_report,
)
from kvferry.cluster.cli.loadgen_sweep_view import show
from kvferry.cluster.cli.progress import ProgressLine
from kvferry.cluster.config import load_config
from kvferry.cluster.loadgen.document import document_fields
from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.experiments.recipes import RECIPES
from kvferry.cluster.loadgen.experiments.serve_process import ServeProcess
from kvferry.cluster.loadgen.experiments.summary import FIELDS, sweep_fields
from kvferry.cluster.loadgen.experiments.sweep_making import check_configs, make_sweep
from kvferry.cluster.loadgen.experiments.sweep_plan import AXES, Axis, Point, Sweep
from kvferry.cluster.loadgen.experiments.sweeping import Sweeping, take_up
from kvferry.cluster.loadgen.grpc_target import GrpcTarget
from kvferry.cluster.loadgen.run import OnProgress, Run, run_load
from kvferry.cluster.loadgen.settings import Settings
from kvferry.cluster.reports.common import Json, common_fields
from kvferry.kv_cache.errors import KVFerryError

DOCUMENT = Document("loadgen_sweep", FIELDS)
_PLURALS = {"rate": "rates", "concurrency": "concurrencies", "stretch": "stretches"}


def configure_sweep(parser: argparse.ArgumentParser) -> None:
    """Add every flag."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    recipes = "\n".join(f"  {each.name}: {each.question}" for each in RECIPES.values())
    parser.epilog = (
        "ARRANGEMENTS: 1x2 is one colocated worker of two threads, 2x1 two of one thread each,\n"
        "1P+1D a prefill and a decode worker of one thread each, 1Px2+2D has two threads for the\n"
        "first. LENGTH: see 'loadgen run --help'. Ctrl-C leaves a valid document, and the same\n"
        f"command goes on where it was. docs/loadgen.md says more.\n\nrecipes:\n{recipes}"
    )
    group = parser.add_argument_group("sweep")
    group.add_argument(
        "--recipe",
        choices=tuple(RECIPES),
        help="a named experiment, see below; flags and file override it (default: none)",
    )
    group.add_argument(
        "--arrangements",
        metavar="LIST",
        help="how the workers stand, with commas between (default: 1P+1D)",
    )
    axes = group.add_mutually_exclusive_group()
    for name in AXES:
        axes.add_argument(
            f"--{_PLURALS[name]}",
            dest=f"{name}_values",
            metavar="LIST",
            type=_numbers,
            help=f"loads: values of --{name}, with commas between (default: none)",
        )
    group.add_argument(
        "--rounds",
        metavar="N",
        type=positive,
        help="each cluster is started so often, in turns (default: 1, or the recipe's)",
    )
    group.add_argument(
        "--config", metavar="FILE", help="YAML that every cluster begins with (default: none)"
    )
    group.add_argument(
        "--model",
        dest="serve_model",
        metavar="NAME|PATH|HF_ID",
        help="what the clusters serve (default: the configuration's)",
    )
    group.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        default=Path("sweep.json"),
        help="the document; what it holds already is not measured again (default: %(default)s)",
    )
    group.add_argument(
        "--timeout",
        metavar="S",
        type=float,
        default=argparse.SUPPRESS,
        help="a request that takes longer fails (default: none)",
    )
    add_report_files(group)
    add_load(parser)
    add_json(parser)
    parser.set_defaults(run=run_sweep)


def _numbers(text: str) -> tuple[float, ...]:
    """An argument type: numbers with commas between."""
    return tuple(float(part) for part in text.split(","))


def run_sweep(args: argparse.Namespace) -> Result:
    """Measure what is missing, with progress on standard error. See ``configure_sweep``."""
    check_report_files(args)
    sweep = sweep_of(args)
    check_configs(sweep)
    known = _earlier(args.out, sweep)
    head = common_fields("", [], datetime.now(UTC))
    origin = {name: head[name] for name in ("commit", "version", "machine")}
    error: BaseException | None = None
    with ProgressLine(quiet=False) as line:
        doing = [""]

        def news(point: Point, number: int, total: int) -> None:
            name = f"{point.label}, round {point.round + 1} of {sweep.rounds}"
            doing[0] = f"point {number + 1} of {total}: {name}"
            line.stage(doing[0], number, total)

        def start(point: Point) -> ServeProcess:
            doing[0] = f"starting a cluster: {point.arrangement.name}"
            return ServeProcess(point.config, on_wait=lambda: line.stage(doing[0], 0, 0))

        def measure(settings: Settings) -> tuple[Json, KVFerryError | None]:
            def progress(repeat: int, ended: int, requests: int, in_flight: int) -> None:
                name = "warm-up" if repeat < 0 else f"repeat {repeat + 1} of {settings.repeats}"
                detail = f"{name}, {ended}/{requests} ended, {in_flight} in flight"
                line.stage(doing[0], ended, requests, detail=detail)

            return _measure(settings, progress)

        def save() -> None:
            _save(args, sweeping)

        sweeping = Sweeping(sweep, start, measure, origin, known, save, news)
        try:
            with _sigterm_interrupts():
                sweeping.run()
        except (KVFerryError, KeyboardInterrupt) as caught:
            error = caught
    error = error or sweeping.error
    fields = sweep_fields(sweep.to_json(), sweeping.points)
    rendered = DOCUMENT.render(Result(fields, error), args.argv, datetime.now(UTC))
    write_readable(args.out, rendered + "\n")
    write_report(json.loads(rendered), args)
    if not args.json:
        show(fields, args.out, people(args))
    return Result(fields=fields, error=error)


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM is like Ctrl-C, or the cluster, which has a session of its own, would stay."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _save(args: argparse.Namespace, sweeping: Sweeping) -> None:
    """What is known so far. Until all is, the document says that it was interrupted."""
    fields = sweep_fields(sweeping.sweep.to_json(), sweeping.points)
    result = Result(fields, KeyboardInterrupt())
    write_readable(args.out, DOCUMENT.render(result, args.argv, datetime.now(UTC)) + "\n")


def _measure(settings: Settings, progress: OnProgress) -> tuple[Json, KVFerryError | None]:
    """One load against a cluster that runs."""
    run = Run(settings)
    loop_name, new_loop = event_loop()
    opener = functools.partial(GrpcTarget, settings.endpoint, settings.model or "")
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run_load(run, opener, progress))
    return document_fields(run, {"event_loop": loop_name}), run.error


def sweep_of(args: argparse.Namespace) -> Sweep:
    """The sweep that the arguments ask for. Raises BadLoad, ConfigError."""
    chosen = [(name, getattr(args, f"{name}_values")) for name in AXES]
    axes = [Axis(name, values) for name, values in chosen if values is not None]
    return make_sweep(
        implied(given_of(args)),
        RECIPES.get(args.recipe),
        args.arrangements,
        axes[0] if axes else None,
        args.rounds,
        _config(args.config, args.serve_model),
    )


def _config(path: str | None, model: str | None) -> Mapping[str, Any]:
    """The file, checked, with the model that the flag names."""
    config: dict[str, Any] = {}
    if path is not None:
        load_config(path)
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    config = {key: value for key, value in config.items() if value is not None}
    if model is not None:
        rest = {k: v for k, v in config.get("model", {}).items() if k not in ("path", "revision")}
        config["model"] = {**rest, "name": model}
    return config


def _earlier(path: Path, sweep: Sweep) -> dict[str, Json]:
    """Points of a document that is there already."""
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_bytes())
        return take_up(document, sweep, str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadLoad(f"out: {path} cannot be read and is left as it is: {error}") from error
