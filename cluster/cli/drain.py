"""``kvferry drain``: take one worker of a running cluster out of service."""

from __future__ import annotations

import argparse

from kvferry.cluster.cli.command import Command, Result
from kvferry.cluster.cli.document import Document
from kvferry.cluster.cli.flags import add_endpoint, add_json, people, security_of
from kvferry.cluster.client import Client


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("worker", metavar="WORKER", help="its id, as 'kvferry status' shows it")
    parser.add_argument(
        "--timeout",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="stop waiting after so long; the worker goes on draining (default: wait)",
    )
    add_endpoint(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> Result:
    """Drain and say so; the worker takes nothing new, finishes what it has, and is ended."""
    people(args).print(f"draining {args.worker}: its streams finish, nothing new is placed there")
    with Client(args.endpoint, security=security_of(args)) as client:
        client.drain(args.worker, timeout_s=args.timeout)
    people(args).print(f"{args.worker} holds nothing any more and is ended")
    return Result(fields={"worker_id": args.worker})


COMMAND = Command(configure, Document("drain", ("worker_id",)))
