"""A router's exposition, read back by Prometheus's own parser."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvferry.cluster.metrics.exposition import render
from kvferry.cluster.metrics.families import WorkerInfo, families
from kvferry.cluster.router import Router
from kvferry.worker.messages import NodeRef

COMMON = ("model_name", "worker_id", "role")


@dataclass(frozen=True)
class Scrape:
    """One exposition's families, by the name that it gives them."""

    families: dict[str, Metric]

    def values(self, name: str, **labels: str) -> Iterator[float]:
        """The samples of this name with at least these labels."""
        for family in self.families.values():
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    yield sample.value

    def value(self, name: str, **labels: str) -> float:
        """The one such sample."""
        (found,) = self.values(name, **labels)
        return found

    def sum(self, name: str, **labels: str) -> float:
        """The sum of such samples; 0 of none."""
        return sum(self.values(name, **labels))

    def by(self, label: str, name: str) -> dict[str, float]:
        """Sums of a name's samples by one label, without zeros."""
        found: Counter[str] = Counter()
        for family in self.families.values():
            for sample in family.samples:
                if sample.name == name and sample.value:
                    found[sample.labels[label]] += sample.value  # type: ignore[assignment]
        return dict(found)

    def counters(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Everything that may only rise: counters, and histograms' buckets, counts and sums."""
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in self.families.values()
            if family.type in ("counter", "histogram")
            for sample in family.samples
        }


def read(page: bytes) -> Scrape:
    """The page as Prometheus reads it."""
    found = list(text_string_to_metric_families(page.decode()))
    assert len({family.name for family in found}) == len(found), "a family stands twice"
    return Scrape({family.name: family for family in found})


def page_of(router: Router, now: float, infos: Mapping[NodeRef, WorkerInfo] | None = None) -> bytes:
    """The router's page."""
    taken = families(router, "stub", "0.1", infos or {}, now)
    page, content_type = render(lambda: taken)
    assert content_type.startswith("text/plain; version=0.0.4")
    return page


def scrape(router: Router, now: float, infos: Mapping[NodeRef, WorkerInfo] | None = None) -> Scrape:
    """The router's page, read back."""
    return read(page_of(router, now, infos))
