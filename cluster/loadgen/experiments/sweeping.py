"""Measures what a sweep lacks: a cluster after the other, on each of them a load after the other.

Points that are known already are not measured again, so a sweep goes on where it was interrupted;
of one that failed the next sweep tries again. What is known grows with every point, and
``on_point`` is called then, to keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from kvferry.cluster.errors import Internal
from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.experiments.renewing import renewed_point
from kvferry.cluster.loadgen.experiments.sweep_plan import Point, Sweep, by_cluster
from kvferry.cluster.loadgen.settings import Settings
from kvferry.cluster.reports.common import Json
from kvferry.cluster.reports.documents import error_json
from kvferry.kv_cache.errors import KVFerryError


class Cluster(Protocol):
    """A running one: its gRPC address, and how long it took to start."""

    @property
    def endpoint(self) -> str:
        """HOST:PORT."""

    @property
    def startup_s(self) -> float:
        """Seconds."""


Start = Callable[[Point], AbstractContextManager[Cluster]]
Measure = Callable[[Settings], tuple[Json, KVFerryError | None]]
"""Fields of a ``loadgen run`` document, and why the run does not count."""


@dataclass(slots=True)
class Sweeping:
    """A sweep that is being measured.

    Attributes:
        known: POINTs by key.
        origin: what each point says of where it was measured (commit, version, machine).
        on_news: point, its number from 0, number of points; before each that is measured.
    """

    sweep: Sweep
    start: Start
    measure: Measure
    origin: Mapping[str, Any]
    known: dict[str, Json] = field(default_factory=dict)
    on_point: Callable[[], None] = lambda: None
    on_news: Callable[[Point, int, int], None] = lambda *_: None
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    def run(self) -> None:
        """Until every point is known. Raises whatever keeps a cluster from starting."""
        planned = self.sweep.points()
        keys = [point.key for point in planned]
        missing = [point for point in planned if not self._is_known(point)]
        for points in by_cluster(missing):
            self.on_news(points[0], keys.index(points[0].key), len(planned))
            with self.start(points[0]) as cluster:
                for point in points:
                    self.on_news(point, keys.index(point.key), len(planned))
                    self._measure(point, cluster)
                    self.on_point()

    def _is_known(self, point: Point) -> bool:
        return point.key in self.known and bool(self.known[point.key]["ok"])

    def _measure(self, point: Point, cluster: Cluster) -> None:
        settings = replace(point.settings, endpoint=cluster.endpoint)
        began = self.now()
        run, error = self.measure(settings)
        self.known[point.key] = {
            "key": point.key,
            "label": point.label,
            "variant": point.variant,
            "arrangement": point.arrangement.name,
            "threads": point.arrangement.threads,
            "load": point.load,
            "value": point.value,
            "round": point.round,
            "ok": error is None,
            "error": error_json(error),
            "created_at": began.isoformat(timespec="seconds"),
            **self.origin,
            "startup_s": cluster.startup_s,
            "cluster_config": dict(point.config),
            "run": run,
        }

    @property
    def points(self) -> list[Json]:
        """What is known of the plan, in its order."""
        keys = [point.key for point in self.sweep.points()]
        return [self.known[key] for key in keys if key in self.known]

    @property
    def error(self) -> KVFerryError | None:
        """Why the sweep does not count; None if every point that was measured does."""
        failed = [point for point in self.points if not point["ok"]]
        if not failed:
            return None
        first = failed[0]
        return Internal(
            f"{len(failed)} of {len(self.points)} points failed; the first: {first['label']}: "
            f"{first['error']['message']}"
        )


def take_up(document: Mapping[str, Any], sweep: Sweep, name: str) -> dict[str, Json]:
    """Points of an earlier document of the same sweep, or of a part of it, by key.

    Their figures are made again from their requests, so that they go with those of this version.

    Raises BadLoad for another kind of document, and for points that are not of this sweep.
    """
    if document.get("schema") != "kvferry.loadgen_sweep/1":
        raise BadLoad(f"out: {name} is no document of loadgen sweep, and is left as it is")
    known = {point["key"]: point for point in document["points"] or []}
    planned = {point.key for point in sweep.points()}
    foreign = [point["label"] for key, point in known.items() if key not in planned]
    if foreign:
        raise BadLoad(
            f"out: {name} holds {len(foreign)} points of another sweep (such as {foreign[0]!r}), "
            "and is left as it is; wanted a file of this sweep, or a new one"
        )
    return {key: renewed_point(point) for key, point in known.items()}
