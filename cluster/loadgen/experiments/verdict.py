"""Whether to disaggregate, in words: a function of goodput figures alone. Pure.

At each load the arrangement of prefill and decode workers is held against each colocated one. A
difference *matters* that is beyond noise and at least ``RELEVANT`` of the larger goodput. It *wins*
a load where it has more goodput than every one of them, each time by what matters; it *loses* a
load where one of them has more by what matters. As many comparisons are looked at together, each
interval is widened (Bonferroni) so that all of them hold with 95 %.

    wins somewhere, loses nowhere       disaggregate
    loses somewhere, wins nowhere       do not disaggregate
    both                                it depends on the load
    neither                             no difference beyond noise, or none that matters
    figures are lacking                 cannot say
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kvferry.cluster.loadgen.experiments.differences import Difference, Readings, difference
from kvferry.cluster.loadgen.intervals import LEVEL
from kvferry.cluster.reports.common import Json

RELEVANT = 0.02
"""The least difference that matters, as a share of the larger goodput."""


class Kind(StrEnum):
    """What a verdict can be."""

    DISAGGREGATE = "disaggregate"
    DO_NOT = "do_not_disaggregate"
    DEPENDS = "depends_on_load"
    NO_DIFFERENCE = "no_difference"
    CANNOT_SAY = "cannot_say"


@dataclass(frozen=True, slots=True)
class Row:
    """One load and one colocated alternative (A) beside the disaggregated arrangement (B)."""

    load: str
    alternative: str
    goodput: Difference

    @property
    def _least(self) -> float:
        return RELEVANT * max(abs(self.goodput.a), abs(self.goodput.b))

    @property
    def better(self) -> str | None:
        """``a`` or ``b`` where the difference matters, else None."""
        return self.goodput.better if abs(self.goodput.mean) >= self._least else None

    @property
    def is_small(self) -> bool:
        """Whether the difference surely does not matter: its whole interval is that small."""
        low, high = self.goodput.low, self.goodput.high
        return low is not None and high is not None and max(-low, high) < self._least

    def to_json(self) -> Json:
        """``better`` is null also where a difference beyond noise is too small to matter."""
        figures = {**self.goodput.to_json(), "better": self.better}
        return {"load": self.load, "alternative": self.alternative, **figures}


@dataclass(frozen=True, slots=True)
class Verdict:
    """``words`` is for people; ``rows`` are the comparisons it rests on."""

    kind: Kind
    disaggregated: str
    words: str
    rows: tuple[Row, ...] = ()
    level: float = LEVEL

    def with_words(self, more: Sequence[str]) -> Verdict:
        """The same, and further sentences."""
        return replace(self, words=" ".join((self.words, *more)))

    def to_json(self) -> Json:
        """As documents hold it; ``level`` is that of each row's interval."""
        return {
            "kind": str(self.kind),
            "disaggregated": self.disaggregated,
            "words": self.words,
            "level": self.level,
            "rows": [row.to_json() for row in self.rows],
        }


def judge(
    disaggregated: str,
    goodput: Mapping[str, Readings],
    alternatives: Mapping[str, Mapping[str, Readings]],
    steps: Mapping[str, float] | None = None,
    missing: Sequence[str] = (),
) -> Verdict:
    """The verdict.

    Args:
        disaggregated: name of the arrangement that is judged.
        goodput: its readings by load.
        alternatives: readings by load of each colocated arrangement, by its name.
        steps: what one request more or less makes in a reading, by load.
        missing: what should have been measured and was not, in words. A load that one arrangement
            has and another lacks is missing, too: nothing is judged by the easier loads alone.
    """

    def cannot(why: str) -> Verdict:
        return Verdict(Kind.CANNOT_SAY, disaggregated, f"Cannot say: {why}.")

    if not alternatives:
        return cannot(f"nothing colocated was measured beside {disaggregated}")
    lacking = [*missing] or [*_lacking({disaggregated: goodput, **alternatives})]
    if lacking:
        return cannot(f"not everything was measured; missing: {'; '.join(lacking)}")
    pairs = [
        (load, name, readings[load], mine)
        for load, mine in goodput.items()
        for name, readings in alternatives.items()
        if readings.get(load) and mine
    ]
    if not pairs:
        return cannot("there is no goodput: no SLO was given, or nothing was measured")
    if not any(value > 0 for *_, a, b in pairs for value in (*a.values(), *b.values())):
        return cannot(
            "no arrangement kept to the SLO for a single request at any load; "
            "lower the load or loosen the SLO"
        )
    level = 1 - (1 - LEVEL) / len(pairs)
    rows = tuple(
        Row(load, name, found)
        for load, name, a, b in pairs
        if (found := difference(a, b, level=level, step=(steps or {}).get(load, 0.0))) is not None
    )
    flat = [row for row in rows if row.goodput.is_flat]
    if flat:
        return cannot(
            f"at {flat[0].load} the repeats of {disaggregated} and {flat[0].alternative} do not "
            "differ among themselves, which says nothing of noise; measure more of them"
        )
    if any(row.goodput.low is None for row in rows):
        return cannot("a single repeat says nothing of noise; measure at least two, better five")
    won, lost = _won(rows, len(alternatives)), _lost(rows)
    kind = (
        Kind.DEPENDS
        if won and lost
        else Kind.DISAGGREGATE
        if won
        else Kind.DO_NOT
        if lost
        else Kind.NO_DIFFERENCE
    )
    return Verdict(kind, disaggregated, _words(kind, disaggregated, rows, won, lost), rows, level)


def _lacking(goodput: Mapping[str, Mapping[str, Readings]]) -> Iterator[str]:
    """Loads of which some arrangement has readings and another none; nothing if nobody has any."""
    known = dict.fromkeys(
        load for readings in goodput.values() for load, found in readings.items() if found
    )
    for name, readings in goodput.items():
        loads = [load for load in known if not readings.get(load)]
        if loads:
            yield f"{name} at {', '.join(loads)}"


def _won(rows: Sequence[Row], num_alternatives: int) -> list[str]:
    """Loads at which B is better than every alternative."""
    wins = [row.load for row in rows if row.better == "b"]
    return [load for load in dict.fromkeys(wins) if wins.count(load) == num_alternatives]


def _lost(rows: Sequence[Row]) -> list[str]:
    """Loads at which some alternative is better than B."""
    return list(dict.fromkeys(row.load for row in rows if row.better == "a"))


def _words(
    kind: Kind, name: str, rows: Sequence[Row], won: Sequence[str], lost: Sequence[str]
) -> str:
    says = {
        Kind.DISAGGREGATE: f"Disaggregate: {name} serves more within the SLO.",
        Kind.DO_NOT: f"Do not disaggregate: {name} serves less within the SLO.",
        Kind.DEPENDS: f"It depends on the load: {name} serves more within the SLO at "
        f"{', '.join(won)}, and less at {', '.join(lost)}.",
        Kind.NO_DIFFERENCE: _nothing(name, rows),
    }[kind]
    shown = [
        *(_said(_closest([row for row in rows if row.load == load]), name) for load in won),
        *(_said(_worst([row for row in rows if row.load == load]), name) for load in lost),
    ]
    if kind is Kind.NO_DIFFERENCE:
        widest = max(rows, key=lambda row: abs(row.goodput.mean))
        shown = [f"the largest: {_said(widest, name)}"]
    return " ".join((says, *(f"{line[0].upper()}{line[1:]}." for line in shown)))


def _nothing(name: str, rows: Sequence[Row]) -> str:
    """That there is no difference, told apart from that none could be seen."""
    if all(row.is_small for row in rows):
        return (
            f"No difference that matters: {name} and the others serve the same within the SLO, to "
            f"{RELEVANT:.0%}, and the simpler arrangement will do."
        )
    if any(row.goodput.is_beyond_noise and row.better is None for row in rows):
        return (
            f"No difference that matters: where one is beyond noise it is below {RELEVANT:.0%}, "
            "and the simpler arrangement will do."
        )
    if any(row.better == "b" for row in rows):
        return (
            f"No difference beyond noise between {name} and the best of the others at any load, "
            "and the simpler arrangement will do unless more repeats say otherwise."
        )
    return (
        f"No difference beyond noise: nothing speaks for {name}, nor against it, and the simpler "
        "arrangement will do unless more repeats say otherwise."
    )


def _closest(rows: Sequence[Row]) -> Row:
    return min(rows, key=lambda row: row.goodput.mean)


def _worst(rows: Sequence[Row]) -> Row:
    return min((row for row in rows if row.better == "a"), key=lambda r: r.goodput.mean)


def _said(row: Row, name: str) -> str:
    found = row.goodput
    return (
        f"at {row.load}, {found.b:.3g} good requests/s of {name} against {found.a:.3g} of "
        f"{row.alternative} (difference {found.mean:+.3g}, interval {found.low:+.3g} to "
        f"{found.high:+.3g})"
    )
