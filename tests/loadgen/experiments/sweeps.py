"""Made-up documents of sweeps: the real plan, with made-up figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvferry.cluster.loadgen.experiments.summary import sweep_fields
from kvferry.cluster.loadgen.experiments.sweep_plan import Point, Sweep
from kvferry.cluster.loadgen.experiments.sweeping import Sweeping
from kvferry.cluster.loadgen.settings import Settings
from kvferry.kv_cache.errors import KVFerryError
from tests.loadgen.experiments.making import MACHINE, Json, repeat, run_document

ORIGIN: Mapping[str, Any] = {"commit": "c" * 40, "version": "0", "machine": MACHINE}


def run_fields(settings: Settings, goodput: Callable[[int], float | None]) -> Json:
    """Fields of a run whose repeats have these goodputs."""
    repeats = [
        repeat(f"{settings.seed}{number}", goodput(number)) for number in range(settings.repeats)
    ]
    return {
        "target": None,
        "arrangement": None,
        "workload": None,
        "results": None,
        "intervals": None,
        "parts": None,
        "server": None,
        "repeats": repeats,
        "roof": None,
        "peer": None,
        "ratio_to_peer": None,
        "config": settings.to_json(),
        "generator": {"event_loop": "asyncio"},
    }


@dataclass
class FakeClusters:
    """Starts nothing; notes what would have been started, ended and measured."""

    events: list[str] = field(default_factory=list)
    fail_at: int | None = None
    error: KVFerryError | None = None
    goodput: Callable[[str, int], float] = lambda cluster, number: 1.0 + number / 10
    endpoint: str = ""
    startup_s: float = 1.5
    _name: str = ""
    num_measured: int = 0

    @contextmanager
    def start(self, point: Point) -> Iterator[FakeClusters]:
        self._name = self.endpoint = point.arrangement.name
        self.events.append(f"start {point.cluster}")
        try:
            yield self
        finally:
            self.events.append(f"end {point.cluster}")

    def measure(self, settings: Settings) -> tuple[Json, KVFerryError | None]:
        assert settings.endpoint == self.endpoint
        if self.num_measured == self.fail_at:
            raise KeyboardInterrupt
        self.num_measured += 1
        load = settings.rate or settings.concurrency or settings.stretch
        self.events.append(f"measure {self._name} {load}")
        return run_fields(settings, lambda n: self.goodput(self._name, n)), self.error


def sweeping(
    sweep: Sweep, clusters: FakeClusters, known: dict[str, Json] | None = None
) -> Sweeping:
    return Sweeping(sweep, clusters.start, clusters.measure, ORIGIN, {} if known is None else known)


def sweep_document(sweep: Sweep, clusters: FakeClusters | None = None) -> Json:
    """The whole document of a sweep."""
    doing = sweeping(sweep, clusters or FakeClusters())
    doing.run()
    fields = sweep_fields(sweep.to_json(), doing.points)
    head = run_document([], schema="kvferry.loadgen_sweep/1")
    return {
        **{k: v for k, v in head.items() if k not in ("repeats", "results", "config")},
        **fields,
    }
