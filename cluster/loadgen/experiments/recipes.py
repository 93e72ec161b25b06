"""Experiments by name: presets of a sweep, each with the question that it answers. Data.

Every one of its settings can be overridden by a flag, and its configuration by a file. The numbers
are for the default model on two cores, where one takes from five minutes to half an hour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.cluster.loadgen.experiments.sweep_plan import (
    CONCURRENCY,
    RATE,
    Axis,
    Contrast,
    Variant,
)
from kvferry.cluster.loadgen.settings import PRESSURE, RANDOM, SHARED


@dataclass(frozen=True, slots=True)
class Recipe:
    """A preset. ``question`` is what it asks, for help and reports."""

    name: str
    question: str
    arrangements: str
    settings: Mapping[str, Any]
    axis: Axis = field(default_factory=Axis)
    config: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[Variant, ...] = (Variant(),)
    contrasts: tuple[Contrast, ...] = ()
    rounds: int = 1


_MIX = "mix:0.7*128,0.3*512"

MIXED = Recipe(
    "mixed-lengths",
    "How do short and long requests fare together as more of them are in flight?",
    arrangements="1x2,1P+1D",
    settings={
        "workload": RANDOM,
        "input_tokens": _MIX,
        "output_tokens": "mix:0.7*32,0.3*128",
        "num_requests": 16,
        "repeats": 3,
        "slo_ttft": 2.0,
        "slo_tpot": 0.15,
    },
    axis=Axis(CONCURRENCY, (1, 4, 16)),
)

_MEMORY = {"cache": {"memory": "512MiB"}}
_ALONE = {"shared_ratio": 0.0}
_TOGETHER = {"shared_ratio": 1.0}
_WHOLE = {"cache": {"block_size": 1024, "prefix_caching": False}}
_PAGED = {"cache": {"block_size": 16, "prefix_caching": False}}
_REUSED = {"cache": {"block_size": 16, "prefix_caching": True}}

PREFIXES = Recipe(
    "prefixes",
    "What does paging gain, and what does reuse gain, with shared and with random prefixes?",
    arrangements="1P+1D",
    settings={
        "workload": SHARED,
        "input_tokens": "64",
        "output_tokens": "32",
        "opening_tokens": "256",
        "groups": 2,
        "num_requests": 24,
        "repeats": 3,
    },
    axis=Axis(CONCURRENCY, (16,)),
    config=_MEMORY,
    variants=(
        Variant("whole, random", _ALONE, _WHOLE),
        Variant("whole, shared", _TOGETHER, _WHOLE),
        Variant("paged, random", _ALONE, _PAGED),
        Variant("paged, shared", _TOGETHER, _PAGED),
        Variant("reused, random", _ALONE, _REUSED),
        Variant("reused, shared", _TOGETHER, _REUSED),
    ),
    contrasts=(
        Contrast("paging, random prefixes", "whole, random", "paged, random"),
        Contrast("paging, shared prefixes", "whole, shared", "paged, shared"),
        Contrast("reuse, random prefixes", "paged, random", "reused, random"),
        Contrast("reuse, shared prefixes", "paged, shared", "reused, shared"),
    ),
)

GIVING_UP = Recipe(
    "pressure",
    "After bursts too large for the pools, of which clients give up: how soon are blocks free "
    "again, and the queue empty?",
    arrangements="1x2,1P+1D",
    settings={
        "workload": PRESSURE,
        "num_requests": 32,
        "rate": 4.0,
        "on": 4.0,
        "off": 20.0,
        "repeats": 2,
        "poll": 0.1,
        "cancel_within": 5.0,
    },
    config={
        "cache": {"memory": "128MiB"},
        "transfer": {"heartbeat": "100ms"},
    },
    variants=(
        Variant("a third gives up", {"cancel_share": 0.33}),
        Variant("all give up", {"cancel_share": 1.0}),
    ),
    contrasts=(Contrast("giving up", "a third gives up", "all give up"),),
)

DISAGGREGATION = Recipe(
    "disaggregation",
    "With two threads to spend: one worker, two workers, or one for prefill and one for decode?",
    arrangements="1x2,2x1,1P+1D",
    settings={
        "workload": RANDOM,
        "input_tokens": _MIX,
        "output_tokens": "uniform:16:64",
        "num_requests": 16,
        "repeats": 3,
        "slo_ttft": 1.5,
        "slo_tpot": 0.1,
    },
    axis=Axis(RATE, (0.5, 1.0)),
    rounds=2,
)

RECIPES = {recipe.name: recipe for recipe in (MIXED, PREFIXES, GIVING_UP, DISAGGREGATION)}
