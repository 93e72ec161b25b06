"""Flags that several commands share, and the environment variables behind them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kvferry.cluster.cli.command import UsageError

if TYPE_CHECKING:
    from kvferry.cluster.client_security import ClientSecurity

TOKEN_VARIABLE = "KVFERRY_TOKEN"
DEFAULT_ENDPOINT = "127.0.0.1:50051"
WIDTH = 200


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document to standard output"
    )


def add_endpoint(parser: argparse.ArgumentParser) -> None:
    """``--endpoint``, else KVFERRY_ENDPOINT, else the local default."""
    parser.add_argument(
        "--endpoint",
        metavar="HOST:PORT",
        type=host_port,
        default=os.environ.get("KVFERRY_ENDPOINT") or DEFAULT_ENDPOINT,
        help="gRPC address of the cluster, or set KVFERRY_ENDPOINT (default: %(default)s)",
    )
    add_security(parser)


def add_security(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """What a server with TLS or tokens asks for; never a secret itself."""
    for flag, text in (
        ("--tls-ca", "PEM file of who has signed the server's certificate; speaks TLS"),
        ("--tls-cert", "PEM file of the client's own certificate"),
        ("--tls-key", "PEM file of its key"),
    ):
        variable = f"KVFERRY_{flag[2:].replace('-', '_').upper()}"
        parser.add_argument(
            flag,
            metavar="FILE",
            default=os.environ.get(variable) or None,
            help=f"{text}, or set {variable} (default: none)",
        )
    parser.add_argument(
        "--token-env",
        metavar="NAME",
        help=f"environment variable that holds the token (default: {TOKEN_VARIABLE}, if it is set)",
    )


def security_of(args: argparse.Namespace) -> ClientSecurity:
    """What the flags of ``add_security`` and the environment say. Raises UsageError."""
    token = os.environ.get(args.token_env or TOKEN_VARIABLE) or None
    if args.token_env and token is None:
        raise UsageError(f"--token-env: got {args.token_env}, which is not set")
    module = import_module("kvferry.cluster.client_security")  # grpc: not for help
    made: ClientSecurity = module.ClientSecurity(args.tls_ca, args.tls_cert, args.tls_key, token)
    return made


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Flags that override the configuration file, shared by ``demo`` and ``serve``."""
    parser.add_argument("--config", metavar="FILE", help="YAML configuration (default: none)")
    parser.add_argument(
        "--model",
        metavar="NAME|PATH|HF_ID",
        help="a name that 'models list' shows, a folder, a .gguf file, or ORG/NAME of the Hugging "
        "Face Hub (default: the first name)",
    )
    parser.add_argument(
        "--revision",
        metavar="REV",
        help="branch, tag or commit of a model of the Hugging Face Hub (default: main)",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "int8"),
        help="weights' type; auto is float32 on CPU, int8 loses quality (default: auto)",
    )
    for role, default in (("prefill", 1), ("decode", 1)):
        parser.add_argument(
            f"--{role}", metavar="N", type=int, help=f"{role} workers (default: {default})"
        )
    parser.add_argument(
        "--connector",
        choices=("auto", "shm", "tcp"),
        help="how KV blocks are moved; auto: shared memory on one host, else TCP (default: auto)",
    )


def cluster_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """The values of ``add_cluster`` and the environment by configuration key; None: not given."""
    return {
        "model.name": args.model,
        "model.revision": args.revision,
        "model.dtype": args.dtype,
        "prefill.replicas": args.prefill,
        "decode.replicas": args.decode,
        "transfer.connector": args.connector,
        "logging.level": os.environ.get("KVFERRY_LOG") or None,
        "debug.kernels": os.environ.get("KVFERRY_KERNELS") or None,
        "debug.isa": os.environ.get("KVFERRY_ISA") or None,
    }


def host_port(text: str) -> str:
    """An argument type: HOST:PORT with a port of 1 to 65535."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted HOST:PORT, port 1 to 65535")
    return text


def seed(text: str) -> int:
    """An argument type: a number of 64 bits."""
    number = int(text)
    if not 0 <= number < 2**64:
        raise argparse.ArgumentTypeError(f"got {text}, wanted 0 to 2**64 - 1")
    return number


def positive(text: str) -> int:
    """An argument type: a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted at least 1")
    return number


def json_objects(path: str) -> list[dict[str, Any]]:
    """An argument type: a file that holds a JSON list of objects."""
    try:
        value = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{path!r} cannot be read: {error}") from error
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise argparse.ArgumentTypeError(
            f"{path!r} holds no list of objects, wanted [{{...}}, ...]"
        )
    return value


def people(args: argparse.Namespace) -> Console:
    """Where output for people goes: standard output, unless a document goes there.

    What is no terminal has no width that a table would have to fit.
    """
    stream = sys.stderr if getattr(args, "json", False) else sys.stdout
    return Console(
        file=stream, markup=False, highlight=False, width=None if stream.isatty() else WIDTH
    )
