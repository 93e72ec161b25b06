"""``cache.block_size: auto``: the least size whose blocks are worth a descriptor."""

from __future__ import annotations

import pytest

from kvferry.worker.block_sizing import ENOUGH_BYTES, SIZES, auto_block_size


def chosen(bytes_per_position: int, connector: str) -> int:
    return auto_block_size(lambda size: size * bytes_per_position, connector).block_size


@pytest.mark.parametrize("connector", ENOUGH_BYTES)
@pytest.mark.parametrize("bytes_per_position", [1 << exponent for exponent in range(4, 22)])
def test_it_is_the_least_size_with_enough_bytes_or_the_largest(
    bytes_per_position: int, connector: str
) -> None:
    enough = ENOUGH_BYTES[connector]
    large = [size for size in SIZES if size * bytes_per_position >= enough]
    assert chosen(bytes_per_position, connector) == (large[0] if large else 128)


@pytest.mark.parametrize("element_bytes", [1, 2, 4])
def test_a_small_language_model_on_a_cpu_gets_16(element_bytes: int) -> None:
    """30 layers of 3 heads of 64, and whatever its KV's element type."""
    assert chosen(30 * 2 * 3 * 64 * element_bytes, "auto") == 16


def test_over_tcp_it_is_never_less_than_in_shared_memory_and_auto_may_be_either() -> None:
    for bytes_per_position in range(1, 1 << 14, 97):
        tcp = chosen(bytes_per_position, "tcp")
        assert chosen(bytes_per_position, "shm") <= tcp == chosen(bytes_per_position, "auto")


def test_how_it_came_about_is_said_in_one_line() -> None:
    line = auto_block_size(lambda size: 3072 * size, "shm").arithmetic
    assert line == (
        "block size: 32 positions of 3,072 bytes (auto: the least of 16, 32, 64, 128 whose blocks "
        "have 65,536 bytes, for connector shm)"
    )
