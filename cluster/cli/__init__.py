"""The ``kvferry`` command: flags, documents, exit codes; one module per command.

Reads the environment (the only room that does) and decides what people see. A command's module is
imported only when that command runs, so that help and the client commands load neither torch nor
ray.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvferry ARGV`` (default: the process's arguments); returns the exit code."""
    try:
        from kvferry.cluster.cli import app
    except KeyboardInterrupt:  # before there is a command that could say it better
        print("kvferry: interrupted", file=sys.stderr)
        return 130
    return app.main(argv)
