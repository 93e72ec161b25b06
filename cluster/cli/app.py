"""Picks the command, runs it, and turns how it ended into a document and an exit code.

Exit codes: 0 ok, 1 run failed, 2 usage or configuration, 3 model or port missing, 4 cluster
unreachable, 130 interrupted. With ``--json`` exactly one document goes to standard output, also on
failure; everything for people then goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import import_module
from typing import NoReturn, TextIO

from kvferry.cluster.cli.command import EXIT_FAILED, Command, Result, UsageError
from kvferry.cluster.reports.common import distribution_version
from kvferry.kv_cache.errors import KVFerryError

COMMANDS = {
    "demo": "start a small cluster, serve a few prompts, show what moved, and stop",
    "serve": "start a cluster and serve until interrupted",
    "generate": "stream the continuation of a prompt",
    "status": "show workers, load and counters of a running cluster",
    "blocks": "recount every KV block of a running cluster from its owners",
    "scale": "grow or shrink a running cluster",
    "drain": "take one worker of a running cluster out of service",
    "down": "end clusters that 'serve' has started, whatever became of it",
    "models": "list or fetch models",
    "bench": "measure kernels, engine steps or a running cluster",
    "loadgen": "send a made-up or replayed load to a running server, and measure",
    "chaos": "end real processes under load, in every state of a request, and count",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvferry ARGV`` (default: the process's arguments); returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # text is not lost to a poor terminal
    name = _name_in(argv)
    command = _load(name) if name in COMMANDS else None
    wants_document = "--json" in argv
    out = sys.stdout
    with contextlib.ExitStack() as until_told:
        try:
            args = _parser(name, command).parse_args(argv)
            args.argv = argv
            wants_document = getattr(args, "json", False)
            run: Callable[[argparse.Namespace], Result] = args.run
            if wants_document:  # Ray reports a dead process on standard output, whenever it hears
                until_told.enter_context(contextlib.redirect_stdout(sys.stderr))
            result = run(args)
        except (Exception, KeyboardInterrupt) as exc:  # the boundary: however it ended is reported
            result = Result(error=exc)
        try:
            _report(result, command if wants_document else None, argv, out)
            out.flush()
        except BrokenPipeError:
            return _reader_gone(out)
    if isinstance(result.error, BrokenPipeError):
        return _reader_gone(out)
    return result.exit_code


def parser_of(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command that ``argv`` names; it raises UsageError."""
    name = _name_in(argv)
    return _parser(name, _load(name) if name in COMMANDS else None)


def _name_in(argv: Sequence[str]) -> str:
    return next((word for word in argv if not word.startswith("-")), "")


def _load(name: str) -> Command:
    command: Command = import_module(f"kvferry.cluster.cli.{name}").COMMAND
    return command


def _parser(chosen: str, command: Command | None) -> argparse.ArgumentParser:
    """A parser that knows every command's name and the chosen one's flags."""
    parser = _Parser(prog="kvferry", description="Serve language models on moved KV blocks.")
    version = distribution_version("kvferry") or "unknown"
    parser.add_argument("--version", action="version", version=f"kvferry {version}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
        )
        if name == chosen and command is not None:
            command.configure(sub)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, self.format_usage().rstrip())


def _report(result: Result, command: Command | None, argv: list[str], out: TextIO) -> None:
    """Print the command's document to ``out``, or else the error for people."""
    error = result.error
    if error is not None and not isinstance(error, KVFerryError | KeyboardInterrupt | OSError):
        traceback.print_exception(error)
    document = command.document_of(argv) if command is not None else None
    if document is not None:
        print(document.render(result, argv, datetime.now(UTC)), file=out)
    elif error is not None and not isinstance(error, BrokenPipeError):
        message = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
        print(f"kvferry: {message}", file=sys.stderr)
        if isinstance(error, UsageError) and error.usage:
            print(error.usage, file=sys.stderr)


def _reader_gone(out: TextIO) -> int:
    """Nobody reads our output any more: end quietly, without a second fault at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
    return EXIT_FAILED
