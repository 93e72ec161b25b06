"""What the cluster said of itself while it was under load: a small series, and totals. Pure.

Statuses go in, with the moments at which they came. Counters belong to a worker's epoch: one that
was restarted began anew, and what its predecessor had counted since the last look is not known. Of
a worker that is lost, or only starts, a status says nothing but that: its zeros are no figures, and
what was last known of its counters stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.cluster.loadgen.measures import Pass
from kvferry.cluster.reports.common import Json
from kvferry.protos import kvferry_pb2 as pb

MAX_ROWS = 240

_CACHE_COUNTERS = (
    "queried_tokens",
    "hit_tokens_local",
    "hit_tokens_moved",
    "hit_tokens_host",
    "num_evictions",
    "num_cow_copies",
    "preemptions_recompute",
    "preemptions_offload",
    "recomputed_tokens_preemption",
    "recomputed_tokens_recovery",
)
_REQUEST_COUNTERS = tuple(field.name for field in pb.Counters.DESCRIPTOR.fields)


@dataclass(slots=True)
class ServerSeries:
    """Statuses of one repeat by their moments: one before it, some during, one after it."""

    moments: list[float] = field(default_factory=list)
    statuses: list[pb.StatusResponse] = field(default_factory=list)
    num_missed: int = 0  # looks that no answer came to

    def add(self, moment: float, status: pb.StatusResponse) -> None:
        """One look; moments rise."""
        self.moments.append(moment)
        self.statuses.append(status)


def server_json(series: ServerSeries, measured: Pass) -> Json | None:
    """``server`` of one repeat; None where no status was to be had."""
    if not series.statuses:
        return None
    return {
        "series": _rows(series, measured),
        "totals": {**_growth(series.statuses)[-1], **_of_requests(measured)},
        "num_missed": series.num_missed,
    }


def _rows(series: ServerSeries, measured: Pass) -> list[Json]:
    """At most ``MAX_ROWS``, evenly chosen, the first and last ones among them."""
    totals = _growth(series.statuses)
    count = len(series.statuses)
    chosen = set(range(count))
    if count > MAX_ROWS:
        chosen = {round(at * (count - 1) / (MAX_ROWS - 1)) for at in range(MAX_ROWS)}
    return [_row(series, measured, at, totals[at]) for at in sorted(chosen)]


def _row(series: ServerSeries, measured: Pass, at: int, totals: Mapping[str, int]) -> Json:
    moment, status = series.moments[at], series.statuses[at]
    workers = _known(status)
    ended = [
        sample.receipt.server
        for sample in measured.samples
        if sample.receipt.server is not None and sample.receipt.ended_at <= moment
    ]
    return {
        "t_s": moment - measured.started_at,
        "in_flight": sum(
            sample.receipt.was_sent
            and sample.receipt.sent_at <= moment
            and (sample.receipt.ended_at > moment or sample.receipt.ended_at == 0)
            for sample in measured.samples
        ),
        "num_running": sum(worker.num_running for worker in workers),
        "num_waiting": sum(worker.num_waiting for worker in workers),
        "num_swapped": sum(worker.num_swapped for worker in workers),
        "queued_tokens": sum(worker.queued_tokens for worker in workers),
        "num_at_routers": sum(router.num_in_flight for router in status.routers),
        "kv_usage": {worker.worker.worker_id: worker.kv.usage for worker in workers},
        "preemptions": totals["preemptions_recompute"] + totals["preemptions_offload"],
        "recomputed_tokens": (
            totals["recomputed_tokens_preemption"] + totals["recomputed_tokens_recovery"]
        ),
        "blocks_moved": sum(facts.blocks_moved for facts in ended),
        "bytes_moved": sum(facts.bytes_moved for facts in ended),
        "hit_tokens_local": totals["hit_tokens_local"],
        "hit_tokens_moved": totals["hit_tokens_moved"],
        "hit_tokens_host": totals["hit_tokens_host"],
    }


def _known(status: pb.StatusResponse) -> list[pb.WorkerStatus]:
    """The workers of which it says more than that they are there, or were."""
    return [each for each in status.workers if each.worker.state not in ("lost", "starting")]


def _growth(statuses: Sequence[pb.StatusResponse]) -> list[dict[str, int]]:
    """Growth of every counter from the first status to each, over all workers. It never falls."""
    first = statuses[0]
    was_there = {_life(each) for each in first.workers if each.worker.state != "starting"}
    baselines: dict[tuple[str, int], pb.CacheCounters] = {}
    most: dict[tuple[tuple[str, int], str], int] = {}
    of_requests = dict.fromkeys(_REQUEST_COUNTERS, 0)
    found = []
    for number, status in enumerate(statuses):
        for worker in _known(status):
            life = _life(worker)
            if life not in baselines:  # one that came later counted from nothing
                baselines[life] = worker.cache if life in was_there else pb.CacheCounters()
            for name in _CACHE_COUNTERS:
                grown = getattr(worker.cache, name) - getattr(baselines[life], name)
                most[life, name] = max(grown, most.get((life, name), 0))
        if number:
            _add_requests(of_requests, statuses[number - 1], status)
        totals = dict.fromkeys(_CACHE_COUNTERS, 0)
        for (_, name), grown in most.items():
            totals[name] += grown
        found.append({**totals, **of_requests})
    return found


def _life(worker: pb.WorkerStatus) -> tuple[str, int]:
    return worker.worker.worker_id, worker.worker.epoch


def _add_requests(
    totals: dict[str, int], earlier: pb.StatusResponse, later: pb.StatusResponse
) -> None:
    """The router's counters, which begin anew with it; what they fall by otherwise is no news.

    ``stale_refused`` is a sum over live workers, and falls when one dies.
    """
    lives = [{(each.router_id, each.epoch) for each in s.routers} for s in (earlier, later)]
    for name in _REQUEST_COUNTERS:
        now, then = getattr(later.counters, name), getattr(earlier.counters, name)
        begun_anew = now < then and lives[0] != lives[1] and name != "stale_refused"
        totals[name] += now if begun_anew else max(0, now - then)


def _of_requests(measured: Pass) -> dict[str, int]:
    """What the terminal events of all requests add up to, counted ones or not."""
    told = [s.receipt.server for s in measured.samples if s.receipt.server is not None]
    return {
        "blocks_moved": sum(facts.blocks_moved for facts in told),
        "bytes_moved": sum(facts.bytes_moved for facts in told),
        "blocks_reused": sum(facts.blocks_reused for facts in told),
        "request_preemptions": sum(facts.num_preemptions for facts in told),
        "recomputed_prompt_tokens": sum(facts.recomputed_prompt_tokens for facts in told),
    }
