"""From samples to the text that Prometheus scrapes, by its own client library.

The registry is one of our own: nothing that a library registers globally is exported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvferry.cluster.metrics.catalog import CATALOG, Kind
from kvferry.cluster.metrics.families import Family
from kvferry.engine.histogram import Histogram

Source = Callable[[], Sequence[Family]]


class FamilyCollector(Collector):
    """The families that ``source`` has at the moment of a scrape."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Every family with its samples."""
        return map(_metric, self._source())

    def describe(self) -> Iterable[Metric]:
        """Every family without samples, so that a scrape may ask for some by name."""
        return (_metric(Family(metric)) for metric in CATALOG)


def registry_of(source: Source) -> CollectorRegistry:
    """A registry that holds these families and nothing else."""
    registry = CollectorRegistry()
    registry.register(FamilyCollector(source))
    return registry


def render(source: Source, accept: str = "") -> tuple[bytes, str]:
    """The exposition and its content type, in the format that ``accept`` (the HTTP header) wants:
    Prometheus's text format unless OpenMetrics is asked for.
    """
    encode, content_type = choose_encoder(accept)
    return encode(registry_of(source)), content_type


def _metric(family: Family) -> Metric:
    metric, names = family.metric, family.metric.label_names
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=names)
        for labels, value in family.samples:
            assert isinstance(value, Histogram)
            histogram.add_metric(labels, _buckets(value), value.total)
        return histogram
    made: GaugeMetricFamily | CounterMetricFamily
    if metric.kind is Kind.COUNTER:
        made = CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=names)
    else:
        made = GaugeMetricFamily(metric.name, metric.help, labels=names)
    for labels, value in family.samples:
        assert not isinstance(value, Histogram)
        made.add_metric(labels, value)
    return made


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus wants them."""
    ends = [*map(floatToGoString, histogram.bounds), "+Inf"]
    return list(zip(ends, map(float, accumulate(histogram.counts)), strict=True))
