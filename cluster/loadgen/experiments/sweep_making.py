"""From a recipe, flags and a configuration file to a sweep: what stands before what. Pure.

Flags stand before the recipe; so does the file, but not before what the recipe's variants
vary. Where flags ask for another workload than the recipe's, the recipe's lengths and loads do not
apply.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvferry.cluster.config import ConfigError, load_config
from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.experiments.arrangements import merged, parse_arrangements
from kvferry.cluster.loadgen.experiments.recipes import Recipe
from kvferry.cluster.loadgen.experiments.sweep_plan import CONCURRENCY, RATE, Axis, Sweep
from kvferry.cluster.loadgen.settings import OF_WORKLOADS, RANDOM, Settings

DEFAULT_ARRANGEMENTS = "1P+1D"
_LOOP = ("rate", "arrival", "burstiness", "on", "off", "concurrency")
_ALTERNATIVES = (("memory", "num_blocks"), ("num_blocks", "memory"))


def make_sweep(
    given: Mapping[str, Any],
    recipe: Recipe | None = None,
    arrangements: str | None = None,
    axis: Axis | None = None,
    rounds: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> Sweep:
    """The sweep; None is what was not given. Raises BadLoad."""
    base = recipe or Recipe("", "", DEFAULT_ARRANGEMENTS, {})
    preset, usual_axis = dict(base.settings), base.axis
    if given.get("workload", preset.get("workload", RANDOM)) != preset.get("workload", RANDOM):
        preset = {k: v for k, v in preset.items() if k not in (*OF_WORKLOADS, *_LOOP, "workload")}
        usual_axis = Axis()
    chosen = usual_axis if axis is None else axis
    if chosen.name in (RATE, CONCURRENCY):
        for name in (RATE, CONCURRENCY):
            if name in given:
                raise BadLoad(
                    f"{name}: this sweep varies the {chosen.name}; wanted its values in one list"
                )
        preset = {k: v for k, v in preset.items() if k not in (RATE, CONCURRENCY)}
    elif CONCURRENCY in given:
        preset = {k: v for k, v in preset.items() if k not in _LOOP}
    varied = {name for variant in base.variants for name in variant.settings}
    refused = sorted(varied & given.keys())
    if refused:
        raise BadLoad(f"{refused[0]}: the recipe {base.name} varies it itself")
    return Sweep(
        arrangements=parse_arrangements(arrangements or base.arrangements),
        settings=Settings(**{**preset, **given}),
        axis=chosen,
        variants=base.variants,
        rounds=base.rounds if rounds is None else rounds,
        config=_with_file(base.config, config or {}),
        recipe=base.name or None,
        contrasts=base.contrasts,
    )


def _with_file(preset: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """The file over the preset; of two alternatives the file's choice takes the other's place."""
    below = merged(preset)
    for name, other in _ALTERNATIVES:
        if name in (file.get("cache") or {}):
            below.get("cache", {}).pop(other, None)
    return merged(below, file)


def check_configs(sweep: Sweep) -> None:
    """Every cluster's configuration, before the first is started. Raises ConfigError."""
    for config in {repr(point.config): point.config for point in sweep.points()}.values():
        if load_config(None, dict(_dotted(config))).is_locked:
            raise ConfigError(
                "server.tls, server.auth and tenants are for kvferry serve: a sweep's clusters "
                "serve nobody but the sweep; leave them out"
            )


def _dotted(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
