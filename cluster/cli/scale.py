"""``kvferry scale``: grow or shrink a running cluster."""

from __future__ import annotations

import argparse

from kvferry.cluster.cli.command import Command, Result, UsageError
from kvferry.cluster.cli.document import Document
from kvferry.cluster.cli.flags import add_endpoint, add_json, people, security_of
from kvferry.cluster.client import Client
from kvferry.cluster.scaling import ROLES


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = (
        "New workers are placed and started; those that are too many, the newest first, take "
        "nothing new, finish their streams, and are ended with their reservations. Those that are "
        "leaving already count as gone. The command returns when there are as many as were asked "
        "for; a later order, or a drain in a role that it names, ends it."
    )
    for role in ROLES:
        parser.add_argument(
            f"--{role}",
            metavar="N",
            type=int,
            help=f"{role} workers there are to be (default: as many as there are to be now)",
        )
    parser.add_argument(
        "--timeout",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="stop waiting after so long; the cluster goes on growing or shrinking (default: wait)",
    )
    add_endpoint(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> Result:
    """Order it, wait, and say how many there are."""
    counts = {role: getattr(args, role) for role in ROLES if getattr(args, role) is not None}
    if not counts:
        raise UsageError("say how many: --prefill N, --decode N or --colocated N")
    listed = ", ".join(f"{number} {role}" for role, number in counts.items())
    people(args).print(f"scaling to {listed}")
    with Client(args.endpoint, security=security_of(args)) as client:
        present = client.scale(timeout_s=args.timeout, **counts)
    found = {role: getattr(present, role) for role in ROLES}
    there = ", ".join(f"{number} {role}" for role, number in found.items() if number)
    people(args).print(f"there are {there}")
    return Result(fields=found)


COMMAND = Command(configure, Document("scale", ROLES))
