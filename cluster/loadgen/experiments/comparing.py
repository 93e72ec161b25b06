"""Two documents, figure by figure: which is better at what, and whether that is more than noise.

Takes documents of ``loadgen run`` and ``loadgen sweep``. Of a run there is one measurement, of a
sweep one for each variant, arrangement and load, and those of one name are compared. Points of a
sweep at which requests failed are left out and named; a run in which some failed is compared, and
that is said. Goodput under one SLO says nothing of goodput under another. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.experiments.differences import Difference, difference
from kvferry.cluster.loadgen.experiments.figures import (
    BY_NAME,
    FIGURES,
    GOODPUT,
    WITHIN_SLO,
    Figure,
)
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


@dataclass(slots=True)
class Measured:
    """What a document has under one name: repeats, and the fields of the first of its runs."""

    run: Mapping[str, Any]
    repeats: list[Json]


def measurements(document: Mapping[str, Any]) -> dict[str, Measured]:
    """By the name of what was measured. Raises BadLoad for another kind of document."""
    schema = document.get("schema")
    if schema == RUN:
        repeats = document["repeats"] or []
        complete = [repeat for repeat in repeats if repeat["is_complete"]]
        return {ALL: Measured(document, complete or repeats)} if repeats else {}
    if schema == SWEEP:
        found: dict[str, Measured] = {}
        for point in document["points"] or []:
            if point["ok"]:
                measured = found.setdefault(point["label"], Measured(point["run"], []))
                measured.repeats.extend(point["run"]["repeats"])
        return found
    raise BadLoad(f"schema: got {schema!r}, wanted {RUN} or {SWEEP}")


def failures(document: Mapping[str, Any]) -> dict[str, str]:
    """Why what has this name does not count, or not wholly: requests failed, or an interruption."""
    if document.get("schema") == SWEEP:
        points = document["points"] or []
        return {point["label"]: point["error"]["message"] for point in points if not point["ok"]}
    return {} if document["ok"] else {ALL: document["error"]["message"]}


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
    pairs = [pair_json(label, mine[label].repeats, other[label].repeats) for label in labels]
    failed = [
        {"side": side, "label": label, "message": message}
        for side, document in (("a", a), ("b", b))
        for label, message in failures(document).items()
    ]
    return {
        "level": LEVEL,
        "a": head(a),
        "b": head(b),
        "pairs": pairs,
        "only_in_a": [label for label in mine if label not in other],
        "only_in_b": [label for label in other if label not in mine],
        "failed": failed,
        "words": [
            *_machines(a, b),
            *_failed(failed),
            *(line for label in labels for line in _unlike(label, mine[label], other[label])),
            *_summary(pairs),
        ],
    }


def head(document: Mapping[str, Any]) -> Json:
    """What a document says of its origin."""
    names = ("schema", "version", "commit", "created_at", "command", "machine")
    return {name: document.get(name) for name in names}


def pair_json(label: str, a: Sequence[Json], b: Sequence[Json]) -> Json:
    """Every figure that both have, and what it says; of different SLOs no goodput."""
    is_one_slo = _slos(a) == _slos(b)
    found = [
        (figure, between)
        for figure in FIGURES
        if (is_one_slo or figure not in (GOODPUT, WITHIN_SLO))
        and (between := figure_difference(figure, a, b)) is not None
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
    step = max(figure.largest_step(a), figure.largest_step(b))
    return difference(figure.readings(a), figure.readings(b), figure.more_is_better, step=step)


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
    if found.is_flat:
        return f"{line}: the repeats do not differ, so noise is unknown"
    if found.is_beyond_noise is None:
        return f"{line}: one repeat, so noise is unknown"
    if found.better is None:
        return f"{line}: no difference beyond noise"
    return f"{line}: {found.better.upper()} is better"


def worse_than(pairs: Sequence[Json], percent: float) -> list[Worse]:
    """Figures by which B is worse, beyond noise and by more than ``percent`` of A.

    Raises BadLoad where there is no noise to be beyond: that needs two repeats of each. A figure
    whose repeats do not differ among themselves is passed over: nothing is known of its noise.
    """
    found = []
    for pair in pairs:
        for row in pair["figures"]:
            if row["beyond_noise"] is None and not _is_flat(row):
                raise BadLoad(
                    f"fail-if-worse: {pair['label']} has {row['num_a']} and {row['num_b']} "
                    "repeats; wanted two of each, or noise is unknown"
                )
            worse = _percent_worse(row)
            if row["better"] == "a" and (worse is None or worse > percent):
                found.append(Worse(pair["label"], row["figure"], worse))
    return found


def failed_only_in_b(failed: Sequence[Json]) -> list[Json]:
    """What does not count in B and does in A; ``failed`` is that of ``compare``."""
    in_a = {each["label"] for each in failed if each["side"] == "a"}
    return [each for each in failed if each["side"] == "b" and each["label"] not in in_a]


def _percent_worse(row: Json) -> float | None:
    """By how much B is worse, in percent of A; None where A is 0."""
    sign = -1 if BY_NAME[row["figure"]].more_is_better else 1
    return None if row["relative"] is None else 100 * sign * float(row["relative"])


def _is_flat(row: Json) -> bool:
    """Whether there are repeats on both sides, which do not differ among themselves."""
    return row["beyond_noise"] is None and row["num_a"] > 1 and row["num_b"] > 1


def _slos(repeats: Sequence[Json]) -> list[Any]:
    """What was asked of the repeats, each once."""
    found: list[Any] = []
    for repeat in repeats:
        if repeat["slo"] not in found:
            found.append(repeat["slo"])
    return found


def _machines(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    machine_a, machine_b = ((d.get("machine") or {}) for d in (a, b))
    different = [
        n for n in ("cpu", "cores", "memory_bytes") if machine_a.get(n) != machine_b.get(n)
    ]
    if not different:
        return []
    values = "; ".join(f"{n} {machine_a.get(n)} and {machine_b.get(n)}" for n in different)
    return [f"Not the same machine: {values}."]


def _failed(failed: Sequence[Json]) -> list[str]:
    """What is left out of a sweep, or taken of a run although it does not count."""
    lines = []
    for each in failed:
        how = "failed or was ended early" if each["label"] == ALL else "is left out"
        lines.append(f"{each['label']} {how} in {each['side'].upper()}: {each['message']}.")
    return lines


def _unlike(label: str, a: Measured, b: Measured) -> list[str]:
    """What makes a pair less than a comparison of like with like."""
    lines = []
    if {each["fingerprint"] for each in a.repeats} != {each["fingerprint"] for each in b.repeats}:
        lines.append(f"Not the same requests: {label}.")
    slos = [", ".join(_slo(each) for each in _slos(side.repeats)) for side in (a, b)]
    if slos[0] != slos[1]:
        lines.append(
            f"Not the same SLO: {label}: {slos[0]} and {slos[1]}; goodput is not compared."
        )
    mine, other = _asked(a.run), _asked(b.run)
    unlike = [name for name in mine if mine[name] != other[name]]
    if unlike:
        values = "; ".join(f"{name} {mine[name]} and {other[name]}" for name in unlike)
        lines.append(f"Not the same settings: {label}: {values}.")
    return lines


def _slo(slo: Mapping[str, Any] | None) -> str:
    kept = [f"{n.removesuffix('_s')} {v:g} s" for n, v in (slo or {}).items() if v is not None]
    return " with ".join(kept) or "none"


def _asked(run: Mapping[str, Any]) -> dict[str, Any]:
    """What differs between runs of equal plans."""
    config, target = run.get("config") or {}, run.get("target") or {}
    names = ("concurrency", "ignore_eos", "temperature", "send", "ramp", "timeout", "body")
    return {"model": target.get("model_name"), **{name: config.get(name) for name in names}}


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
        flat = [BY_NAME[row["figure"]].label for row in rows if _is_flat(row)]
        unknown = sum(row["beyond_noise"] is None for row in rows) - len(flat)
        parts = [
            f"{side.upper()} is better at {', '.join(names)}"
            for side, names in better.items()
            if names
        ]
        if same:
            parts.append(f"{same} of {len(rows)} figures do not differ beyond noise")
        if flat:
            parts.append(
                f"noise of {', '.join(flat)} is unknown (no spread between the repeats of a side, "
                "or the same gap in all)"
            )
        if unknown:
            parts.append(f"noise of {unknown} of {len(rows)} figures is unknown (one repeat)")
        lines.append(f"{pair['label']}: {'; '.join(parts) or 'no figure in common'}.")
    return lines
