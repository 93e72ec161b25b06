"""From the router and its recorder to the samples of every metric, at one moment.

Pure, and quick enough for the router's own loop: what costs time is turning samples into text
(``cluster.metrics.exposition``), which may be done elsewhere, for nothing here changes afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from kvferry.cluster.deaths import DeathCause
from kvferry.cluster.errors import STATUS
from kvferry.cluster.metrics import catalog
from kvferry.cluster.metrics.catalog import Metric
from kvferry.cluster.metrics.ledger import KnownWorker, Totals
from kvferry.cluster.registry import WorkerRecord
from kvferry.cluster.routed_request import RequestState
from kvferry.cluster.router import Router
from kvferry.engine.histogram import Histogram
from kvferry.engine.request import FinishReason
from kvferry.worker.messages import FailureCause, LoadReport, NodeRef, Role

ROUTER_ROLE = "router"
Value = float | Histogram


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker runs, for the labels of ``kvferry_info``."""

    kernels: str
    isa: str
    connectors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric's samples: the values of all its labels, and a number or a histogram."""

    metric: Metric
    samples: list[tuple[tuple[str, ...], Value]] = field(default_factory=list)


@dataclass(slots=True)
class _Sheet:
    """The families being filled; every metric has one from the start, so that none is missing."""

    model_name: str
    families: dict[Metric, Family] = field(
        default_factory=lambda: {metric: Family(metric) for metric in catalog.CATALOG}
    )

    def add(self, metric: Metric, worker_id: str, role: str, value: Value, *labels: str) -> None:
        """One sample."""
        common = (self.model_name, worker_id, role)
        self.families[metric].samples.append(((*common, *labels), value))


def families(
    router: Router,
    model_name: str,
    version: str,
    infos: Mapping[NodeRef, WorkerInfo],
    now: float,
) -> list[Family]:
    """Every metric of the catalogue with its samples now (router clock)."""
    sheet = _Sheet(model_name)
    _add_router(sheet, router)
    live = {record.ref: record for record in router.workers}
    for known, totals in router.recorder.ledger.totals():
        name, role = known.ref.node_id, role_label(known.roles)
        _add_totals(sheet, name, role, totals)
        record = live.get(known.ref)
        _add_state(sheet, known, role, record, now)
        for cause in DeathCause:
            sheet.add(catalog.DEATHS, name, role, known.deaths[cause], cause.value)
        info = infos.get(known.ref)
        if record is not None and info is not None:
            labels = (version, info.kernels, info.isa, ",".join(info.connectors))
            sheet.add(catalog.INFO, name, role, 1.0, *labels)
    return list(sheet.families.values())


def role_label(roles: tuple[Role, ...]) -> str:
    """``colocated`` for a worker with both roles."""
    return roles[0].value if len(roles) == 1 else "colocated"


def _add_router(sheet: _Sheet, router: Router) -> None:
    name, recorder = router.ref.node_id, router.recorder

    def add(metric: Metric, value: Value, *labels: str) -> None:
        sheet.add(metric, name, ROUTER_ROLE, value, *labels)

    queued = (r for r in router.requests.values() if r.state is RequestState.QUEUED)
    add(catalog.WAITING, sum(1 for _ in queued))
    add(catalog.ACCEPTED, router.counters["accepted"])
    for reason in FinishReason:
        add(catalog.FINISHED, router.counters[f"finished_{reason.value}"], reason.value)
    add(catalog.GENERATION_TOKENS, recorder.generation_tokens)
    for metric in (catalog.PROMPT_TOKENS, catalog.RECOMPUTED_PROMPT, catalog.REUSED):
        add(metric, recorder.counts[metric, ()])
    told = dict.fromkeys(_from_the_start(), 0) | recorder.counts
    for (metric, labels), count in told.items():
        if labels:
            add(metric, count, *labels)
    for metric, histogram in recorder.histograms.items():
        add(metric, replace(histogram, counts=list(histogram.counts)))
    for kind, count in router.channels.refused.items():
        add(catalog.STALE, count, kind)
    for kind, counter in (("attempt", "stale_refused"), ("unexpected", "unexpected_messages")):
        if router.counters[counter]:
            add(catalog.STALE, router.counters[counter], kind)


def _from_the_start() -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """What can be counted is there as 0 before it is: a series that begins at 1 has no increase."""
    for cause in FailureCause:
        yield catalog.RECOVERED, (cause.value,)
    for error in STATUS:
        yield catalog.ERRORS, (error.__name__,)
        yield catalog.REJECTED, (error.__name__,)
    for port in ("http", "metrics"):
        yield catalog.CONNECTIONS_REFUSED, (port, "tls")
    yield catalog.CONNECTIONS_REFUSED, ("http", "malformed")


def _add_totals(sheet: _Sheet, name: str, role: str, totals: Totals) -> None:
    for (metric, labels), count in totals.counters.items():
        sheet.add(metric, name, role, count, *labels)
    for (metric, labels), histogram in totals.histograms.items():
        sheet.add(metric, name, role, histogram, *labels)


def _add_state(
    sheet: _Sheet, known: KnownWorker, role: str, record: WorkerRecord | None, now: float
) -> None:
    """What there is now; of a dead worker only that it is not ready."""
    name, load = known.ref.node_id, record.load if record is not None else None
    if not known.retired:
        ready = record is not None and load is not None and not record.draining
        sheet.add(catalog.WORKER_READY, name, role, float(ready))
    if record is None:
        return
    sheet.add(catalog.HEARTBEAT_AGE, name, role, max(0.0, now - record.last_heard))
    if load is None:
        return
    for metric, value in _gauges(load):
        sheet.add(metric, name, role, value)
    for block_class, count in load.block_classes:
        sheet.add(catalog.KV_BLOCKS, name, role, count, block_class)


def _gauges(load: LoadReport) -> Iterator[tuple[Metric, float]]:
    yield catalog.RUNNING, load.num_running
    yield catalog.WAITING, load.num_waiting + load.num_full
    yield catalog.SWAPPED, load.num_swapped
    yield catalog.LEASES_ACTIVE, load.num_leases
    if load.num_blocks:
        yield catalog.KV_USAGE, 1.0 - load.num_free_blocks / load.num_blocks
