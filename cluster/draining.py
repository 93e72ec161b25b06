"""Taking a worker out of service: nothing new comes to it, what it has goes on to its end. Pure.

A draining worker gets no placement and does not count for readiness. Requests that only wait for
its blocks, or whose prefill was planned for it, go elsewhere; streams finish there, and leases are
read or expire. Knows who holds what of it; does not know how its process is ended.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.cluster.errors import UnknownRequest
from kvferry.cluster.registry import WorkerRegistry
from kvferry.cluster.routed_request import RoutedRequest
from kvferry.worker.messages import AuditReport, NodeRef

FREE_CLASSES = ("free", "cached")


def begin_drain(
    workers: WorkerRegistry, requests: Iterable[RoutedRequest], worker_id: str
) -> NodeRef:
    """Mark a worker as draining; its present life. Again is harmless. Raises UnknownRequest."""
    record = next((r for r in workers if r.ref.node_id == worker_id), None)
    if record is None:
        known = ", ".join(sorted(r.ref.node_id for r in workers)) or "none"
        raise UnknownRequest(f"no live worker {worker_id!r}; there are: {known}")
    record.draining = True
    for request in requests:
        if request.planned_prefill == record.ref and request.prefill is None:
            request.planned_prefill = None
    return record.ref


def serves_any(ref: NodeRef, requests: Iterable[RoutedRequest]) -> bool:
    """Whether a leg of any request is placed on a worker."""
    return any(
        ticket is not None and ticket.worker == ref
        for request in requests
        for ticket in (request.decode, request.prefill)
    )


def holds_any(report: AuditReport) -> bool:
    """Whether, by a worker's audit, somebody still holds one of its blocks."""
    return any(number for name, number in report.counts if name not in FREE_CLASSES)
