"""What a sweep measures, in which order, and under which names. Pure.

A sweep is variants x arrangements x loads x rounds. Every (round, variant, arrangement) has a
cluster of its own, to which its loads are sent one after the other. In each round the clusters come
in the same order, so that what changes slowly on a machine touches all of them.

All arrangements and variants get the same requests at a load: the seed of a point is made from the
sweep's seed, the load and the round alone. Different loads get different requests, or the
cache of a cluster would know the second load's prompts from the first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.experiments.arrangements import Arrangement, merged
from kvferry.cluster.loadgen.settings import TRACE, Settings
from kvferry.cluster.reports.common import Json

RATE, CONCURRENCY, STRETCH, AS_SET = "rate", "concurrency", "stretch", "as set"
AXES = (RATE, CONCURRENCY, STRETCH)
_TEMPLATE_ENDPOINT = "127.0.0.1:0"  # each cluster's own takes its place


@dataclass(frozen=True, slots=True)
class Axis:
    """What the loads differ in: ``name`` is a setting of ``AXES``; ``as set``: a single load."""

    name: str = AS_SET
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.name != AS_SET and not self.values:
            raise BadLoad(f"{self.name}: no values, wanted at least one")
        if any(value <= 0 for value in self.values):
            raise BadLoad(f"{self.name}: got {self.values}, wanted more than 0")
        if len(set(self.values)) < len(self.values):
            raise BadLoad(f"{self.name}: a value stands twice in {self.values}")
        if self.name == CONCURRENCY and any(value != int(value) for value in self.values):
            raise BadLoad(f"concurrency: got {self.values}, wanted whole numbers")

    def loads(self) -> list[tuple[str, float | None]]:
        """Names and values, in order."""
        if self.name == AS_SET:
            return [(AS_SET, None)]
        return [(f"{self.name} {value:g}", value) for value in self.values]

    def applied(self, settings: Settings, value: float | None) -> Settings:
        """The settings of one load."""
        if value is None:
            return settings
        cleared = replace(settings, rate=None, concurrency=None)
        if self.name == CONCURRENCY:
            return replace(cleared, concurrency=int(value))
        if self.name == RATE:
            return replace(cleared, rate=float(value))
        return replace(cleared, stretch=float(value))


@dataclass(frozen=True, slots=True)
class Variant:
    """Something else that is varied: settings of the load, sections of the configuration."""

    name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Contrast:
    """Two variants whose difference answers a question."""

    label: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Point:
    """One load on one cluster.

    Attributes:
        load, value: its name, such as ``rate 2``, and its place on the axis.
        settings: resolved, but for the endpoint.
        config: the whole configuration of its cluster.
    """

    variant: str
    arrangement: Arrangement
    load: str
    value: float | None
    round: int
    settings: Settings
    config: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Equal for the rounds of one thing, different for all else."""
        parts = (self.variant, self.arrangement.name, self.load)
        return ", ".join(part for part in parts if part)

    @property
    def cluster(self) -> str:
        """Equal for points that share a cluster."""
        return f"{self.round}/{self.variant}/{self.arrangement.name}"

    @property
    def key(self) -> str:
        """A digest of all that would be measured: equal keys need not be measured twice."""
        settings = self.settings.to_json()
        del settings["endpoint"]
        what = [self.label, self.round, settings, self.config]
        text = json.dumps(what, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Sweep:
    """A whole sweep. ``config`` is what every cluster's configuration begins with."""

    arrangements: tuple[Arrangement, ...]
    settings: Settings
    axis: Axis = Axis()
    variants: tuple[Variant, ...] = (Variant(),)
    rounds: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    contrasts: tuple[Contrast, ...] = ()

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise BadLoad(f"rounds: got {self.rounds}, wanted at least 1")
        if self.axis.name == STRETCH and self.settings.workload != TRACE:
            raise BadLoad("stretch: only a trace's times can be stretched; wanted a trace")
        if self.settings.url is not None:
            raise BadLoad("url: a sweep starts its own clusters; use loadgen run for a peer")

    def points(self) -> list[Point]:
        """In the order in which they are measured. Raises BadLoad for settings that do not fit."""
        return [
            self._point(variant, arrangement, load, value, number)
            for number in range(self.rounds)
            for variant in self.variants
            for arrangement in self.arrangements
            for load, value in self.axis.loads()
        ]

    def _point(
        self,
        variant: Variant,
        arrangement: Arrangement,
        load: str,
        value: float | None,
        number: int,
    ) -> Point:
        settings = replace(self.settings, endpoint=_TEMPLATE_ENDPOINT, **variant.settings)
        settings = replace(self.axis.applied(settings, value), seed=self._seed(load, number))
        config = merged(self.config, variant.config, arrangement.config())
        return Point(variant.name, arrangement, load, value, number, settings.resolved(), config)

    def _seed(self, load: str, number: int) -> int:
        text = f"{self.settings.seed}/{load}/{number}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")

    def to_json(self) -> Json:
        """All that is needed to plan it again."""
        return {
            "recipe": self.recipe,
            "arrangements": [each.name for each in self.arrangements],
            "axis": {"name": self.axis.name, "values": list(self.axis.values)},
            "variants": [asdict(each) for each in self.variants],
            "contrasts": [asdict(each) for each in self.contrasts],
            "rounds": self.rounds,
            "settings": self.settings.to_json(),
            "config": merged(self.config),
        }


def by_cluster(points: list[Point]) -> Iterator[list[Point]]:
    """Points that share a cluster, together."""
    for _, group in groupby(points, key=lambda point: point.cluster):
        yield list(group)
