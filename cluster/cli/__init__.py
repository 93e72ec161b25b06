"""The ``kvferry`` command: flags, documents, exit codes; one module per command.

Reads the environment (the only room that does) and decides what people see. A command's module is
imported only when that command runs, so that help and the client commands load neither torch nor
ray.
"""

from kvferry.cluster.cli.app import main

__all__ = ["main"]
