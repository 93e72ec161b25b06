"""``kvferry down``: end clusters that ``serve`` has started, whatever became of it."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from importlib import import_module

from kvferry.cluster.cli.command import Command, Result, UsageError
from kvferry.cluster.cli.document import Document
from kvferry.cluster.cli.flags import add_json, people
from kvferry.cluster.config import load_config
from kvferry.cluster.own_ray import Note, end, read_notes
from kvferry.cluster.reports.common import Json

GRACE_S = 5.0
SERVER_STOPS_S = 10.0  # beside the grace; what is there after that is killed


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = (
        "With --address: actors, placement groups and autoscaler requests of the namespace, and "
        "nothing else of that Ray. Without: the cluster on this host that has a Ray of its own, "
        "and that Ray. Nothing there to end is no failure."
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML configuration, for ray.address and ray.namespace (default: none)",
    )
    parser.add_argument(
        "--address",
        metavar="RAY_ADDRESS",
        help="the Ray that was joined, HOST:PORT or auto (default: the configuration's, or none)",
    )
    parser.add_argument(
        "--pid",
        metavar="PID",
        type=int,
        help="of several clusters on this host, the one that this process serves (default: none)",
    )
    parser.add_argument(
        "--all", action="store_true", help="every cluster on this host with a Ray of its own"
    )
    parser.add_argument(
        "--grace",
        metavar="SECONDS",
        type=float,
        default=GRACE_S,
        help="what streams have to finish, on a Ray that was joined (default: %(default)g)",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> Result:
    """End what there is, and say what it was."""
    config = load_config(args.config, {"ray.address": args.address})
    if config.ray.address is None:
        clusters = [_end(note) for note in _chosen(read_notes(), args)]
    elif args.pid is not None or args.all:
        raise UsageError(
            "--pid and --all are of clusters with a Ray of their own: leave out --address"
        )
    else:
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # as serve does
        ours = import_module("kvferry.cluster.ours")
        is_ours = import_module("kvferry.cluster.ray_session").init_ray(config)
        found = asdict(ours.take_down(config.ray.namespace, args.grace))
        if is_ours:  # or it could report a dead node beside the document
            import_module("ray").shutdown()
        clusters = [_joined(found, config.ray.namespace)] if any(_counts(found)) else []
    for cluster in clusters:
        what = f"the cluster on Ray at {cluster['ray_address']}"
        people(args).print(f"{what} is down", markup=False)
    if not clusters:
        people(args).print("nothing to take down")
    return Result(fields={"clusters": clusters})


def _chosen(notes: list[Note], args: argparse.Namespace) -> list[Note]:
    """Raises UsageError where it is not clear which one is meant."""
    if args.pid is not None:
        return [note for note in notes if note.server.pid == args.pid]
    if len(notes) > 1 and not args.all:
        pids = ", ".join(str(note.server.pid) for note in notes)
        raise UsageError(
            f"there are {len(notes)} clusters on this host: --pid one of {pids}, or --all"
        )
    return notes


def _end(note: Note) -> Json:
    return {
        "kind": "own",
        "ray_address": note.ray_address,
        "namespace": None,
        "pid": note.server.pid,
        "num_actors": None,
        "num_placement_groups": None,
        "num_killed": end(note, GRACE_S + SERVER_STOPS_S),
    }


def _counts(found: Json) -> tuple[int, int]:
    return found["num_actors"], found["num_groups"]


def _joined(found: Json, namespace: str) -> Json:
    num_actors, num_groups = _counts(found)
    return {
        "kind": "joined",
        "ray_address": found["ray_address"],
        "namespace": namespace,
        "pid": None,
        "num_actors": num_actors,
        "num_placement_groups": num_groups,
        "num_killed": None,
    }


COMMAND = Command(configure, Document("down", ("clusters",)))
