"""The arguments of ``make peers``, and what they mean. Starts nothing."""

from __future__ import annotations

import argparse
import ctypes.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from benchmarks.peers.cores import usable_cores
from benchmarks.peers.launches import (
    ARRANGEMENTS,
    DISAGGREGATED,
    DTYPES,
    GNU,
    INTEL,
    SYSTEMS,
    Case,
    PeerSettings,
)
from kvferry.cluster.cli.command import UsageError
from kvferry.cluster.cli.flags import positive
from kvferry.engine.weights.catalog import DEFAULT_MODEL

T = TypeVar("T")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, self.format_usage().rstrip())


def parse(arguments: Sequence[str], cores: Sequence[int] | None = None) -> argparse.Namespace:
    """The arguments, with ``cores`` (those of this machine), ``cases`` and ``peer`` worked out.

    Raises UsageError.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    args.cores = (usable_cores() if cores is None else list(cores))[: args.threads]
    if len(args.cores) < args.threads:
        parser.error(f"--threads: got {args.threads}, but there are {len(args.cores)} cores")
    if DISAGGREGATED in args.arrangements and args.threads < 2:
        parser.error("--threads: got 1, wanted 2 or more for prefill and decode")
    args.cases = [
        Case(arrangement, dtype) for arrangement in args.arrangements for dtype in args.dtypes
    ]
    args.peer = PeerSettings(
        environment_folder=args.peer_venv.absolute(),
        openmp=args.openmp,
        tcmalloc=ctypes.util.find_library("tcmalloc_minimal") if args.tcmalloc else None,
        nixl_poll_us=args.nixl_poll_us,
        more_environment=dict(args.peer_env),
        more_arguments=args.peer_arg,
    )
    return args


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m benchmarks.peers",
        description="Measure KVFerry and vLLM on the CPU, one after the other, with one load.",
    )
    listed = (
        ("--arrangements", ARRANGEMENTS, ARRANGEMENTS, "how prefill and decode are placed"),
        ("--dtypes", DTYPES, DTYPES[:2], "weights' types; beside int8 vLLM has bfloat16"),
        ("--systems", SYSTEMS, SYSTEMS, "what is measured, in this order"),
    )
    for flag, allowed, default, text in listed:
        parser.add_argument(
            flag,
            metavar="A,B",
            type=_several(_one_of(allowed)),
            default=list(default),
            help=f"{text}: {', '.join(allowed)} (default: {','.join(default)})",
        )
    parser.add_argument(
        "--concurrency",
        metavar="N,N",
        type=_several(positive),
        default=[1, 8],
        help="requests in flight, one after the other (default: 1,8)",
    )
    for flag, default_number, text in (
        ("--input-tokens", 256, "prompt length"),
        ("--output-tokens", 64, "output length, exact"),
        ("--repeats", 3, "passes over the requests, for each start of a server"),
        ("--rounds", 2, "starts of each system for each arrangement and type"),
        ("--threads", 2, "compute threads of each system"),
    ):
        parser.add_argument(
            flag,
            metavar="N",
            type=positive,
            default=default_number,
            help=f"{text} (default: {default_number})",
        )
    parser.add_argument(
        "--num-requests",
        metavar="N",
        type=positive,
        help="requests of one repeat (default: four for each in flight, but eight at least)",
    )
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="of the prompts (0)")
    parser.add_argument(
        "--model", metavar="NAME|FOLDER", default=DEFAULT_MODEL, help="(default: %(default)s)"
    )
    _add_peer(parser)
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("peers.json"),
        help="where the document goes, after every run (default: %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the document instead of the table"
    )
    return parser


def _add_peer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how vLLM is run")
    group.add_argument(
        "--peer-venv",
        metavar="FOLDER",
        type=Path,
        default=Path(".venv-peers"),
        help="its virtual environment (default: %(default)s)",
    )
    group.add_argument(
        "--openmp",
        choices=(INTEL, GNU),
        default=INTEL,
        help="its OpenMP library; its manual recommends Intel's (default: %(default)s)",
    )
    group.add_argument(
        "--tcmalloc",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="load libtcmalloc_minimal, where the system has it (default: yes)",
    )
    group.add_argument(
        "--nixl-poll-us",
        metavar="N",
        type=int,
        default=1000,
        help="delay of NIXL's polling in microseconds; 0 is as delivered (default: 1000)",
    )
    group.add_argument(
        "--peer-env",
        metavar="NAME=VALUE",
        type=_assignment,
        action="append",
        default=[],
        help="a further environment variable of its servers",
    )
    group.add_argument(
        "--peer-arg",
        metavar="ARG",
        action="append",
        default=[],
        help="a further argument of its servers: --peer-arg=--block-size=32",
    )


def _several(one: Callable[[str], T]) -> Callable[[str], list[T]]:
    """An argument type: words with commas between, none twice."""

    def several(text: str) -> list[T]:
        found = [one(word) for word in text.split(",")]
        if len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"got {text!r}, which names one twice")
        return found

    return several


def _one_of(allowed: Sequence[str]) -> Callable[[str], str]:
    def one(word: str) -> str:
        if word not in allowed:
            raise argparse.ArgumentTypeError(f"got {word!r}, wanted {', '.join(allowed)}")
        return word

    return one


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted NAME=VALUE")
    return name, value
