"""What the cluster said of itself: sums over workers that live, die and come again."""

from __future__ import annotations

from kvferry.cluster.loadgen.measures import Pass
from kvferry.cluster.loadgen.server_series import ServerSeries, server_json
from kvferry.protos import kvferry_pb2 as pb
from tests.cluster.fake_server import status_response
from tests.loadgen.fakes import FakeTarget, FakeTime
from tests.loadgen.test_drive import SMALL, run_with


def statuses(count: int) -> list[pb.StatusResponse]:
    found = []
    for number in range(count):
        status = status_response()
        for worker in status.workers:
            worker.num_running = number
            worker.kv.usage = number / 10
            worker.cache.queried_tokens = 100 * number
            worker.cache.hit_tokens_local = 10 * number
            worker.cache.preemptions_recompute = number
        found.append(status)
    return found


def test_the_clusters_own_figures_are_gathered_between_two_looks() -> None:
    time = FakeTime()
    target = FakeTarget(time, statuses=statuses(50))
    run = run_with(SMALL, target, time)
    repeat = run.repeats[0]
    server = server_json(repeat.series, repeat.measured)
    assert server is not None
    rows, looks = server["series"], len(repeat.series.statuses)
    assert looks > 4
    assert [row["num_running"] for row in rows] == [2 * number for number in range(looks)]
    assert [row["preemptions"] for row in rows] == [2 * number for number in range(looks)]
    assert rows[1]["kv_usage"] == {"prefill-0": 0.1, "decode-0": 0.1}
    assert server["totals"]["queried_tokens"] == 2 * 100 * (looks - 1)
    assert {row["in_flight"] for row in rows[1:-1]} == {2}


def test_a_worker_that_was_restarted_counts_from_nothing() -> None:
    before, after = statuses(6)[5], statuses(3)[2]
    after.workers[0].worker.epoch = 9
    series = ServerSeries()
    series.add(0.0, before)
    series.add(1.0, after)
    after.workers[1].cache.queried_tokens = 700
    server = server_json(series, Pass())
    assert server is not None
    assert server["totals"]["queried_tokens"] == 200 + (700 - 500)


def worker_died() -> tuple[pb.StatusResponse, ...]:
    """Before, dead, its successor: what the workers and their sum say."""
    before, dead, after = statuses(6)[5], statuses(9)[8], statuses(9)[8]
    dead.workers[0].CopyFrom(pb.WorkerStatus(worker=dead.workers[0].worker))
    dead.workers[0].worker.state = "lost"
    after.workers[0].CopyFrom(statuses(3)[2].workers[0])
    after.workers[0].worker.epoch = 9
    for status, refused in ((before, 50), (dead, 20), (after, 23)):
        status.counters.stale_refused = refused
        status.counters.accepted = 10
    return before, dead, after


def test_a_worker_that_died_takes_nothing_back() -> None:
    series = ServerSeries()
    for moment, status in enumerate(worker_died()):
        series.add(float(moment), status)
    server = server_json(series, Pass())
    assert server is not None
    # decode-0 grew from 500 to 800; prefill-0's successor counted 200
    assert server["totals"]["queried_tokens"] == 300 + 200
    assert server["totals"]["stale_refused"] == 3
    assert server["totals"]["accepted"] == 0
    assert [row["hit_tokens_local"] for row in server["series"]] == [0, 30, 50]
    assert [row["kv_usage"].keys() for row in server["series"]] == [
        {"prefill-0", "decode-0"},
        {"decode-0"},
        {"prefill-0", "decode-0"},
    ]


def test_a_worker_that_comes_back_in_the_same_life_counts_on() -> None:
    before, dead, _ = worker_died()
    again = statuses(9)[8]
    series = ServerSeries()
    for moment, status in enumerate((before, dead, again)):
        series.add(float(moment), status)
    server = server_json(series, Pass())
    assert server is not None
    assert server["totals"]["queried_tokens"] == 2 * 300


def test_a_router_that_was_restarted_counts_from_nothing() -> None:
    before, _, after = worker_died()
    after.routers[0].epoch = 2
    after.counters.accepted = 4
    series = ServerSeries()
    series.add(0.0, before)
    series.add(1.0, after)
    server = server_json(series, Pass())
    assert server is not None
    assert server["totals"]["accepted"] == 4
    assert server["totals"]["stale_refused"] == 0
