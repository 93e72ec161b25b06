"""The root of the project's errors.

Each class stands beside its cause, in its own room; the whole tree is drawn in
``kvferry.cluster.errors``, which maps it to gRPC and HTTP statuses.
"""

from __future__ import annotations


class KVFerryError(Exception):
    """Base of every error that KVFerry raises on purpose.

    The message names the value it got, the value it wanted, and what to do.
    """
