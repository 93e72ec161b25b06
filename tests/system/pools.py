"""What the audit must say of a cluster that has nothing to do."""

from __future__ import annotations

from kvferry.cluster.client import Client
from kvferry.protos import kvferry_pb2 as pb
from tests.system.processes import SOON_S, eventually

HELD = ("num_pinned", "num_in_transfer", "num_referenced", "num_quarantined")


def held(pool: pb.Pool) -> int:
    """Blocks that somebody still holds."""
    return sum(getattr(pool, name) for name in HELD)


def consistent(audit: pb.AuditResponse) -> bool:
    """Every pool's counts agree with its owners, and its classes sum up to its blocks."""
    return all(
        pool.consistent
        and not pool.problems
        and pool.num_free + pool.num_cached + held(pool) == pool.num_total
        for pool in audit.pools
    )


def assert_quiet(client: Client, within_s: float = SOON_S) -> None:
    """Soon nobody holds a block on any worker, and every audit until then is consistent."""

    def audit() -> pb.AuditResponse:
        found = client.audit()
        assert len(found.pools) == 2
        assert consistent(found), found
        return found

    eventually(
        "the pools are given back",
        audit,
        lambda found: not any(held(pool) for pool in found.pools),
        within_s,
    )


def counters(client: Client) -> pb.Counters:
    """The router's totals."""
    return client.status().counters
