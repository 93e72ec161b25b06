"""The page as Prometheus reads it: names, labels, types, buckets; and its size."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics

from kvferry.cluster.metrics.catalog import CATALOG, COMMON_LABELS, Kind
from kvferry.cluster.metrics.exposition import registry_of, render
from kvferry.cluster.metrics.families import WorkerInfo, families
from kvferry.engine.histogram import STEP_SECONDS, STEP_TOKENS, TRANSFER_SECONDS
from kvferry.kv_cache.audit import BlockClass
from kvferry.worker import messages as m
from kvferry.worker.messages import NodeRef, Role
from tests.cluster.metrics.scraping import page_of, read
from tests.cluster.routing import Bench

KINDS = ("sender", "receiver", "impossible", "lease", "Announce", "Replay")


def full_load(number: int = 1) -> m.LoadReport:
    """A report in which everything that a worker can count has a value."""

    def histogram(bounds: tuple[float, ...]) -> m.HistogramReport:
        return m.HistogramReport(tuple(range(len(bounds) + 1)), 12.5)

    return m.LoadReport(
        num_blocks=60,
        num_free_blocks=20,
        num_cached_blocks=10,
        num_leases=2,
        block_classes=tuple((name.value, 10) for name in BlockClass),
        cache=m.CacheCounters(*range(100, 110)),
        tallies=m.WorkerTallies(
            number,
            histogram(STEP_SECONDS),
            histogram(STEP_TOKENS),
            tuple((kind, 3) for kind in KINDS),
            4,
            tuple(
                m.TransferTally(
                    connector,
                    5,
                    640,
                    (("stale", 1), ("late", 2)),
                    histogram(TRANSFER_SECONDS),
                )
                for connector in ("shm", "tcp")
            ),
        ),
    )


def full_bench(
    num_prefill: int = 1, num_decode: int = 1
) -> tuple[Bench, dict[NodeRef, WorkerInfo]]:
    bench = Bench(num_prefill=num_prefill, num_decode=num_decode)
    sources = [each.ref for each in bench.members.values() if Role.PREFILL in each.roles]
    peers = tuple(m.PeerState(ref, "shm", True) for ref in sources)
    for name in bench.members:
        reads = name.startswith("decode")
        load = replace(full_load(), peers=peers if reads else ())
        bench.say(name, m.WorkerHeartbeat(load))
    infos: dict[NodeRef, WorkerInfo] = {
        each.ref: WorkerInfo("cpu", "avx512", ("shm", "tcp")) for each in bench.members.values()
    }
    return bench, infos


def full_page(num_prefill: int = 1, num_decode: int = 1) -> bytes:
    bench, infos = full_bench(num_prefill, num_decode)
    return page_of(bench.router, 0.25, infos)


def test_every_sample_has_the_labels_of_its_metric_and_no_others() -> None:
    found = read(full_page())
    for metric in CATALOG:
        name = metric.name.removesuffix("_total") if metric.kind is Kind.COUNTER else metric.name
        samples = found.families[name].samples
        for sample in samples:
            own = set(sample.labels) - ({"le"} if sample.name.endswith("_bucket") else set())
            assert own == set(metric.label_names), sample
            assert sample.name in metric.series_names, sample
            assert sample.labels["model_name"] == "stub"
            assert sample.labels["role"] in ("router", "prefill", "decode")


def test_buckets_are_cumulative_and_end_with_everything() -> None:
    found = read(full_page())
    for metric in CATALOG:
        if metric.kind is not Kind.HISTOGRAM:
            continue
        series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
        ends: dict[tuple[tuple[str, str], ...], float] = {}
        for sample in found.families[metric.name].samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
            if sample.name.endswith("_bucket"):
                series.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
            elif sample.name.endswith("_count"):
                ends[labels] = sample.value
        assert series.keys() == ends.keys()
        for labels, buckets in series.items():
            assert [le for le, _ in buckets] == [*metric.bounds, float("inf")]
            counts = [count for _, count in buckets]
            assert counts == sorted(counts)
            assert counts[-1] == ends[labels]


def test_what_a_worker_reports_stands_on_the_page_as_it_was_reported() -> None:
    found = read(full_page())
    at = {"worker_id": "decode-0", "role": "decode", "model_name": "stub"}
    for name, labels, expected in (
        ("kv_cache_usage_perc", {}, 1 - 20 / 60),
        ("kv_blocks", {"class": "pinned"}, 10),
        ("leases_active", {}, 2),
        ("prefix_cache_queries_total", {}, 100),
        ("prefix_cache_hits_total", {"source": "local"}, 101),
        ("prefix_cache_hits_total", {"source": "moved"}, 102),
        ("prefix_cache_hits_total", {"source": "host"}, 103),
        ("kv_evictions_total", {}, 104),
        ("cow_copies_total", {}, 105),
        ("num_preemptions_total", {"kind": "recompute"}, 106),
        ("num_preemptions_total", {"kind": "offload"}, 107),
        ("recomputed_tokens_total", {"reason": "preemption"}, 108),
        ("recomputed_tokens_total", {"reason": "recovery"}, 109),
        ("leases_expired_total", {}, 4),
        ("stale_messages_refused_total", {"kind": "lease"}, 3),
        ("transfer_blocks_total", {"connector": "tcp"}, 5),
        ("transfer_bytes_total", {"connector": "shm"}, 640),
        ("transfer_failures_total", {"connector": "shm", "reason": "late"}, 2),
        ("transfer_seconds_sum", {"connector": "shm"}, 12.5),
        ("engine_step_seconds_bucket", {"le": "0.005"}, 0 + 1 + 2),
        ("iteration_tokens_bucket", {"le": "4.0"}, 0 + 1 + 2),
        ("heartbeat_age_seconds", {}, 0.25),
        ("worker_ready", {}, 1),
        (
            "info",
            {"version": "0.1", "kernels": "cpu", "isa": "avx512", "connector": "shm,tcp"},
            1,
        ),
    ):
        assert found.value(f"kvferry_{name}", **at, **labels) == expected, name


def test_openmetrics_is_given_where_it_is_asked_for() -> None:
    bench, infos = full_bench()
    taken = families(bench.router, "stub", "0.1", infos, 0.0)
    accept = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    page, content_type = render(lambda: taken, accept)
    assert content_type.startswith("application/openmetrics-text")
    found = list(read_openmetrics(page.decode()))  # type: ignore[no-untyped-call]
    assert len(found) == len(CATALOG)


def test_names_follow_the_conventions() -> None:
    assert len({metric.name for metric in CATALOG}) == len(CATALOG)
    for metric in CATALOG:
        assert re.fullmatch(r"kvferry_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert bool(metric.bounds) == (metric.kind is Kind.HISTOGRAM)
        assert list(metric.bounds) == sorted(set(metric.bounds))
        assert not set(metric.labels) & {*COMMON_LABELS, "le"}
        assert metric.help.endswith(".")


def test_the_page_of_sixty_four_workers_is_bounded_and_does_not_grow_with_requests() -> None:
    """In samples, not in seconds: what a scrape costs is what it has to say."""
    bench, infos = full_bench(32, 32)

    def page() -> bytes:
        return page_of(bench.router, bench.now, infos)

    first = page()
    per_worker = sum(1 for line in first.splitlines() if b'worker_id="decode-7"' in line)
    assert per_worker < 130
    lines = [line for line in first.splitlines() if not line.startswith(b"#")]
    assert len(lines) <= 64 * per_worker + 250
    for number in range(200):
        request, _ = bench.submit(f"r{number}", max_tokens=2)
        bench.grant(request)
        bench.first_token(request)
        bench.tokens(request, 0, 100, 101, finish="length")
    after = [line for line in page().splitlines() if not line.startswith(b"#")]
    assert len(after) <= len(lines) + 4, "new reasons only, not new requests"


def test_a_scrape_may_ask_for_some_metrics_by_name() -> None:
    bench, infos = full_bench()
    registry = registry_of(lambda: families(bench.router, "stub", "0.1", infos, 0.0))
    some = registry.restricted_registry(["kvferry_kv_blocks"])
    assert [family.name for family in some.collect()] == ["kvferry_kv_blocks"]


@pytest.mark.parametrize("text", ['quo"te', "new\nline", "back\\slash"])
def test_label_values_are_escaped(text: str) -> None:
    bench, infos = full_bench()
    taken = families(bench.router, text, "0.1", infos, 0.0)
    page, _ = render(lambda: taken)
    assert read(page).value("kvferry_requests_accepted_total", model_name=text) == 0


def test_a_colocated_worker_has_a_role_of_its_own() -> None:
    bench = Bench(num_prefill=0, num_decode=0, num_colocated=1)
    assert {role for m in bench.members.values() for role in m.roles} == set(Role)
    found = read(page_of(bench.router, 0.0))
    assert set(found.by("role", "kvferry_worker_ready")) == {"colocated"}
