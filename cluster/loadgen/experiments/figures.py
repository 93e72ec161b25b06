"""The figures that experiments compare: where each stands in a repeat, and which way is better."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    """

    name: str
    label: str
    unit: str
    factor: float = 1.0
    more_is_better: bool = True

    def of(self, repeat: Json) -> float | None:
        """The number of one repeat; None where the repeat has none."""
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


GOODPUT = Figure("goodput_per_s", "good requests", "/s")
THROUGHPUT = Figure("output_tokens_per_s", "output tokens", "/s")

FIGURES = (
    GOODPUT,
    Figure("slo_fraction", "share within the SLO", "%", 100),
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
