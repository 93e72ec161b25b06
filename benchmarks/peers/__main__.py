"""``make peers``: run the plan, write it down, print the comparison.

For each case and round vLLM is started, measured and ended, then KVFerry, so that a slow hour of
the machine meets both. Exit codes are those of ``kvferry``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from types import FrameType
from typing import TypeAlias

from rich.console import Console

from benchmarks.peers import arguments, machine
from benchmarks.peers.comparison import Run, compare, run_json, show
from benchmarks.peers.install import NIXL_VERSION, VLLM_VERSION
from benchmarks.peers.launches import KVFERRY, Case
from benchmarks.peers.load import Load, measure
from benchmarks.peers.machine import MachineSpeed
from benchmarks.peers.model import Model, find_model
from benchmarks.peers.systems import Running, Setup, running
from kvferry.cluster.cli.command import EXIT_FAILED, Result, UsageError
from kvferry.cluster.cli.flags import WIDTH
from kvferry.cluster.reports.common import Json, common_fields
from kvferry.kv_cache.errors import KVFerryError


def steps(
    cases: Sequence[Case], num_rounds: int, systems: Sequence[str]
) -> Iterator[tuple[Case, int, str]]:
    """Case, round and system of each run, in order: the systems take turns."""
    for case in cases:
        for round_number in range(num_rounds):
            for system in systems:
                yield case, round_number, system


Start: TypeAlias = Callable[[str, Case, Setup], AbstractContextManager[Running]]


def run_all(
    args: argparse.Namespace,
    model: Model,
    runs: list[Run],
    start: Start = running,
    speed: Callable[[int], MachineSpeed] = machine.measure,
) -> None:
    """Make every run of the plan; each is added to ``runs`` and written down when it has ended.

    What fails of a system is part of its run, and the plan goes on.
    """
    load = Load(
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        concurrencies=args.concurrency,
        num_requests=args.num_requests,
        num_repeats=args.repeats,
        seed=args.seed,
        vocab_size=model.vocab_size,
    )
    setup = Setup(model.folder, args.cores, args.peer)
    before = speed(args.threads)
    for case, round_number, system in steps(args.cases, args.rounds, args.systems):
        say(
            f"{case.arrangement}, {case.dtype_of(system)}, round {round_number + 1} of "
            f"{args.rounds}: starting {system} ..."
        )
        measured, error, launches = None, None, []
        began = time.monotonic()
        try:
            with start(system, case, setup) as found:
                say(f"  ready after {time.monotonic() - began:.0f} s")
                launches = [server.launch for server in found.servers]
                measured = measure(found, load, round_number, say)
        except KVFerryError as exc:
            error = exc
            say(f"  failed: {exc}")
        after = speed(args.threads)
        run = Run(system, case, round_number, before, after, launches, measured, error)
        if run.machine_changed:
            say(f"  the machine changed: {before} before, {after} after")
        runs.append(run)
        write(args, runs)
        before = after


def document(args: argparse.Namespace, runs: Sequence[Run]) -> Json:
    """Everything that was set and measured."""
    peer = args.peer
    return {
        **common_fields("peers", [], datetime.now(UTC)),
        "command": f"make peers ARGS={shlex.quote(shlex.join(args.given))}",
        "model": args.model,
        "cores": args.cores,
        "workload": {
            "input_tokens": args.input_tokens,
            "output_tokens": args.output_tokens,
            "concurrency": args.concurrency,
            "num_requests": args.num_requests,
            "repeats": args.repeats,
            "rounds": args.rounds,
            "seed": args.seed,
        },
        "peer": {
            "name": "vllm",
            "version": VLLM_VERSION,
            "nixl_version": NIXL_VERSION,
            "openmp": peer.openmp,
            "tcmalloc": peer.tcmalloc,
            "nixl_poll_us": peer.nixl_poll_us,
            "environment": peer.more_environment,
            "arguments": list(peer.more_arguments),
        },
        "comparison": compare(runs),
        "runs": [run_json(run) for run in runs],
    }


def write(args: argparse.Namespace, runs: Sequence[Run]) -> None:
    """Put the document so far where ``--output`` says."""
    args.output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document(args, runs), allow_nan=False, indent=1)
    args.output.write_text(text + "\n", encoding="utf-8")


def report(args: argparse.Namespace, runs: Sequence[Run]) -> None:
    """The comparison to standard output."""
    if args.json:
        print(json.dumps(document(args, runs), allow_nan=False))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    show(compare(runs), console)
    say(f"written to {args.output}")


def say(message: str) -> None:
    """News, on standard error."""
    print(message, file=sys.stderr, flush=True)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(given: Sequence[str]) -> int:
    """Run the plan that the arguments give; the exit code."""
    signal.signal(signal.SIGTERM, _terminated)
    runs: list[Run] = []
    try:
        args = arguments.parse(given)
        args.given = list(given)
        if not args.peer.python.exists() and args.systems != [KVFERRY]:
            raise UsageError(f"--peer-venv: {args.peer_venv} is no environment: run 'make peers'")
        run_all(args, find_model(args.model), runs)
    except (KVFerryError, KeyboardInterrupt) as error:
        say(f"peers: {str(error) or 'interrupted'}")
        if isinstance(error, UsageError) and error.usage:
            say(error.usage)
        return Result(error=error).exit_code
    report(args, runs)
    failed = [run for run in runs if run.failure is not None]
    for run in failed:
        say(f"{run.system}, {run.case.arrangement}, {run.case.dtype}: {run.failure}")
    return EXIT_FAILED if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
