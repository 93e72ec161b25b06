"""How exact the load generator is: its figures beside a stub server's own record of what it sent.

    python -m tests.loadgen.accuracy [--tokens N] [--json FILE]      (make loadgen-accuracy)

The stub (a process of its own) emits 50 tokens per second and stream. First 100 streams over gRPC
and 50 over HTTP, whose phases a Poisson arrival spreads; these must keep within the limits. Then
twice as many, to see what breaks first. Percentiles of the time to the first token and of the gaps
may differ from the stub's by 2 % or 1 ms, whichever is more; the 99th percentile of the schedule's
lag must be below 5 ms. Where the stub itself was 5 ms late, somebody else had the cores: such a
case says nothing of the generator, is called disturbed, and is no success. Both processes read one
clock, so each token's way from emission to note is known, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from kvferry.cluster.cli.loadgen_loop import event_loop
from kvferry.cluster.loadgen.grpc_target import GrpcTarget
from kvferry.cluster.loadgen.http_target import HttpTarget
from kvferry.cluster.loadgen.measures import Pass, results_json
from kvferry.cluster.loadgen.run import Repeat, Run, run_load
from kvferry.cluster.loadgen.settings import Settings
from kvferry.cluster.loadgen.targets import Target
from kvferry.cluster.reports.common import Json, dist

RELATIVE, ABSOLUTE_S, LAG_S = 0.02, 0.001, 0.005
INTERVAL_S, TTFT_S = 0.02, 0.1
SPREAD_S = 2.0  # over which the streams begin
PERCENTILES = ("p50", "p90", "p99")
CASES = (("grpc", 100), ("http", 50), ("grpc", 200), ("http", 100))
MUST_KEEP = CASES[:2]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure, by the generator and by the stub, in seconds."""

    name: str
    generator_s: float
    stub_s: float

    @property
    def is_close(self) -> bool:
        """Within the limit."""
        allowed = max(RELATIVE * self.stub_s, ABSOLUTE_S)
        return abs(self.generator_s - self.stub_s) <= allowed


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case: streams through one door."""

    door: str
    streams: int
    num_failed: int
    comparisons: Sequence[Comparison]
    lag_p99_s: float
    stub_late_p99_s: float
    delay_s: Json
    generator_cpu_s_per_token: float
    generator_cores: float
    stub_cores: float

    @property
    def is_disturbed(self) -> bool:
        """The stub did not get the cores when it wanted them."""
        return self.stub_late_p99_s >= LAG_S

    def problems(self) -> list[str]:
        """What is beyond its limit, in words."""
        found = [
            f"{c.name} {c.generator_s * 1000:.2f} ms, stub {c.stub_s * 1000:.2f} ms"
            for c in self.comparisons
            if not c.is_close
        ]
        if self.lag_p99_s >= LAG_S:
            found.append(f"lag p99 {self.lag_p99_s * 1000:.1f} ms")
        if self.is_disturbed:
            found.append(
                f"disturbed: the stub itself was {self.stub_late_p99_s * 1000:.1f} ms late"
            )
        if self.num_failed:
            found.append(f"{self.num_failed} requests failed")
        return found

    def to_json(self) -> Json:
        """All of it."""
        return {
            "door": self.door,
            "streams": self.streams,
            "num_failed": self.num_failed,
            "figures": {
                c.name: {"generator_s": c.generator_s, "stub_s": c.stub_s, "close": c.is_close}
                for c in self.comparisons
            },
            "lag_p99_s": self.lag_p99_s,
            "stub_late_p99_s": self.stub_late_p99_s,
            "delay_s": self.delay_s,
            "generator_cpu_s_per_token": self.generator_cpu_s_per_token,
            "generator_cores": self.generator_cores,
            "stub_cores": self.stub_cores,
            "problems": self.problems(),
        }


class Stub:
    """The stub's process; ``records`` ends it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.doors: dict[str, str] = json.loads(process.stdout.readline())

    def cpu_s(self) -> float:
        """Processor time so far."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def records(self) -> list[Json]:
        """What it has written down, in order of arrival."""
        printed, _ = self._process.communicate(timeout=60)
        found: list[Json] = json.loads(printed)
        return found


@contextmanager
def stub(interval_s: float, ttft_s: float) -> Iterator[Stub]:
    """A running stub."""
    command = [sys.executable, "-m", "tests.loadgen.stub_server"]
    command += ["--interval", str(interval_s), "--ttft", str(ttft_s)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Stub(process)
        finally:
            process.kill()


def compare(measured: Pass, records: Sequence[Json]) -> list[Comparison]:
    """The generator's percentiles beside those of the same requests' records."""
    results = results_json(measured, None)
    stub_s = {
        "ttft": dist([record["emitted"][0] - record["received"] for record in records]),
        "itl": dist([b - a for record in records for a, b in pairwise(record["emitted"])]),
    }
    found = []
    for name, by_stub in stub_s.items():
        by_generator = results[f"{name}_s"]
        assert by_stub is not None and by_generator is not None, "nothing was measured"
        found += [
            Comparison(f"{name} {percentile}", by_generator[percentile], by_stub[percentile])
            for percentile in PERCENTILES
        ]
    return found


def lateness(records: Sequence[Json], ttft_s: float, interval_s: float) -> list[float]:
    """How much later than due the stub emitted each token, in seconds."""
    return [
        moment - (record["received"] + ttft_s + number * interval_s)
        for record in records
        for number, moment in enumerate(record["emitted"])
    ]


def delays(repeat: Repeat, records: Sequence[Json]) -> list[float]:
    """From each token's emission to its being noted, in seconds of the machine's one clock."""
    emitted = {tuple(record["prompt"]): record["emitted"] for record in records}
    found: list[float] = []
    for sample in repeat.measured.samples:
        prompt = repeat.plan.sessions[sample.session].turns[0].token_ids
        pairs = zip(sample.receipt.token_times, emitted[prompt], strict=True)
        found += [noted - sent for noted, sent in pairs]
    return found


def measure(door: str, streams: int, tokens: int) -> Outcome:
    """One case, with a stub of its own."""
    settings = Settings(
        input_tokens="16",
        output_tokens=str(tokens),
        num_requests=streams,
        rate=streams / SPREAD_S,
        vocab_size=100,
        warm_up=1,
        poll=0.0,
    ).resolved()
    with stub(INTERVAL_S, TTFT_S) as server:
        address = server.doors[door]
        open_target: Callable[[], AbstractAsyncContextManager[Target]] = (
            (lambda: GrpcTarget(address)) if door == "grpc" else (lambda: HttpTarget(address))
        )
        run = Run(settings)
        stub_before = server.cpu_s()
        with asyncio.Runner(loop_factory=event_loop()[1]) as runner:
            runner.run(run_load(run, open_target))
        stub_cpu_s = server.cpu_s() - stub_before
        records = server.records()[1:]  # the first one warmed up
    measured = run.repeats[0].measured
    results = results_json(measured, None)
    duration_s = results["duration_s"]
    late = dist(lateness(records, TTFT_S, INTERVAL_S))
    delay = dist(delays(run.repeats[0], records))
    assert late is not None and delay is not None
    return Outcome(
        door=door,
        streams=streams,
        num_failed=results["failed"],
        comparisons=compare(measured, records),
        lag_p99_s=results["schedule_lag_s"]["p99"],
        stub_late_p99_s=late["p99"],
        delay_s=delay,
        generator_cpu_s_per_token=measured.generator_cpu_s / results["output_tokens"],
        generator_cores=measured.generator_cpu_s / duration_s,
        stub_cores=stub_cpu_s / duration_s,
    )


def show(outcome: Outcome) -> None:
    """One case for people."""
    print(
        f"{outcome.streams} streams over {outcome.door}: "
        f"{outcome.generator_cpu_s_per_token * 1e6:.0f} CPU µs per token, "
        f"cores busy: generator {outcome.generator_cores:.2f}, stub {outcome.stub_cores:.2f}; "
        f"p99 of lag {outcome.lag_p99_s * 1000:.2f} ms, "
        f"of the stub's lateness {outcome.stub_late_p99_s * 1000:.2f} ms"
    )
    spread = ", ".join(f"{name} {outcome.delay_s[name] * 1000:.2f} ms" for name in PERCENTILES)
    print(f"  from emission to note: {spread}")
    for comparison in outcome.comparisons:
        print(
            f"  {comparison.name}: generator {comparison.generator_s * 1000:8.2f} ms, "
            f"stub {comparison.stub_s * 1000:8.2f} ms"
            + ("" if comparison.is_close else "   beyond the limit")
        )
    for problem in outcome.problems():
        print(f"  breaks: {problem}")


def main() -> None:
    """Measure every case; those that must keep within the limits decide the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    print(f"event loop: {event_loop()[0]}")
    outcomes = []
    for door, streams in CASES:
        outcomes.append(measure(door, streams, options.tokens))
        show(outcomes[-1])
    if options.json is not None:
        document = json.dumps([outcome.to_json() for outcome in outcomes], indent=1)
        options.json.write_text(document + "\n", encoding="utf-8")
    kept = zip(CASES, outcomes, strict=True)
    raise SystemExit(any(o.problems() for case, o in kept if case in MUST_KEEP))


if __name__ == "__main__":
    main()
