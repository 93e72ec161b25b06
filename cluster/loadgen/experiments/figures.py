"""The figures that experiments compare: where each stands in a repeat, and which way is better."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a repeat.

    Attributes:
        name: in documents, such as ``ttft_s.p50``.
        label, unit, factor: for people, who see ``factor`` times the number.
        more_is_better: whether a higher number is the better one.
        counts_failures: whether failed requests count in it, as requests that were not good.
        made: what makes it of a repeat that does not hold it under its name.
        step: what one request more or less makes in a repeat's number, if it counts requests.
    """

    name: str
    label: str
    unit: str
    factor: float = 1.0
    more_is_better: bool = True
    counts_failures: bool = False
    step: Callable[[Json], float] = lambda repeat: 0.0
    made: Callable[[Json], float | None] | None = None

    def of(self, repeat: Json) -> float | None:
        """The number of one repeat; None where the repeat has none."""
        if self.made is not None:
            return self.made(repeat)
        value: Any = repeat
        for part in self.name.split("."):
            if value is None:
                return None
            value = value[part]
        return None if value is None else float(value)

    def readings(self, repeats: Iterable[Json]) -> dict[str, float]:
        """Of every repeat that has the figure, by its plan's fingerprint.

        Repeats of one plan are told apart by their place.
        """
        found: dict[str, float] = {}
        for repeat in repeats:
            value, key = self.of(repeat), repeat["fingerprint"]
            if value is None:
                continue
            again = sum(known.partition("#")[0] == key for known in found)
            found[f"{key}#{again}" if again else key] = value
        return found

    def largest_step(self, repeats: Iterable[Json]) -> float:
        """Of all repeats that have the figure; 0 where it has no steps."""
        return max((self.step(each) for each in repeats if self.of(each) is not None), default=0.0)


def _per_request(count: float) -> float:
    return 1 / count if count > 0 else 0.0


GOODPUT = Figure(
    "goodput_per_s",
    "good requests",
    "/s",
    counts_failures=True,
    step=lambda repeat: _per_request(repeat["goodput_span_s"]),
)


def _tried(repeat: Json) -> float:
    return float(repeat["completed"] + repeat["failed"])


WITHIN_SLO = Figure(
    "slo_fraction",
    "share within the SLO",
    "%",
    100,
    counts_failures=True,
    step=lambda repeat: _per_request(_tried(repeat)),
)
FAILED_SHARE = Figure(
    "failed_share",
    "share that failed",
    "%",
    100,
    more_is_better=False,
    counts_failures=True,
    step=lambda repeat: _per_request(_tried(repeat)),
    made=lambda repeat: repeat["failed"] / _tried(repeat) if _tried(repeat) else None,
)
THROUGHPUT = Figure("output_tokens_per_s", "output tokens", "/s")

FIGURES = (
    GOODPUT,
    WITHIN_SLO,
    FAILED_SHARE,
    THROUGHPUT,
    Figure("requests_per_s", "requests", "/s"),
    *(
        Figure(f"{name}_s.{key}", f"{name} {key}", "ms", 1000, more_is_better=False)
        for name in ("ttft", "ttst", "tpot", "itl", "e2e")
        for key in ("p50", "p90", "p99")
    ),
    Figure("cpu_s_per_output_token", "CPU per output token", "ms", 1000, more_is_better=False),
)
BY_NAME = {figure.name: figure for figure in FIGURES}
