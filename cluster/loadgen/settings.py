"""All that a run is made of, as one flat record: flags and documents hold the same names.

``None`` means that a setting was not given; what it is then depends on the workload, and is said in
``WORKLOADS``. Settings that a workload does not look at are refused, not ignored. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from kvferry.cluster.loadgen.arrivals import GAMMA, POISSON
from kvferry.cluster.loadgen.errors import BadLoad

RANDOM, SHARED, SESSIONS, AGENTS, PRESSURE, TRACE, PROMPTS = (
    "random",
    "shared",
    "sessions",
    "agents",
    "pressure",
    "trace",
    "prompts",
)

_DRAWN = {"num_requests": 32, "input_tokens": "256", "output_tokens": "64"}
_OPENING = {"shared_ratio": 1.0, "groups": 4}
_CANCELS = {"cancel_share": 0.0, "cancel_within": 5.0}

WORKLOADS: Mapping[str, Mapping[str, Any]] = {
    RANDOM: {**_DRAWN, **_CANCELS},
    SHARED: {
        **_DRAWN,
        **_OPENING,
        **_CANCELS,
        "input_tokens": "128",
        "opening_tokens": "128",
        "shared_ratio": 0.5,
    },
    SESSIONS: {
        **_DRAWN,
        **_OPENING,
        **_CANCELS,
        "num_requests": 16,
        "input_tokens": "64",
        "opening_tokens": None,
        "turns": "uniform:2:5",
        "think": 0.0,
    },
    AGENTS: {
        **_DRAWN,
        **_OPENING,
        **_CANCELS,
        "num_requests": 16,
        "input_tokens": "uniform:16:96",
        "output_tokens": "32",
        "opening_tokens": "256",
        "turns": "uniform:3:6",
        "think": 0.0,
    },
    PRESSURE: {
        **_DRAWN,
        **_CANCELS,
        "input_tokens": "mix:0.7*128,0.3*512",
        "output_tokens": "uniform:64:256",
        "cancel_share": 0.3,
    },
    TRACE: {
        **_CANCELS,
        "trace": None,
        "trace_format": "auto",
        "num_requests": None,
        "divide_input": 1,
        "divide_output": 1,
        "stretch": 1.0,
        "grid": 0.0,
    },
    PROMPTS: {
        "num_requests": None,
        "output_tokens": "64",
        "prompts": None,
        "think": 0.0,
        **_CANCELS,
    },
}
"""What each workload looks at, and what holds where it is not given."""

OF_WORKLOADS = frozenset(name for known in WORKLOADS.values() for name in known)


@dataclass(frozen=True, slots=True)
class Settings:
    """One run. Lengths are specifications (``loadgen.lengths``), times are seconds.

    Attributes:
        endpoint, url, model, body: the target: gRPC, or HTTP if there is a ``url``.
        send: ``ids``, ``text`` or ``chat``.
        vocab_size: made-up ids are below it; None: the served model's, or 32,000 over HTTP.
        workload: one of ``WORKLOADS``, and then what it looks at.
        concurrency, rate: a closed loop of so many sessions, or an open one at so many per second.
            Neither: a trace's own times, or a closed loop of 8.
        arrival, burstiness, on, off: of an open loop, see ``arrivals.OpenLoop``; None: Poisson.
        ramp: the load grows for so long; what is sent meanwhile is not counted.
        warm_up: requests before the first repeat, which are not counted.
        timeout: of one request; it fails then. 0: none.
        slo_ttft, slo_tpot: what a good request keeps to.
        poll: seconds between two looks at the cluster's status; 0: none between the ends.
    """

    endpoint: str = "127.0.0.1:50051"
    url: str | None = None
    model: str | None = None
    body: Mapping[str, Any] | None = None
    send: str = "ids"
    vocab_size: int | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    workload: str = RANDOM
    num_requests: int | None = None
    input_tokens: str | None = None
    output_tokens: str | None = None
    opening_tokens: str | None = None
    shared_ratio: float | None = None
    groups: int | None = None
    turns: str | None = None
    think: float | None = None
    cancel_share: float | None = None
    cancel_within: float | None = None
    trace: str | None = None
    trace_format: str | None = None
    divide_input: int | None = None
    divide_output: int | None = None
    stretch: float | None = None
    grid: float | None = None
    prompts: str | None = None
    seed: int = 0
    concurrency: int | None = None
    rate: float | None = None
    arrival: str | None = None
    burstiness: float | None = None
    on: float | None = None
    off: float | None = None
    ramp: float = 0.0
    warm_up: int = 1
    repeats: int = 1
    timeout: float = 0.0
    slo_ttft: float | None = None
    slo_tpot: float | None = None
    poll: float = 0.5

    def resolved(self) -> Settings:
        """The same with its workload's defaults put in. Raises BadLoad for what does not fit."""
        if self.workload not in WORKLOADS:
            raise BadLoad(f"workload: got {self.workload!r}, wanted {', '.join(WORKLOADS)}")
        known = WORKLOADS[self.workload]
        given = {name for name in OF_WORKLOADS if getattr(self, name) is not None}
        foreign = sorted(given - known.keys())
        if foreign:
            owners = [w for w, names in WORKLOADS.items() if foreign[0] in names]
            raise BadLoad(
                f"{foreign[0]}: the workload {self.workload} does not look at it, "
                f"{', '.join(owners)} would"
            )
        self._check_needed()
        self._check_loop()
        defaults = {name: known[name] for name in known if name not in given}
        if self.rate is not None and self.arrival is None:
            defaults["arrival"] = POISSON
        return replace(self, **defaults)

    def _check_needed(self) -> None:
        if self.body is not None and self.url is None:
            raise BadLoad("body: only HTTP requests have one; wanted a url, too")
        for name in (TRACE, PROMPTS):
            if self.workload == name and getattr(self, name) is None:
                raise BadLoad(f"{name}: not given; the workload {name} reads a file")
        if self.concurrency is not None and self.rate is not None:
            raise BadLoad("got concurrency and rate; wanted one: a closed or an open loop")
        for name, value in asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise BadLoad(f"{name}: got {value}, wanted a number")
        for name in ("num_requests", "repeats", "concurrency", "vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadLoad(f"{name}: got {value}, wanted at least 1")
        for name in ("warm_up", "timeout", "poll", "ramp", "slo_ttft", "slo_tpot", "think"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise BadLoad(f"{name}: got {value}, wanted 0 or more")

    def _check_loop(self) -> None:
        """What would shape other arrivals than these is refused."""
        useless = []
        if self.rate is None:
            useless = ["arrival", "burstiness", "on", "off"]
        elif self.arrival != GAMMA:
            useless = ["burstiness"]
        if self.rate is not None or self.concurrency is not None:
            useless += ["stretch", "grid"]
        for name in useless:
            if getattr(self, name) is not None:
                raise BadLoad(f"{name}: these arrivals do not look at it: {self._loop}")
        if self.ramp and self.is_open and self.rate is None:
            raise BadLoad("ramp: a trace's own times have no ramp; wanted rate or concurrency")

    @property
    def _loop(self) -> str:
        if self.rate is not None:
            return f"an open loop of {self.arrival or POISSON} arrivals"
        return "a trace's own times" if self.is_open else "a closed loop"

    @property
    def is_open(self) -> bool:
        """Whether requests come at their times, and not when others have ended."""
        return is_open_loop(self.to_json())

    @property
    def clients(self) -> int:
        """Of a closed loop."""
        return 8 if self.concurrency is None else self.concurrency

    def to_json(self) -> dict[str, Any]:
        """Every setting by its name."""
        return asdict(self)

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> Settings:
        """The settings of a document's ``config``. Raises BadLoad for names it does not know."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(config.keys() - known)
        if unknown:
            raise BadLoad(f"config: unknown setting {unknown[0]!r}")
        return cls(**config)


def is_open_loop(config: Mapping[str, Any]) -> bool:
    """Whether requests come at their times, by the ``config`` of a document of any age."""
    if config.get("rate") is not None:
        return True
    return config.get("workload") == TRACE and config.get("concurrency") is None
