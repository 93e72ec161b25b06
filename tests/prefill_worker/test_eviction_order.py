"""What is left of a prompt that was read and then evicted in part is its beginning."""

from __future__ import annotations

import pytest

from kvferry.kv_cache.block_pool import BlockPool
from kvferry.kv_cache.hashing import Mark, block_hash, root_hash
from kvferry.kv_cache.prefix_index import PrefixIndex
from kvferry.worker import messages as m
from tests.fakes import stub_spec
from tests.prefill_worker.test_prefill_role import PrefillBench


def finish(bench: PrefillBench, name: str, first: int, length: int, *acknowledged: int) -> int:
    """Prefill a prompt that is read bit by bit; how many of its positions were here."""
    bench.ask(name, spec=stub_spec(name, range(first, first + length), 5))
    bench.step(4)
    for until in acknowledged:
        bench.acknowledge(until, name=name)
        bench.check()
    bench.acknowledge(length, hand_off=True, name=name)
    bench.check()
    (done,) = [body for _, body in bench.sent(m.PrefillDone) if isinstance(body, m.PrefillDone)]
    return done.stats.num_cached_tokens


@pytest.mark.parametrize("acknowledged", [(), (4, 8, 12), (12,)])
def test_the_tail_of_a_prompt_that_was_read_goes_first(acknowledged: tuple[int, ...]) -> None:
    bench = PrefillBench(num_blocks=8)
    bench.made.worker.engine.pool.index = PrefixIndex()
    assert finish(bench, "r", 0, 16, *acknowledged) == 0
    assert finish(bench, "other", 40, 24, 24) == 0, "it takes two of the four"
    assert finish(bench, "again", 0, 16) == 8


def test_a_block_of_another_life_is_left_where_it_is() -> None:
    pool = BlockPool(3, index=PrefixIndex())
    blocks = pool.allocate(3)
    for block_id in blocks:
        pool.seal(block_id, 1, marks=[Mark(block_hash(root_hash("m"), [block_id]), 1)])
        pool.release([block_id])
    pool.used([(blocks[0], 0), (blocks[1], 1), (blocks[2], 1)])
    assert pool.allocate(3) == [blocks[0], blocks[2], blocks[1]]
