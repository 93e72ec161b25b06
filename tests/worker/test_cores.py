"""Workers of one host get cores of their own, of one memory node where that can be."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.worker.cores import candidate_ranges, claim_cores, numa_order, obstacle, parse_cores


def test_lists_of_cores_are_read_as_linux_writes_them() -> None:
    assert parse_cores("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert parse_cores("\n") == []


def test_cores_are_grouped_by_memory_node_and_those_of_none_come_last() -> None:
    assert numa_order([0, 1, 2, 5, 9], [[0, 1, 4], [2, 3, 5]]) == [[0, 1], [2, 5], [9]]
    assert numa_order([3, 1], []) == [[1, 3]]


def test_ranges_stay_inside_a_memory_node_before_they_cross() -> None:
    assert candidate_ranges(2, [[0, 1, 2], [4, 5, 6]]) == [(0, 1), (4, 5), (2, 6)]
    assert candidate_ranges(4, [[0, 1], [2, 3]]) == [(0, 1, 2, 3)]
    assert candidate_ranges(5, [[0, 1], [2, 3]]) == []


@given(st.integers(1, 5), st.lists(st.lists(st.integers(0, 99), unique=True), max_size=4))
def test_ranges_are_disjoint_and_use_all_that_makes_up_a_range(
    number: int, drawn: list[list[int]]
) -> None:
    groups = [[at * 100 + core for core in group] for at, group in enumerate(drawn)]
    ranges = candidate_ranges(number, groups)
    flat = [core for cores in ranges for core in cores]
    total = sum(len(group) for group in groups)
    assert len(set(flat)) == len(flat)
    assert (
        len(ranges) == total // number
        or len(ranges)
        == sum(len(group) // number for group in groups)
        + sum(len(group) % number for group in groups) // number
    )


@pytest.mark.parametrize(
    ("quota", "interfaces", "why"),
    [
        ("max 100000\n", ["lo", "nic0"], None),
        ("-1\n", ["lo", "nic0"], None),
        (None, ["lo", "nic0"], None),
        ("800000 100000\n", ["lo", "nic0"], "limit of processor time"),
        ("400000\n", ["lo", "nic0"], "limit of processor time"),
        ("max 100000\n", ["lo", "veth0"], "a network of its own"),
        (None, [], "a network of its own"),
    ],
)
def test_in_a_container_cores_are_not_claimed(
    tmp_path: Path, quota: str | None, interfaces: list[str], why: str | None
) -> None:
    for name in ("lo", "veth0", "nic0"):
        (tmp_path / "net" / name).mkdir(parents=True)
    (tmp_path / "net" / "nic0" / "device").mkdir()
    if quota is not None:
        (tmp_path / "quota").write_text(quota, encoding="ascii")
    found = obstacle(interfaces, tmp_path / "net", [tmp_path / "other", tmp_path / "quota"])
    assert found is None if why is None else found is not None and why in found


def test_two_claims_are_disjoint_and_a_released_one_is_free_again() -> None:
    prefix = f"kvferry-test-{uuid.uuid4().hex}"
    all_cores = sorted(os.sched_getaffinity(0))
    claims = [claim_cores(1, prefix) for _ in all_cores]
    assert sorted(core for claim in claims for core in claim.cores) == all_cores
    over = claim_cores(1, prefix)
    assert over.cores == () and "not pinned: 1 of this host's" in over.why
    claims[-1].release()
    claims[-1].release()
    again = claim_cores(1, prefix)
    assert again.cores == claims[-1].cores
    for claim in [*claims, again]:
        claim.release()


def test_a_process_that_dies_gives_its_cores_back() -> None:
    prefix = f"kvferry-test-{uuid.uuid4().hex}"
    number = len(os.sched_getaffinity(0))
    code = (
        "import signal; from kvferry.worker.cores import claim_cores\n"
        f"claim = claim_cores({number}, {prefix!r}); print(len(claim.cores), flush=True)\n"
        "signal.pause()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == str(number)
        assert claim_cores(1, prefix).cores == ()
        holder.kill()
    claim = claim_cores(number, prefix)
    assert len(claim.cores) == number
    claim.release()
