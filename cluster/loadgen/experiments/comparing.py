"""Two documents, figure by figure: which is better at what, and whether that is more than noise.

Takes documents of ``loadgen run`` and ``loadgen sweep``. Of a run there is one measurement, of a
sweep one for each variant, arrangement and load, and those of one name are compared. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.experiments.differences import Difference, difference
from kvferry.cluster.loadgen.experiments.figures import BY_NAME, FIGURES, Figure
from kvferry.cluster.loadgen.intervals import LEVEL
from kvferry.cluster.reports.common import Json

RUN, SWEEP = "kvferry.loadgen_run/1", "kvferry.loadgen_sweep/1"
ALL = "the run"


@dataclass(frozen=True, slots=True)
class Worse:
    """A figure by which B is worse than allowed."""

    label: str
    figure: str
    percent: float | None  # None: A is 0


def measurements(document: Mapping[str, Any]) -> dict[str, list[Json]]:
    """Repeats by the name of what was measured. Raises BadLoad for another kind of document."""
    schema = document.get("schema")
    if schema == RUN:
        return {ALL: document["repeats"] or []}
    if schema == SWEEP:
        found: dict[str, list[Json]] = {}
        for point in document["points"] or []:
            found.setdefault(point["label"], []).extend(point["run"]["repeats"])
        return found
    raise BadLoad(f"schema: got {schema!r}, wanted {RUN} or {SWEEP}")


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Json:
    """``pairs`` and ``words``; raises BadLoad where nothing of the two can be compared."""
    if a.get("schema") != b.get("schema"):
        raise BadLoad(f"got {a.get('schema')} and {b.get('schema')}; wanted two of one kind")
    mine, other = measurements(a), measurements(b)
    labels = [label for label in mine if label in other]
    if not labels:
        raise BadLoad(
            f"nothing in common: A measured {', '.join(mine) or 'nothing'}; "
            f"B {', '.join(other) or 'nothing'}"
        )
    pairs = [pair_json(label, mine[label], other[label]) for label in labels]
    return {
        "level": LEVEL,
        "a": head(a),
        "b": head(b),
        "pairs": pairs,
        "only_in_a": [label for label in mine if label not in other],
        "only_in_b": [label for label in other if label not in mine],
        "words": [*_circumstances(a, b, pairs), *_summary(pairs)],
    }


def head(document: Mapping[str, Any]) -> Json:
    """What a document says of its origin."""
    names = ("schema", "version", "commit", "created_at", "command", "machine")
    return {name: document.get(name) for name in names}


def pair_json(label: str, a: Sequence[Json], b: Sequence[Json]) -> Json:
    """Every figure that both have, and what it says."""
    found = [
        (figure, between)
        for figure in FIGURES
        if (between := figure_difference(figure, a, b)) is not None
    ]
    plans_a = {repeat["fingerprint"] for repeat in a}
    plans_b = {repeat["fingerprint"] for repeat in b}
    return {
        "label": label,
        "same_requests": plans_a == plans_b,
        "figures": [
            {"figure": figure.name, "words": said(figure, between), **between.to_json()}
            for figure, between in found
        ],
    }


def figure_difference(figure: Figure, a: Sequence[Json], b: Sequence[Json]) -> Difference | None:
    """One figure of B less A; None where one of them lacks it."""
    return difference(figure.readings(a), figure.readings(b), figure.more_is_better)


def said(figure: Figure, found: Difference) -> str:
    """One line for people."""
    a, b = found.a * figure.factor, found.b * figure.factor
    line = f"{figure.label}: {a:.4g} in A, {b:.4g} in B {figure.unit}"
    share, low, high = (found.relative(value) for value in (found.mean, found.low, found.high))
    if share is not None:
        line += f" ({share:+.1%}"
        if low is not None and high is not None:
            line += f", interval {low:+.1%} to {high:+.1%}"
        line += ")"
    if found.is_beyond_noise is None:
        return f"{line}: one repeat, so noise is unknown"
    if found.better is None:
        return f"{line}: no difference beyond noise"
    return f"{line}: {found.better.upper()} is better"


def worse_than(pairs: Sequence[Json], percent: float) -> list[Worse]:
    """Figures by which B is worse, beyond noise and by more than ``percent`` of A.

    Raises BadLoad where there is no noise to be beyond: that needs two repeats of each.
    """
    found = []
    for pair in pairs:
        for row in pair["figures"]:
            if row["beyond_noise"] is None:
                raise BadLoad(
                    f"fail-if-worse: {pair['label']} has {row['num_a']} and {row['num_b']} "
                    "repeats; wanted two of each, or noise is unknown"
                )
            worse = _percent_worse(row)
            if row["better"] == "a" and (worse is None or worse > percent):
                found.append(Worse(pair["label"], row["figure"], worse))
    return found


def _percent_worse(row: Json) -> float | None:
    """By how much B is worse, in percent of A; None where A is 0."""
    sign = -1 if BY_NAME[row["figure"]].more_is_better else 1
    return None if row["relative"] is None else 100 * sign * float(row["relative"])


def _circumstances(a: Mapping[str, Any], b: Mapping[str, Any], pairs: Sequence[Json]) -> list[str]:
    """What makes the comparison less than one of like with like."""
    lines = []
    machine_a, machine_b = ((d.get("machine") or {}) for d in (a, b))
    different = [
        n for n in ("cpu", "cores", "memory_bytes") if machine_a.get(n) != machine_b.get(n)
    ]
    if different:
        values = "; ".join(f"{n} {machine_a.get(n)} and {machine_b.get(n)}" for n in different)
        lines.append(f"Not the same machine: {values}.")
    unlike = [pair["label"] for pair in pairs if not pair["same_requests"]]
    if unlike:
        lines.append(f"Not the same requests: {', '.join(unlike)}.")
    return lines


def _summary(pairs: Sequence[Json]) -> list[str]:
    """Who is better at what, for each pair."""
    lines = []
    for pair in pairs:
        rows = pair["figures"]
        better = {
            side: [BY_NAME[r["figure"]].label for r in rows if r["better"] == side]
            for side in ("a", "b")
        }
        same = sum(row["beyond_noise"] is False for row in rows)
        unknown = sum(row["beyond_noise"] is None for row in rows)
        parts = [
            f"{side.upper()} is better at {', '.join(names)}"
            for side, names in better.items()
            if names
        ]
        if same:
            parts.append(f"{same} of {len(rows)} figures do not differ beyond noise")
        if unknown:
            parts.append(f"noise of {unknown} of {len(rows)} figures is unknown (one repeat)")
        lines.append(f"{pair['label']}: {'; '.join(parts) or 'no figure in common'}.")
    return lines
