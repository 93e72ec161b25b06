"""Sweeps: what is measured, in which order, with which requests, and what they add up to."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.config import ConfigError, load_config
from kvferry.cluster.errors import Internal
from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.experiments.arrangements import (
    merged,
    parse_arrangement,
    parse_arrangements,
)
from kvferry.cluster.loadgen.experiments.drains import drains_json
from kvferry.cluster.loadgen.experiments.recipes import RECIPES
from kvferry.cluster.loadgen.experiments.sweep_making import check_configs, make_sweep
from kvferry.cluster.loadgen.experiments.sweep_plan import Axis, Contrast, Sweep, Variant
from kvferry.cluster.loadgen.experiments.sweeping import take_up
from kvferry.cluster.loadgen.plan import make_plan
from kvferry.cluster.loadgen.settings import Settings
from tests.cluster import documents
from tests.loadgen.experiments.making import repeat, request, server_row
from tests.loadgen.experiments.sweeps import FakeClusters, sweep_document, sweeping

THREE = parse_arrangements("1x2,2x1,1P+1D")
SETTINGS = Settings(repeats=2, num_requests=3, slo_ttft=1.0)


def small(**other: Any) -> Sweep:
    return Sweep(**{"arrangements": THREE, "settings": SETTINGS, **other})


def test_the_notation_of_arrangements() -> None:
    assert parse_arrangement("1x2").config() == {
        "prefill": {"replicas": 0},
        "decode": {"replicas": 0},
        "colocated": {"replicas": 1, "threads": 2},
    }
    wide = parse_arrangement("1Px2+3Dx4")
    assert (wide.prefill, wide.prefill_threads, wide.decode, wide.decode_threads) == (1, 2, 3, 4)
    assert wide.threads == 14 and not wide.is_colocated
    assert [each.threads for each in THREE] == [2, 2, 2]
    for wrong in ("", "1", "0x2", "1x0", "1P", "1P+0D", "P+D", "1x2x3"):
        with pytest.raises(BadLoad, match="arrangement"):
            parse_arrangement(wrong)
    with pytest.raises(BadLoad, match="stands twice"):
        parse_arrangements("1x2,1x2")


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_every_arrangement_is_a_configuration(p: int, tp: int, d: int, td: int) -> None:
    config = load_config(
        None,
        {
            f"{role}.{key}": value
            for role, section in parse_arrangement(f"{p}Px{tp}+{d}Dx{td}").config().items()
            for key, value in section.items()
        },
    )
    assert (config.replicas().prefill, config.replicas().decode) == (p, d)
    assert (config.prefill.threads, config.decode.threads) == (tp, td)


@given(st.lists(st.sampled_from([0.5, 1, 2, 4]), min_size=1, unique=True), st.integers(1, 3))
def test_all_arrangements_get_the_same_requests_and_all_loads_different_ones(
    rates: list[float], rounds: int
) -> None:
    points = small(axis=Axis("rate", tuple(rates)), rounds=rounds).points()
    assert len(points) == len({point.key for point in points}) == 3 * len(rates) * rounds
    seeds: dict[tuple[str, int], set[int]] = {}
    for point in points:
        seeds.setdefault((point.load, point.round), set()).add(point.settings.seed)
    assert all(len(each) == 1 for each in seeds.values())
    assert len(set().union(*seeds.values())) == len(rates) * rounds
    prints = {
        (point.load, point.round): make_plan(point.settings, 0, 100).fingerprint for point in points
    }
    assert len(set(prints.values())) == len(prints)


def test_longer_axes_and_more_rounds_keep_what_was_measured() -> None:
    keys = {point.key for point in small(axis=Axis("rate", (1, 2))).points()}
    more = {point.key for point in small(axis=Axis("rate", (1, 2, 3)), rounds=2).points()}
    assert keys < more
    slower = small(axis=Axis("rate", (1, 2)), settings=dataclasses.replace(SETTINGS, seed=9))
    assert not keys & {point.key for point in slower.points()}
    other = small(axis=Axis("rate", (1, 2)), config={"cache": {"block_size": 32}})
    assert not keys & {point.key for point in other.points()}


def test_each_cluster_is_started_once_a_round_and_ended() -> None:
    clusters = FakeClusters()
    sweep = small(arrangements=THREE[1:], axis=Axis("concurrency", (1, 2)), rounds=2)
    sweeping(sweep, clusters).run()
    once = [
        *("start {}//2x1", "measure 2x1 1", "measure 2x1 2", "end {}//2x1"),
        *("start {}//1P+1D", "measure 1P+1D 1", "measure 1P+1D 2", "end {}//1P+1D"),
    ]
    assert clusters.events == [line.format(number) for number in range(2) for line in once]


def test_what_is_measured_is_not_measured_again() -> None:
    sweep = small(axis=Axis("rate", (1, 2)))
    first = FakeClusters(fail_at=3)
    interrupted = sweeping(sweep, first)
    with pytest.raises(KeyboardInterrupt):
        interrupted.run()
    assert first.events[-1] == "end 0//2x1"
    assert len(interrupted.points) == 3
    second = FakeClusters()
    resumed = sweeping(sweep, second, interrupted.known)
    resumed.run()
    measured = [line for line in second.events if line.startswith("measure")]
    assert measured == ["measure 2x1 2.0", "measure 1P+1D 1.0", "measure 1P+1D 2.0"]
    assert [point["key"] for point in resumed.points] == [point.key for point in sweep.points()]
    third = FakeClusters()
    sweeping(sweep, third, resumed.known).run()
    assert third.events == []


def test_what_failed_is_tried_again_and_is_in_no_figure() -> None:
    sweep = small()
    failing = sweeping(sweep, FakeClusters(error=Internal("2 of 3 requests failed")))
    failing.run()
    assert "3 of 3 points failed; the first: 1x2, as set: 2 of 3" in str(failing.error)
    again = sweeping(sweep, FakeClusters(), failing.known)
    again.run()
    assert again.error is None


def test_a_file_of_another_sweep_is_left_alone() -> None:
    document = sweep_document(small(axis=Axis("rate", (1, 2))))
    assert len(take_up(document, small(axis=Axis("rate", (1, 2, 4))), "x.json")) == 6
    with pytest.raises(BadLoad, match="holds 3 points of another sweep"):
        take_up(document, small(axis=Axis("rate", (1,))), "x.json")
    with pytest.raises(BadLoad, match="no document of loadgen sweep"):
        take_up({"schema": "kvferry.demo/1"}, small(), "x.json")


def test_a_sweep_adds_up_and_keeps_its_schema() -> None:
    better = {"1P+1D": 2.0, "1x2": 1.0, "2x1": 1.1}
    clusters = FakeClusters(goodput=lambda name, number: better[name] + number / 100)
    sweep = small(
        axis=Axis("rate", (1, 2)),
        rounds=2,
        variants=(Variant("a"), Variant("b", {}, {"cache": {"block_size": 32}})),
        contrasts=(Contrast("bigger blocks", "a", "b"),),
    )
    document = sweep_document(sweep, clusters)
    documents.check(document)
    rows = {row["label"]: row for row in document["summary"]}
    assert len(rows) == 12
    row = rows["b, 1P+1D, rate 2"]
    assert row["num_repeats"] == 4
    assert row["figures"]["goodput_per_s"]["mean"] == pytest.approx(2.005)
    assert [v["kind"] for v in document["verdicts"]] == ["disaggregate"] * 2
    assert document["contrasts"][0]["label"] == "bigger blocks: 1x2, rate 1"
    assert all(f["beyond_noise"] is False for f in document["contrasts"][0]["figures"])
    point = document["points"][0]
    assert point["cluster_config"]["colocated"] == {"replicas": 1, "threads": 2}
    assert json.loads(json.dumps(document["sweep"]))["settings"]["slo_ttft"] == 1.0


def test_only_equal_threads_are_held_against_each_other() -> None:
    document = sweep_document(small(arrangements=parse_arrangements("1x4,1P+1D")))
    assert document["verdicts"] == []


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_can_be_measured(name: str) -> None:
    recipe = RECIPES[name]
    sweep = make_sweep({}, recipe)
    check_configs(sweep)
    for point in sweep.points():
        plan = make_plan(point.settings, 0, 49152)
        assert plan.num_requests > 0
    known = {variant.name for variant in recipe.variants}
    assert {name for each in recipe.contrasts for name in (each.a, each.b)} <= known
    document = sweep_document(make_sweep({"repeats": 2}, recipe))
    documents.check(document)
    assert (document["summary"][0]["drains"] is not None) == (name == "pressure")


def test_prefix_caching_and_sharing_are_told_apart() -> None:
    points = make_sweep({}, RECIPES["prefixes"]).points()
    seen = {
        (point.config["cache"]["prefix_caching"], point.settings.shared_ratio) for point in points
    }
    assert seen == {(False, 0.0), (False, 1.0), (True, 0.0), (True, 1.0)}
    assert {point.config["cache"]["memory"] for point in points} == {"512MiB"}
    assert len({point.settings.seed for point in points}) == 1


def test_flags_and_files_stand_before_a_recipe() -> None:
    recipe = RECIPES["disaggregation"]
    sweep = make_sweep(
        {"slo_ttft": 9.0, "num_requests": 2}, recipe, "1x2", Axis("rate", (7,)), 1, {"cache": {}}
    )
    (point,) = sweep.points()
    assert (point.settings.slo_ttft, point.settings.slo_tpot) == (9.0, 0.1)
    assert (point.settings.num_requests, point.settings.rate) == (2, 7.0)
    trace = make_sweep({"workload": "trace", "trace": "x.jsonl", "stretch": 4.0}, recipe)
    assert trace.axis == Axis()
    assert trace.points()[0].settings.rate is None
    pressure = make_sweep({}, RECIPES["pressure"], config={"cache": {"num_blocks": 9}})
    assert pressure.points()[0].config["cache"] == {"num_blocks": 9}
    for flags, said in (
        ({"rate": 2.0}, "rate: this sweep varies the rate"),
        ({"concurrency": 2}, "concurrency: this sweep varies the rate"),
    ):
        with pytest.raises(BadLoad, match=said):
            make_sweep(flags, recipe)
    with pytest.raises(BadLoad, match="shared_ratio: the recipe prefixes varies it"):
        make_sweep({"shared_ratio": 0.5}, RECIPES["prefixes"])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Axis("rate", ()), "no values"),
        (lambda: Axis("rate", (0,)), "more than 0"),
        (lambda: Axis("rate", (1, 1)), "stands twice"),
        (lambda: Axis("concurrency", (1.5,)), "whole numbers"),
        (lambda: small(rounds=0), "rounds: got 0"),
        (lambda: small(axis=Axis("stretch", (1,))), "only a trace's times"),
        (lambda: small(settings=Settings(url="http://x")), "starts its own clusters"),
    ],
)
def test_what_makes_no_sweep_is_refused(make: Any, said: str) -> None:
    with pytest.raises(BadLoad, match=said):
        make()


@pytest.mark.parametrize(
    "config",
    [
        {"tenants": {"a": {"key_file": "k"}}},
        {"server": {"auth": {"tokens_file": "t"}}},
        {"server": {"tls": {"cert": "c", "key": "k"}}},
    ],
)
def test_clusters_that_the_sweep_could_not_enter_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="for kvferry serve"):
        check_configs(make_sweep({}, config=config))


def test_mappings_are_merged_without_sharing() -> None:
    a = {"x": {"y": 1, "z": 2}, "w": 3}
    whole = merged(a, {"x": {"y": 5}}, {"v": {"u": 1}})
    assert whole == {"x": {"y": 5, "z": 2}, "w": 3, "v": {"u": 1}}
    whole["x"]["z"] = 9
    assert a["x"] == {"y": 1, "z": 2}


def test_blocks_are_free_and_queues_empty_some_time_after_a_burst() -> None:
    gone = {"outcome": "cancelled"}
    first = [
        request(0, 0.2, 1.0, sent_s=0.0, ended_s=1.0),
        request(1, 1.5, 2.0, sent_s=0.5, ended_s=2.5, **gone),
    ]
    second = [request(2, 0.5, 1.0, sent_s=10.0, ended_s=11.0)]
    third = [request(3, 0.5, 1.0, sent_s=12.0, ended_s=13.0)]
    last = [request(4, 0.5, 1.0, sent_s=20.0, ended_s=21.0)]
    looks = [
        server_row(0.0, 0, 0.0),
        server_row(2.0, 2, 0.5),
        server_row(2.6, 0, 0.2),
        server_row(2.8, 0, 0.0),
        server_row(11.5, 1, 0.1),
        server_row(14.0, 0, 0.0),
        server_row(25.0, 0, 0.0),
    ]
    one = repeat(1)
    one["requests"] = [*first, *second, *third, *last]
    one["server"]["series"] = looks
    found = drains_json([one])
    assert found is not None
    assert found["num_bursts"] == 4
    assert found["num_not_seen_empty"] == 1
    assert found["reclaim_after_cancel_s"]["max"] == pytest.approx(0.3)
    assert found["reclaim_after_answer_s"]["max"] == pytest.approx(1.0)
    assert found["queue_recovery_s"]["max"] == pytest.approx(1.5)
    assert drains_json([{**one, "server": None}]) is None
    looks[3]["kv_usage"] = {"decode-0": 0.0}  # the other worker has died: no sign of free blocks
    found = drains_json([one])
    assert found is not None
    assert found["num_not_seen_empty"] == 2
    assert found["reclaim_after_cancel_s"] is None
