from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.pool_sizing import (
    CPU_POOL_CAP_BYTES,
    MIB,
    PoolTooSmall,
    memory_limit,
    size_pool,
)

GIB = 1 << 30


def size(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "memory_limit_bytes": 8 * GIB,
        "share": 0.25,
        "weights_bytes": 512 * MIB,
        "peak_step_bytes": 256 * MIB,
        "reserve_bytes": 512 * MIB,
        "block_bytes": MIB,
        "useful_blocks": 100_000,
    }
    return size_pool(**(arguments | changes))


def test_auto_is_the_share_less_weights_step_and_reserve() -> None:
    found = size()
    assert found.num_blocks == 2048 - 512 - 256 - 512
    for part in ("8,192.00 MiB x 0.25", "weights 512.00", "step 256.00", "reserve 512.00"):
        assert part in found.arithmetic
    assert "= 768.00 MiB" in found.arithmetic and "768 blocks of 1.00 MiB" in found.arithmetic
    assert "\n" not in found.arithmetic


def test_auto_stops_at_the_blocks_that_can_be_useful() -> None:
    found = size(useful_blocks=100)
    assert found.num_blocks == 100 and "capped at 100 useful blocks" in found.arithmetic


def test_auto_stops_at_the_cap() -> None:
    found = size(share=1.0)
    assert found.num_blocks == CPU_POOL_CAP_BYTES // MIB
    assert "capped at 1,024.00 MiB" in found.arithmetic


def test_the_cap_yields_to_one_request_of_maximal_length() -> None:
    assert size(share=1.0, min_blocks=3000).num_blocks == 3000


def test_requests_win_over_the_automatic_size_and_blocks_over_memory() -> None:
    assert size(requested_memory=3 * GIB + 5).num_blocks == 3072
    assert size(requested_blocks=7).num_blocks == 7
    assert size(requested_memory=3 * GIB, requested_blocks=7).num_blocks == 7


@pytest.mark.parametrize(
    "changes",
    [
        {"min_blocks": 769},
        {"requested_blocks": 768, "min_blocks": 769},
        {"requested_memory": 769 * MIB - 1, "min_blocks": 769},
    ],
)
def test_less_than_one_maximal_request_is_an_error_naming_both_numbers(
    changes: dict[str, int],
) -> None:
    with pytest.raises(PoolTooSmall, match=r"needs 769 blocks, got 768: raise cache\.memory"):
        size(**changes)


@pytest.mark.parametrize("changes", [{"requested_blocks": 0}, {"weights_bytes": 9 * GIB}])
def test_no_block_at_all_is_an_error(changes: dict[str, int]) -> None:
    with pytest.raises(PoolTooSmall, match="needs 1 blocks, got 0"):
        size(**changes)


@given(
    limit=st.integers(0, 64 * GIB),
    share=st.floats(0.01, 1.0),
    weights=st.integers(0, 8 * GIB),
    block=st.integers(1, 8 * MIB),
    useful=st.integers(1, 10_000),
)
def test_auto_never_exceeds_what_is_left(
    limit: int, share: float, weights: int, block: int, useful: int
) -> None:
    try:
        found = size(
            memory_limit_bytes=limit,
            share=share,
            weights_bytes=weights,
            block_bytes=block,
            useful_blocks=useful,
        )
    except PoolTooSmall:
        return
    left = limit * share - weights - 256 * MIB - 512 * MIB
    assert 1 <= found.num_blocks <= useful
    assert found.num_blocks * block <= min(left, CPU_POOL_CAP_BYTES)


def machine(root: Path, cgroup: str, limits: dict[str, str]) -> Path:
    """A root with 16 GiB of memory, this process's groups, and limit files."""
    files = {"proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB\n"}
    files |= {"proc/self/cgroup": cgroup} | limits
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        ("", {}, 16 * GIB),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "max\n"}, 16 * GIB),
        ("0::/\n", {"sys/fs/cgroup/memory.max": f"{3 * GIB}\n"}, 3 * GIB),
        # the narrowest of a group and its parents
        (
            "0::/a/b\n",
            {
                "sys/fs/cgroup/a/b/memory.max": "max",
                "sys/fs/cgroup/a/memory.max": f"{2 * GIB}",
                "sys/fs/cgroup/memory.max": f"{5 * GIB}",
            },
            2 * GIB,
        ),
        # the path of a group outside a container's own mount: its root is what counts
        ("0::/outside\n", {"sys/fs/cgroup/memory.max": f"{4 * GIB}"}, 4 * GIB),
        # version 1, beside other hierarchies and an unused version 2
        (
            "5:devices:/\n4:cpu,memory:/box\n0::/\n",
            {"sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{GIB}\n"},
            GIB,
        ),
        # version 1 writes a huge number for no limit
        (
            "4:memory:/\n",
            {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"},
            16 * GIB,
        ),
    ],
)
def test_memory_limit_is_the_narrowest_of_groups_and_machine(
    tmp_path: Path, cgroup: str, limits: dict[str, str], expected: int
) -> None:
    assert memory_limit(machine(tmp_path, cgroup, limits)) == expected


def test_memory_limit_of_this_machine_is_plausible() -> None:
    assert 64 * MIB < memory_limit() < 1 << 50
