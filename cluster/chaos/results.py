"""What experiments have shown, as the document ``kvferry chaos --json`` and its verdict. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.cluster.chaos.cells import Cell
from kvferry.cluster.chaos.streams import NO_FAULTS, Faults
from kvferry.cluster.deaths import Death
from kvferry.cluster.reports.common import Json, dist


@dataclass(frozen=True, slots=True)
class Trial:
    """One experiment that was brought about.

    Attributes:
        survived: the target request ended as it must (see ``docs/chaos.md``), every other one
            well, and the process that was ended has gone and has a successor.
        notes: what was not as it must be, or what should be known.
        faults: over every stream of the experiment.
        blocks_leaked: held when everything had ended.
        detection_s: from the signal to the declaration; of a client, to its request's end.
        recovery_gap_s: longest time between two tokens of the target.
    """

    survived: bool
    notes: tuple[str, ...] = ()
    faults: Faults = NO_FAULTS
    blocks_leaked: int = 0
    detection_s: float | None = None
    recovery_gap_s: float | None = None
    recomputed_tokens: int | None = None


@dataclass(slots=True)
class CellResult:
    """A cell's trials; ``missed`` says why one could not be brought about.

    ``duration_s`` is the time that all took, until the cluster was whole and quiet again.
    """

    cell: Cell
    trials: list[Trial] = field(default_factory=list)
    duration_s: float = 0.0
    missed: list[str] = field(default_factory=list)

    @property
    def faults(self) -> Faults:
        """Over all trials."""
        return sum((trial.faults for trial in self.trials), NO_FAULTS)

    @property
    def blocks_leaked(self) -> int:
        """Over all trials."""
        return sum(trial.blocks_leaked for trial in self.trials)

    @property
    def good(self) -> bool:
        """It was brought about, and every trial came out as it must."""
        survived = bool(self.trials) and all(trial.survived for trial in self.trials)
        return survived and self.faults == NO_FAULTS and not self.blocks_leaked

    @property
    def why(self) -> str | None:
        """Everything that should be known, each once."""
        notes = [*self.missed, *(note for trial in self.trials for note in trial.notes)]
        return "; ".join(dict.fromkeys(notes)) or None


@dataclass(frozen=True, slots=True)
class Soak:
    """Load without faults: how long, how much, and the share of the cores that was busy."""

    duration_s: float
    num_requests: int
    num_failed: int
    cores_busy: float


def cell_json(result: CellResult) -> Json:
    """One entry of ``cells``."""
    trials = result.trials
    recomputed = [t.recomputed_tokens for t in trials if t.recomputed_tokens is not None]
    return {
        "target": result.cell.target,
        "state": result.cell.state,
        "fault": result.cell.fault,
        "applicable": True,
        "why": result.why,
        "tried": len(trials),
        "survived": sum(trial.survived for trial in trials),
        **_counts([result]),
        "detection_s": dist([t.detection_s for t in trials if t.detection_s is not None]),
        "recovery_gap_s": dist([t.recovery_gap_s for t in trials if t.recovery_gap_s is not None]),
        "reused_tokens": None,
        "recomputed_tokens": sum(recomputed) if recomputed else None,
        "duration_s": result.duration_s,
    }


def totals_json(results: Sequence[CellResult]) -> Json:
    """``totals``: sums over the cells, and of processes (not clients) the detection."""
    trials = [trial for result in results for trial in result.trials]
    detections = [
        trial.detection_s
        for result in results
        if result.cell.target != "client"
        for trial in result.trials
        if trial.detection_s is not None
    ]
    return {
        "cells": len(results),
        "tried": len(trials),
        "survived": sum(trial.survived for trial in trials),
        **_counts(results),
        "detection_s": dist(detections),
        "recovery_gap_s": dist([t.recovery_gap_s for t in trials if t.recovery_gap_s is not None]),
    }


def _counts(results: Sequence[CellResult]) -> Json:
    faults = sum((result.faults for result in results), NO_FAULTS)
    return {
        "tokens_lost": faults.lost,
        "tokens_repeated": faults.repeated,
        "tokens_wrong": faults.wrong,
        "blocks_leaked": sum(result.blocks_leaked for result in results),
    }


def verdict(
    results: Sequence[CellResult], soak: Soak | None, false_deaths: Sequence[Death]
) -> str | None:
    """Why the run has failed; None if everything came out as it must."""
    bad = [
        f"{r.cell.name}: {r.why or 'tokens or blocks went wrong'}" for r in results if not r.good
    ]
    bad += [f"{d.ref.node_id} was declared dead for nothing: {d.why}" for d in false_deaths]
    if soak is not None and soak.num_failed:
        bad.append(f"{soak.num_failed} of {soak.num_requests} requests under load failed")
    return "\n".join(bad) or None
