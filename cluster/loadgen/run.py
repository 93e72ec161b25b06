"""A whole run: what the target says of itself, warm-up, repeats, and looks at the cluster.

``Run`` is filled as the run goes on, so that an interruption leaves what was measured so far. Does
not know how it is printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

from kvferry.cluster.bench_cpu import CpuMeter
from kvferry.cluster.errors import Internal
from kvferry.cluster.loadgen.drive import Driver
from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.goodput import FAILED, Slo
from kvferry.cluster.loadgen.measures import Pass
from kvferry.cluster.loadgen.plan import Plan, check_fits, make_plan, warm_up_plan
from kvferry.cluster.loadgen.server_series import ServerSeries
from kvferry.cluster.loadgen.sessions import IDS
from kvferry.cluster.loadgen.settings import Settings
from kvferry.cluster.loadgen.targets import About, Clock, Target
from kvferry.kv_cache.errors import KVFerryError

DEFAULT_VOCAB_SIZE = 32_000
SETTLE_S = 1.0  # workers report their counters with their heartbeats
PROGRESS_S = 0.5

OnProgress = Callable[[int, int, int, int], None]
"""Repeat (from 0; -1: the warm-up), requests ended, requests in all, requests in flight."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """One pass over its plan, and the cluster's statuses meanwhile."""

    plan: Plan
    measured: Pass
    series: ServerSeries


@dataclass(slots=True)
class Run:
    """All that has been measured so far; ``settings`` are resolved, the vocabulary once known."""

    settings: Settings
    about: About | None = None
    repeats: list[Repeat] = field(default_factory=list)

    @property
    def slo(self) -> Slo | None:
        """What good requests keep to; None if nothing was asked."""
        ttft_s, tpot_s = self.settings.slo_ttft, self.settings.slo_tpot
        return None if ttft_s is None and tpot_s is None else Slo(ttft_s, tpot_s)

    @property
    def complete(self) -> list[Repeat]:
        """The repeats that were measured to their end."""
        return [repeat for repeat in self.repeats if repeat.measured.is_complete]

    @property
    def median(self) -> Repeat | None:
        """The complete repeat of median throughput (of an even number, the slower of the two).

        Where there is none, the one that was interrupted, if it had begun.
        """
        ordered = sorted(
            self.complete or self.repeats, key=lambda each: each.measured.output_tokens_per_s
        )
        return ordered[(len(ordered) - 1) // 2] if ordered else None

    @property
    def error(self) -> KVFerryError | None:
        """Why the run does not count; None if no request failed."""
        return _error([repeat.measured for repeat in self.repeats])


def _error(passes: Sequence[Pass]) -> KVFerryError | None:
    failed = [s.error for p in passes for s in p.samples if s.outcome == FAILED]
    if not failed:
        return None
    total = sum(len(p.samples) for p in passes)
    first = f"{type(failed[0]).__name__}: {failed[0]}"
    return Internal(f"{len(failed)} of {total} requests failed; the first: {first}")


async def run_load(
    run: Run,
    open_target: Callable[[], AbstractAsyncContextManager[Target]],
    on_progress: OnProgress = lambda *_: None,
    clock: Clock = time.monotonic,
) -> None:
    """Fill ``run``. Raises KVFerryError where the target cannot serve the load at all."""
    settings = run.settings
    async with open_target() as target:
        about = run.about = await target.about()
        vocab_size = _vocab_size(settings, about)
        # Written down, or another target would get other tokens from the same settings.
        settings = run.settings = replace(settings, vocab_size=vocab_size)
        plans = [make_plan(settings, number, vocab_size) for number in range(settings.repeats)]
        if about.max_model_len is not None:
            for plan in plans:
                check_fits(plan, about.max_model_len)
        if settings.warm_up:
            driver = Driver(target, settings, clock, f"{settings.seed}/warm-up")
            await _follow(driver, warm_up_plan(settings, vocab_size), -1, on_progress)
            for failure in driver.measured.failures:
                raise failure
        for number, plan in enumerate(plans):
            driver = Driver(target, settings, clock, f"{settings.seed}/{number}")
            repeat = Repeat(plan, driver.measured, ServerSeries())
            run.repeats.append(repeat)
            await _measure(driver, repeat, number, about, on_progress)
            repeat.measured.is_complete = True


def _vocab_size(settings: Settings, about: About) -> int:
    """What made-up ids stay below. Raises BadLoad where the model does not have so many."""
    known = about.vocab_size
    wanted = settings.vocab_size or known or DEFAULT_VOCAB_SIZE
    if known is not None and wanted > known and settings.send == IDS:
        raise BadLoad(
            f"vocab_size: got {wanted}, and {about.model} knows {known} tokens; wanted at most "
            "as many"
        )
    return wanted


async def _measure(
    driver: Driver, repeat: Repeat, number: int, about: About, on_progress: OnProgress
) -> None:
    """One repeat between two looks at the cluster, with looks meanwhile."""
    target, settings, clock = driver.target, driver.settings, driver.clock
    await _look(target, repeat.series, clock)
    looks = asyncio.create_task(_watch(target, repeat.series, settings.poll, clock))
    meter = CpuMeter.of_cluster(about.status, about.address) if about.status is not None else None
    cpu_before = time.process_time()
    try:
        with _rare_collections():
            await _follow(driver, repeat.plan, number, on_progress)
    finally:
        repeat.measured.generator_cpu_s = time.process_time() - cpu_before
        repeat.measured.cpu_s = meter.elapsed() if meter is not None else None
        looks.cancel()
    if repeat.series.statuses:
        await asyncio.sleep(SETTLE_S)
        await _look(target, repeat.series, clock)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """What exists now (plans of millions of numbers) is not looked through while time counts."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def _follow(driver: Driver, plan: Plan, number: int, on_progress: OnProgress) -> None:
    """Run a plan, and tell of it now and then."""

    def tell() -> None:
        on_progress(number, driver.num_ended, plan.num_requests, driver.num_in_flight)

    async def tell_again() -> None:
        while True:
            tell()
            await asyncio.sleep(PROGRESS_S)

    telling = asyncio.create_task(tell_again())
    try:
        await driver.run(plan)
    finally:
        telling.cancel()
    tell()


async def _watch(target: Target, series: ServerSeries, period_s: float, clock: Clock) -> None:
    while period_s > 0 and series.statuses:
        await asyncio.sleep(period_s)
        await _look(target, series, clock)


async def _look(target: Target, series: ServerSeries, clock: Clock) -> None:
    """One status; that none came is counted, and is the load's to report where it matters."""
    try:
        status = await target.status()
    except KVFerryError:
        series.num_missed += 1
        return
    if status is not None:
        series.add(clock(), status)
