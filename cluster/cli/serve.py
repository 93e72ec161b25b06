"""``kvferry serve``: start a cluster and serve until a signal."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvferry.cluster.cli.command import Command, Result, UsageError
from kvferry.cluster.cli.flags import add_cluster, cluster_overrides
from kvferry.cluster.cli.progress import ProgressLine
from kvferry.cluster.cli.signals import StopSignals
from kvferry.cluster.cli.startup import RunningCluster, leave, start
from kvferry.cluster.config import Config, load_config
from kvferry.cluster.ports import is_loopback

GRACE_S = 5.0  # with what ends after it, a stop takes less than 10 s


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = (
        "SIGINT or SIGTERM ends the service: no new requests, running streams have "
        f"{GRACE_S:g} s to finish, then every process ends and the exit code is 0. "
        "During start-up, or a second time, it ends the command at once with exit code 130. "
        "What serves on a Ray that was joined does not end when this command is killed: the same "
        "command takes it up again, and 'kvferry down' ends it."
    )
    add_cluster(parser)
    parser.add_argument(
        "--colocated",
        metavar="N",
        type=int,
        help="workers that do both; with some, the other roles default to 0 (default: 0)",
    )
    parser.add_argument(
        "--grpc",
        metavar="HOST:PORT",
        help="address to serve gRPC on; port 0 picks a free one (default: 127.0.0.1:50051)",
    )
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        help="address to serve the OpenAI-compatible API on; port 0 picks a free one "
        "(default: none)",
    )
    parser.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        help="address to serve metrics for Prometheus on; port 0 picks a free one (default: none)",
    )
    parser.add_argument(
        "--address",
        metavar="RAY_ADDRESS",
        help="join this running Ray cluster, HOST:PORT or auto, and serve on what runs there "
        "already (default: start one of its own)",
    )
    parser.add_argument(
        "--ready-file",
        metavar="FILE",
        type=Path,
        help="also write the READY line to this file, and remove it when stopping (default: none)",
    )
    parser.add_argument(
        "--detach",
        action="store_true",
        help="once it serves, leave it to itself and end with 0; with --address (default: no)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> Result:
    """Serve until SIGINT or SIGTERM, which is how serving ends well; see the help's last lines."""
    config = load_config(
        args.config,
        {
            **cluster_overrides(args),
            "colocated.replicas": args.colocated,
            "server.grpc": args.grpc,
            "server.http": args.http,
            "server.metrics": args.metrics,
            "ray.address": args.address,
        },
    )
    if args.detach and config.ray.address is None:
        raise UsageError("--detach: a Ray of its own ends with this command; give --address")
    if args.ready_file is not None:
        args.ready_file.unlink(missing_ok=True)
    with StopSignals() as signals:
        with ProgressLine(quiet=False, on_news=signals.check) as progress:
            if config.ray.address is None:
                warn(config, progress)
            cluster = start(config, progress)
            if config.ray.address is not None:  # where another may run that has its own
                warn(cluster.config, progress)
        if args.detach:
            announce(cluster, args.ready_file)
            leave(cluster)
            return Result()
        asked = True
        try:
            signals.install()  # whatever start-up put in their place
            signals.started()
            announce(cluster, args.ready_file)
            with contextlib.redirect_stdout(sys.stderr):  # Ray reports a dead process there
                asked = False  # what has become of it by itself is not this command's to end
                asked = signals.wait(cluster.ended)
                if asked:
                    cluster.begin_stop(GRACE_S)
            print(
                f"stopping: streams have {GRACE_S:g} s to finish"
                if asked
                else "the cluster has been taken down",
                file=sys.stderr,
            )
        finally:
            if args.ready_file is not None:
                args.ready_file.unlink(missing_ok=True)
            if asked:
                cluster.stop(GRACE_S)
            else:
                leave(cluster)
    return Result()


def warn(config: Config, progress: ProgressLine) -> None:
    """Say what ``warnings`` finds."""
    for warning in warnings(config, os.environ.get("RAY_AUTH_MODE")):
        progress.say(f"warning: {warning}")


def warnings(config: Config, ray_auth_mode: str | None) -> Iterator[str]:
    """What of this configuration lets in more than its owner may think."""
    server = config.server
    asks = bool(server.auth.tokens_file or config.tenants or server.tls.client_ca)
    for address in (server.grpc, server.http):
        if address is None or is_loopback(address):
            continue
        reach = f"{address} can be reached from other machines"
        if not asks:
            missing = "no authentication" if server.tls.cert else "neither TLS nor authentication"
            yield f"{reach}, and there is {missing}: anybody who reaches it may use the cluster"
        elif not server.tls.cert:
            yield f"{reach}, and there is no TLS: whoever is on the way reads tokens and prompts"
    if server.metrics is not None and not is_loopback(server.metrics) and not asks:
        yield (
            f"{server.metrics} can be reached from other machines, and whoever reaches it may read "
            "the metrics"
        )
    if ray_auth_mode == "disabled" and not config.ray.address:
        yield (
            "RAY_AUTH_MODE is disabled, and Ray listens on every address of this machine: anybody "
            "who reaches it may run code here"
        )


def announce(cluster: RunningCluster, ready_file: Path | None) -> None:
    """Print the READY line, and write it to a file that is asked for."""
    line = ready_line(cluster.grpc, cluster.http, cluster.ray_address, cluster.metrics)
    if ready_file is not None:
        write_whole(ready_file, line + "\n")
    print(line, flush=True)


def ready_line(grpc: str, http: str | None, ray_address: str, metrics: str | None) -> str:
    """The line that says where the cluster listens."""
    facts = {
        "grpc": grpc,
        "http": http,
        "pid": os.getpid(),
        "ray_address": ray_address,
        "metrics": metrics,
    }
    return f"READY {json.dumps(facts, separators=(',', ':'))}"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or none."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


COMMAND = Command(configure, document=None)
