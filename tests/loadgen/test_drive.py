"""The loop sends each request at its time, and says how it ended. Time is a fake's."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.cluster.errors import DeadlineExceeded, Overloaded, StreamError, WorkerLost
from kvferry.cluster.loadgen.document import document_fields
from kvferry.cluster.loadgen.drive import Driver
from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.goodput import CANCELLED, COMPLETED, FAILED, Slo
from kvferry.cluster.loadgen.measures import Pass, results_json
from kvferry.cluster.loadgen.plan import make_plan
from kvferry.cluster.loadgen.run import Run, run_load
from kvferry.cluster.loadgen.settings import Settings
from tests.loadgen.fakes import FakeTarget, FakeTime

SMALL = Settings(input_tokens="3", output_tokens="4", num_requests=6, concurrency=2)


def driven(
    settings: Settings, time: FakeTime | None = None, target: FakeTarget | None = None
) -> tuple[Pass, FakeTarget]:
    time = time or FakeTime()
    target = target or FakeTarget(time)
    resolved = settings.resolved()
    driver = Driver(target, resolved, time)
    time.run(driver.run(make_plan(resolved, 0, 1000)))
    assert driver.num_in_flight == 0
    assert driver.num_ended == len(driver.measured.samples)
    return driver.measured, target


def test_a_closed_loop_keeps_its_requests_in_flight() -> None:
    measured, target = driven(SMALL)
    assert target.most_in_flight == 2
    # 0.5 s to the first token and three gaps of 0.1 s; three rounds of two
    assert target.sent_at == pytest.approx([0, 0, 0.8, 0.8, 1.6, 1.6])
    assert measured.duration_s == pytest.approx(2.4)
    assert measured.output_tokens_per_s == pytest.approx(24 / 2.4)


def test_an_open_loop_sends_at_its_times_whatever_becomes_of_others() -> None:
    settings = Settings(
        input_tokens="3", output_tokens="4", num_requests=6, rate=10.0, arrival="constant"
    )
    measured, target = driven(settings)
    assert target.sent_at == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert target.most_in_flight == 6
    assert [sample.lag_s for sample in measured.samples] == pytest.approx([0] * 6)


class Late(FakeTarget):
    """Its transport is handed each request 20 ms late."""

    async def send(self, request, receipt):  # type: ignore[no-untyped-def]
        self.clock.now += 0.02  # type: ignore[attr-defined]
        await super().send(request, receipt)


def test_lateness_is_measured() -> None:
    time = FakeTime()
    settings = Settings(
        input_tokens="3", output_tokens="1", num_requests=3, rate=1.0, arrival="constant"
    )
    measured, _ = driven(settings, time, Late(time))
    lag = results_json(measured, None)["schedule_lag_s"]
    assert lag["mean"] == pytest.approx(0.02)


def test_a_turn_is_sent_when_the_one_before_was_answered_and_holds_it() -> None:
    settings = Settings(
        workload="sessions",
        turns="3",
        think=0.25,
        input_tokens="2",
        output_tokens="2",
        num_requests=1,
        concurrency=1,
    )
    measured, target = driven(settings)
    assert target.sent_at == pytest.approx([0, 0.85, 1.7])  # answered in 0.6, thought 0.25
    prompts = [request.prompt.token_ids or () for request in target.requests]
    assert [len(prompt) for prompt in prompts] == [2, 6, 10]
    assert prompts[1][:4] == (*prompts[0], 100, 101)
    assert [sample.turn for sample in measured.samples] == [0, 1, 2]
    assert [sample.lag_s for sample in measured.samples] == pytest.approx([0, 0, 0])


def test_after_a_failed_turn_the_rest_of_its_session_is_skipped() -> None:
    time = FakeTime()
    target = FakeTarget(time, fail=lambda number: WorkerLost("gone") if number == 1 else None)
    settings = Settings(
        workload="sessions", turns="4", input_tokens="2", output_tokens="2", num_requests=1
    )
    measured, _ = driven(settings, time, target)
    assert [sample.outcome for sample in measured.samples] == [COMPLETED, FAILED]
    assert measured.num_skipped == 2


def test_failures_are_counted_by_kind_and_not_as_good() -> None:
    time = FakeTime()
    errors = {0: Overloaded("full"), 1: Overloaded("full"), 2: WorkerLost("gone")}
    measured, _ = driven(SMALL, time, FakeTarget(time, fail=errors.get))
    results = results_json(measured, Slo(ttft_s=1.0))
    assert results["failures"] == {"Overloaded": 2, "WorkerLost": 1}
    assert results["first_error"]["type"] == "Overloaded"
    assert results["completed"] == 3
    assert results["slo_fraction"] == 0.5
    assert results["goodput_per_s"] == pytest.approx(3 / measured.duration_s)


def test_a_cancelled_request_is_no_failure() -> None:
    settings = Settings(
        input_tokens="3", output_tokens="10", num_requests=20, cancel_share=1.0, cancel_within=1.0
    )
    measured, target = driven(settings)
    assert {sample.outcome for sample in measured.samples} == {CANCELLED}
    assert target.in_flight == 0
    assert all(
        sample.receipt.ended_at - sample.receipt.sent_at < 1.0 for sample in measured.samples
    )
    assert results_json(measured, Slo(ttft_s=9.0))["goodput_per_s"] == 0
    assert measured.failures == []


def test_a_request_that_takes_too_long_has_failed() -> None:
    settings = Settings(input_tokens="3", output_tokens="4", num_requests=2, timeout=0.6)
    measured, _ = driven(settings)
    assert {type(sample.error) for sample in measured.samples} == {DeadlineExceeded}


def test_what_is_sent_in_the_ramp_is_not_counted() -> None:
    settings = Settings(
        input_tokens="3",
        output_tokens="1",
        num_requests=30,
        rate=10.0,
        arrival="constant",
        ramp=2.0,
    )
    measured, _ = driven(settings)
    assert len(measured.samples) == 30
    assert len(measured.counted) == 20
    assert measured.counted[0].intended_at == pytest.approx(2.0)
    assert results_json(measured, None)["not_counted"] == 10


def test_an_answer_of_another_length_is_a_failure_where_the_length_was_to_be_exact() -> None:
    class Short(FakeTarget):
        async def send(self, request, receipt):  # type: ignore[no-untyped-def]
            await super().send(request, receipt)
            receipt.completion_tokens = 3

    time = FakeTime()
    measured, _ = driven(SMALL, time, Short(time))
    assert all(isinstance(sample.error, StreamError) for sample in measured.samples)
    time = FakeTime()
    relaxed = Settings(input_tokens="3", output_tokens="4", num_requests=2, ignore_eos=False)
    measured, _ = driven(relaxed, time, Short(time))
    assert measured.failures == []


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_an_answer_that_was_cut_off_is_a_failure_also_where_its_length_was_free(
    reason: str | None,
) -> None:
    class Aborted(FakeTarget):
        async def send(self, request, receipt):  # type: ignore[no-untyped-def]
            await super().send(request, receipt)
            receipt.finish_reason = reason

    time = FakeTime()
    relaxed = Settings(input_tokens="3", output_tokens="4", num_requests=2, ignore_eos=False)
    measured, _ = driven(relaxed, time, Aborted(time))
    assert [sample.outcome for sample in measured.samples] == [FAILED, FAILED]
    assert f"its finish_reason is {reason}, after 4 tokens" in str(measured.failures[0])


@pytest.mark.parametrize("loop", [{"rate": 10.0}, {"concurrency": 2}])
def test_what_no_request_can_fail_of_is_raised_as_it_is(loop: dict[str, float]) -> None:
    class Odd(FakeTarget):
        async def send(self, request, receipt):  # type: ignore[no-untyped-def]
            raise ZeroDivisionError("odd")

    time = FakeTime()
    with pytest.raises(ZeroDivisionError, match="odd"):
        driven(Settings(input_tokens="3", num_requests=3, **loop), time, Odd(time))  # type: ignore[arg-type]


def test_cpu_time_is_shared_among_all_tokens_that_came() -> None:
    time = FakeTime()
    lost = FakeTarget(time, fail=lambda number: WorkerLost("gone") if number == 9 else None)
    settings = Settings(
        input_tokens="3",
        output_tokens="4",
        num_requests=10,
        rate=10.0,
        arrival="constant",
        ramp=0.5,
    )
    measured, _ = driven(settings, time, lost)
    measured.cpu_s, measured.generator_cpu_s = 7.2, 3.6
    results = results_json(measured, None)
    assert (results["output_tokens"], results["received_tokens"]) == (6 * 4, 9 * 4)
    assert results["cpu_s_per_output_token"] == pytest.approx(0.2)
    assert results["generator_cpu_s_per_output_token"] == pytest.approx(0.1)


def run_with(settings: Settings, target: FakeTarget, time: FakeTime) -> Run:
    run = Run(settings.resolved())
    time.run(run_load(run, lambda: target, clock=time))
    return run


def test_a_run_warms_up_and_repeats_with_other_tokens() -> None:
    time = FakeTime()
    target = FakeTarget(time)
    settings = Settings(
        input_tokens="8", output_tokens="4", num_requests=3, concurrency=1, repeats=2, warm_up=2
    )
    run = run_with(settings, target, time)
    assert [len(repeat.measured.samples) for repeat in run.repeats] == [3, 3]
    assert len(target.requests) == 2 + 3 + 3
    assert len({request.prompt.token_ids for request in target.requests}) == 8
    assert run.error is None


def test_a_repeat_that_broke_off_is_no_result_while_another_is_whole() -> None:
    class Interrupted(FakeTarget):
        async def send(self, request, receipt):  # type: ignore[no-untyped-def]
            if len(self.requests) == self.at:
                raise KeyboardInterrupt
            await super().send(request, receipt)

        at = 0

    for at, completed in ((4, 4), (6, 6), (7, 6), (12, 6), (17, 6), (0, 0)):
        time = FakeTime()
        target = Interrupted(time)
        target.at = at
        settings = Settings(
            input_tokens="3", output_tokens="4", num_requests=6, concurrency=1, repeats=3, warm_up=0
        )
        run = Run(settings.resolved())
        with pytest.raises(KeyboardInterrupt):
            time.run(run_load(run, lambda target=target: target, clock=time))  # type: ignore[misc]
        assert [each.measured.is_complete for each in run.repeats] == [
            *([True] * (at // 6)),
            False,
        ]
        fields = document_fields(run, {"event_loop": "asyncio"})
        assert fields["results"]["completed"] == completed
        intervals = fields["intervals"]
        assert (intervals is None) == (at < 12)
        if intervals is not None:
            assert intervals["output_tokens_per_s"]["n"] == 2


def test_what_fails_in_the_warm_up_ends_the_run() -> None:
    time = FakeTime()
    with pytest.raises(WorkerLost):
        run_with(SMALL, FakeTarget(time, fail=lambda _: WorkerLost("gone")), time)


def test_a_session_that_cannot_fit_is_named_before_anything_is_sent() -> None:
    time = FakeTime()
    target = FakeTarget(time, max_model_len=6)
    with pytest.raises(BadLoad, match=r"session 0: 7 tokens.*takes 6"):
        run_with(SMALL, target, time)
    assert target.requests == []


def test_settings_survive_a_document(tmp_path: Path) -> None:
    resolved = SMALL.resolved()
    assert Settings.from_json(resolved.to_json()) == resolved
    assert resolved.resolved() == resolved
    with pytest.raises(BadLoad, match="unknown setting 'concurency'"):
        Settings.from_json({"concurency": 3})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"workload": "weekly"}, "workload: got 'weekly'"),
        ({"turns": "3"}, "turns: the workload random does not look at it, sessions, agents would"),
        ({"workload": "trace"}, "trace: not given"),
        ({"concurrency": 1, "rate": 1.0}, "got concurrency and rate"),
        ({"burstiness": 2.0}, "burstiness: these arrivals do not look at it: a closed loop"),
        ({"rate": 1.0, "burstiness": 2.0}, "an open loop of poisson arrivals"),
        ({"workload": "trace", "trace": "x", "ramp": 1.0}, "ramp: a trace's own times"),
        ({"workload": "trace", "trace": "x", "rate": 1.0, "grid": 3.0}, "grid: these arrivals"),
        ({"repeats": 0}, "repeats: got 0"),
        ({"rate": float("inf")}, "rate: got inf"),
        ({"timeout": -1.0}, "timeout: got -1"),
    ],
)
def test_settings_that_do_not_fit_are_named(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(BadLoad, match=said):
        Settings(**wrong).resolved()  # type: ignore[arg-type]
