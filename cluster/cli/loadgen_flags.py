"""The flags of ``kvferry loadgen run``, and the settings that they make.

A flag is a setting of ``loadgen.settings`` by its name; what is not given stays what the earlier
document of ``--again`` says, or the default.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvferry.cluster.cli.flags import DEFAULT_ENDPOINT, add_security, host_port
from kvferry.cluster.loadgen.arrivals import ARRIVALS, GAMMA
from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.sessions import FORMS
from kvferry.cluster.loadgen.settings import OF_WORKLOADS, WORKLOADS, Settings
from kvferry.cluster.loadgen.traces import AUTO, FORMATS

DEFAULTS = Settings()

# flag (and so the setting), metavar, type, help
_Flag = tuple[str, str, Callable[[str], Any], str]

_TARGET: tuple[_Flag, ...] = (
    ("model", "NAME", str, "model to ask for (default: the served one; over HTTP the first)"),
    ("vocab_size", "N", int, "made-up ids are below it (default: the model's; HTTP: 32000)"),
    ("temperature", "T", float, f"0 is greedy (default: {DEFAULTS.temperature:g})"),
    ("timeout", "S", float, "a request that takes longer fails (default: none)"),
)
_WORKLOAD: tuple[_Flag, ...] = (
    ("num_requests", "N", int, "sessions of one repeat; of a trace or prompts the first N"),
    ("input_tokens", "LENGTH", str, "of each turn"),
    ("output_tokens", "LENGTH", str, "of each answer"),
    ("opening_tokens", "LENGTH", str, "of what sessions of a group begin with; tools of agents"),
    ("shared_ratio", "R", float, "share of sessions that begin as their group does; 0 to 1"),
    ("groups", "N", int, "how many different openings are shared"),
    ("turns", "LENGTH", str, "of each session"),
    ("think", "S", float, "seconds between an answer and the next turn"),
    ("cancel_share", "R", float, "share of requests that the client gives up; 0 to 1"),
    ("cancel_within", "S", float, "they are given up at a random moment of so many seconds"),
    ("trace", "FILE", str, "trace to replay"),
    ("divide_input", "N", int, "prompts (and blocks) of a trace are N times shorter"),
    ("divide_output", "N", int, "answers of a trace are N times shorter"),
    ("prompts", "FILE", str, "JSON lines of prompts"),
)
_ARRIVALS: tuple[_Flag, ...] = (
    ("concurrency", "N", int, "closed loop: sessions in flight (default: 8)"),
    ("rate", "R", float, "open loop: sessions that begin per second, whatever becomes of others"),
    ("burstiness", "B", float, "shape of gamma gaps; 1 is Poisson, less comes in bursts"),
    ("on", "S", float, "open loop: the rate holds for so long ..."),
    ("off", "S", float, "... and nothing begins for so long, again and again"),
    ("ramp", "S", float, "the load grows for so long, and is not counted meanwhile (default: 0)"),
    ("stretch", "X", float, "a trace's times are multiplied by it (default: 1)"),
    ("grid", "S", float, "a trace's times are spread over a grid of so many seconds (default: 0)"),
)
_MEASURE: tuple[_Flag, ...] = (
    ("seed", "S", int, f"of everything that is made up (default: {DEFAULTS.seed})"),
    ("repeats", "N", int, f"passes, each with tokens of its own (default: {DEFAULTS.repeats})"),
    ("warm_up", "N", int, f"sessions before them, not counted (default: {DEFAULTS.warm_up})"),
    ("poll", "S", float, f"between looks at the cluster's status (default: {DEFAULTS.poll})"),
)


def configure_run(parser: argparse.ArgumentParser) -> None:
    """Add every flag of a run."""
    parser.epilog = (
        "LENGTH is N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA[:LOW:HIGH], or a mixture "
        "mix:SHARE*LENGTH,SHARE*LENGTH. What a workload takes where a flag is not given, and what "
        "is measured: docs/loadgen.md."
    )
    parser.add_argument(
        "--again",
        metavar="DOCUMENT",
        help="take the settings of an earlier run's JSON document; flags override them, and what "
        "they exclude (an endpoint the url, a concurrency the rate)",
    )
    _add_target(parser.add_argument_group("target"))
    add_load(parser)


def add_load(parser: argparse.ArgumentParser) -> None:
    """Flags of what is sent, when, and how it is measured; none of the target."""
    _add_workload(parser.add_argument_group("workload"))
    _add_arrivals(parser.add_argument_group("arrivals"))
    group = parser.add_argument_group("measurement")
    _add(group, _MEASURE)
    group.add_argument(
        "--slo",
        metavar="ttft=S,tpot=S",
        type=_slo,
        default=argparse.SUPPRESS,
        help="what a good request keeps to, in seconds; goodput counts those",
    )


def _add(group: argparse._ArgumentGroup, flags: tuple[_Flag, ...]) -> None:
    for name, metavar, kind, text in flags:
        group.add_argument(
            f"--{name.replace('_', '-')}",
            metavar=metavar,
            type=kind,
            default=argparse.SUPPRESS,
            help=text,
        )


def _add_target(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--endpoint",
        metavar="HOST:PORT",
        type=host_port,
        default=argparse.SUPPRESS,
        help=f"gRPC address of a cluster, or set KVFERRY_ENDPOINT (default: {DEFAULT_ENDPOINT})",
    )
    group.add_argument(
        "--url",
        metavar="URL",
        default=argparse.SUPPRESS,
        help="OpenAI-compatible server instead, such as http://127.0.0.1:8000",
    )
    group.add_argument(
        "--api-key-env",
        metavar="NAME",
        help="environment variable that holds the key for --url (default: no key)",
    )
    add_security(group)
    group.add_argument(
        "--body",
        metavar="JSON",
        type=_json_object,
        default=argparse.SUPPRESS,
        help="fields that every HTTP request has beside its own; null takes one away",
    )
    group.add_argument(
        "--send",
        choices=FORMS,
        default=argparse.SUPPRESS,
        help="how prompts are sent: token ids, text, or chat messages (default: "
        f"{DEFAULTS.send}; text for --workload prompts)",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="answers have exactly the length that was drawn, else at most (default: yes)",
    )
    _add(group, _TARGET)


def _add_workload(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workload",
        choices=tuple(WORKLOADS),
        default=argparse.SUPPRESS,
        help=f"(default: {DEFAULTS.workload}, or what --trace or --prompts asks for)",
    )
    _add(group, _WORKLOAD)
    group.add_argument(
        "--trace-format",
        choices=(AUTO, *FORMATS),
        default=argparse.SUPPRESS,
        help=f"(default: {AUTO}, by the names of its first row)",
    )


def _add_arrivals(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--arrival",
        choices=ARRIVALS,
        default=argparse.SUPPRESS,
        help="gaps of an open loop (default: poisson)",
    )
    _add(group, _ARRIVALS)


def _slo(text: str) -> dict[str, float]:
    """An argument type: ``ttft=S,tpot=S``, one of them or both."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if name not in ("ttft", "tpot") or not equals or name in found:
            raise argparse.ArgumentTypeError(f"got {text!r}, wanted ttft=S,tpot=S")
        found[name] = float(value)
    return found


def _json_object(text: str) -> dict[str, Any]:
    """An argument type: a JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a JSON object")
    return value


def settings_of(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Settings:
    """The run that the arguments ask for, resolved. Raises BadLoad."""
    given = given_of(args)
    if "endpoint" in given and "url" in given:
        raise BadLoad("got endpoint and url; wanted one: a cluster over gRPC, or an HTTP server")
    if args.again is not None:
        return again(_earlier(Path(args.again)), given).resolved()
    if "endpoint" not in given:
        given["endpoint"] = environment.get("KVFERRY_ENDPOINT") or DEFAULT_ENDPOINT
    return Settings(**implied(given)).resolved()


def again(earlier: Settings, given: Mapping[str, Any]) -> Settings:
    """An earlier run's settings with what is given now over them.

    What is given takes the place of what excludes it, and of what depends on that: an endpoint that
    of a url, with its body and its name of the model, and the other way round; a rate that of a
    concurrency and of a trace's own times, and so on; a workload that of another with all that
    shapes it.
    """
    given = dict(implied(given))
    cleared: set[str] = set()
    if "endpoint" in given and earlier.url is not None:
        cleared |= {"url", "body", "model"}
    if "url" in given and earlier.url is None:
        cleared |= {"endpoint", "model"}
    if given.get("workload", earlier.workload) != earlier.workload:
        cleared |= OF_WORKLOADS
    for names in (_OPEN, _CLOSED, _OWN_TIMES):
        if given.keys() & names:
            cleared |= (_OPEN | _CLOSED | _OWN_TIMES) - names
    if given.get("arrival", GAMMA) != GAMMA:
        cleared.add("burstiness")
    defaults = {name: getattr(DEFAULTS, name) for name in cleared}
    return replace(earlier, **(defaults | given))


def given_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that flags gave, by name."""
    given = {name: value for name, value in vars(args).items() if name in _SETTINGS}
    return given | {f"slo_{name}": value for name, value in getattr(args, "slo", {}).items()}


def implied(given: Mapping[str, Any]) -> dict[str, Any]:
    """With the workload that a file asks for, and the form that fits it."""
    whole = dict(given)
    for workload in ("trace", "prompts"):
        if workload in given:
            whole.setdefault("workload", workload)
    if whole.get("workload") == "prompts":
        whole.setdefault("send", "text")
    return whole


_SETTINGS = frozenset(DEFAULTS.to_json())
_OPEN = frozenset(("rate", "arrival", "burstiness", "on", "off"))
_CLOSED = frozenset(("concurrency",))
_OWN_TIMES = frozenset(("stretch", "grid"))


def _earlier(path: Path) -> Settings:
    """The settings of a document."""
    try:
        config = json.loads(path.read_bytes())["config"]
        return Settings.from_json(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadLoad(
            f"again: {str(path)!r} is no document of loadgen run: {type(error).__name__}: {error}"
        ) from error
