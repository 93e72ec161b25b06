"""What every connector promises: over shared memory, TCP, either of both, and in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.kv_cache.layout import KVCacheLayout
from kvferry.kv_transfer.compatibility import LayoutMismatch
from kvferry.kv_transfer.connector import (
    IncompatiblePeer,
    KVConnector,
    Move,
    ReadStatus,
    TransferFailed,
)
from kvferry.kv_transfer.local import LocalConnector, LocalFabric
from kvferry.kv_transfer.memory import allocate_private
from tests.kv_transfer.helpers import (
    COPIED_IN_POLL,
    LAYOUT,
    MODEL,
    Host,
    Pair,
    at_address,
    collect,
    layout_with,
    make_pair,
    polls_until,
)


def test_bytes_of_every_moved_block_equal_the_source(pair: Pair) -> None:
    order = [5, 0, 7, 2]
    results = pair.read([pair.source.move(b, t) for t, b in enumerate(order)])
    assert [r.status for r in results] == [ReadStatus.OK] * 4
    assert [r.index for r in results] == [0, 1, 2, 3]
    assert [r.num_bytes for r in results] == [LAYOUT.block_bytes()] * 4
    assert np.array_equal(pair.reader.memory.blocks[:4], pair.source.memory.blocks[order])


def test_blocks_that_were_not_named_stay_as_they_were(pair: Pair) -> None:
    before = pair.reader.memory.blocks.copy()
    pair.read([pair.source.move(1, 3)])
    untouched = [b for b in range(8) if b != 3]
    assert np.array_equal(pair.reader.memory.blocks[untouched], before[untouched])


def test_a_read_without_moves_ends_without_results(pair: Pair) -> None:
    assert pair.read([]) == []


def test_a_connector_satisfies_the_protocol(pair: Pair) -> None:
    connector: KVConnector = pair.reader.connector
    assert connector.local_info().worker_id == "reader"


def test_a_block_rewritten_after_its_announcement_is_stale(pair: Pair) -> None:
    """The lease ended between look-up and copy: another request's bytes are never served."""
    move = pair.source.move(2, 0, digest=False)
    pair.reader.connector.start_read(pair.peer, [move])
    pair.source.memory.raise_generation(2, 4)
    pair.source.memory.blocks[2] = 0xAB
    assert [r.status for r in collect(pair.reader.connector, 1)] == [ReadStatus.STALE]


def test_a_block_whose_life_ends_during_the_copy_is_stale(copying_host: Host) -> None:
    """The word is read after the copy is complete, not before it: here it rises in between.

    Where the source serves the read, it is the source that does so: ``test_tcp`` has that case.
    """
    pair = make_pair(copying_host)

    def rewrite(move: Move, _target: NDArray[np.uint8]) -> None:
        pair.source.memory.raise_generation(move.source.block_id, 4)
        pair.source.memory.blocks[move.source.block_id] = 0xAB

    pair.reader.connector.tamper = rewrite
    assert pair.read([pair.source.move(2, 0, digest=False)])[0].status is ReadStatus.STALE


@pytest.mark.parametrize("generation", [2, 4])
def test_an_older_or_younger_generation_is_stale(pair: Pair, generation: int) -> None:
    move = pair.source.move(1, 0)
    move = replace(move, source=replace(move.source, generation=generation))
    assert pair.read([move])[0].status is ReadStatus.STALE


def test_a_stale_block_reports_no_bytes(pair: Pair) -> None:
    move = pair.source.move(1, 0)
    pair.source.memory.raise_generation(1, 9)
    assert pair.read([move])[0].num_bytes == 0


def test_another_epoch_is_stale_and_nothing_is_copied(pair: Pair) -> None:
    before = pair.reader.memory.blocks.copy()
    move = pair.source.move(1, 0)
    move = replace(move, source=replace(move.source, epoch=move.source.epoch + 1))
    assert pair.read([move])[0].status is ReadStatus.STALE
    assert np.array_equal(pair.reader.memory.blocks, before)


def test_a_flipped_byte_is_corrupt_and_the_next_read_is_good(pair: Pair) -> None:
    hits = iter([True])

    def flip(_move: Move, target: NDArray[np.uint8]) -> None:
        if next(hits, False):
            target[-1] ^= 1

    pair.reader.connector.tamper = flip
    move = pair.source.move(3, 5)
    assert pair.read([move])[0].status is ReadStatus.CORRUPT
    assert pair.read([move])[0].status is ReadStatus.OK
    assert np.array_equal(pair.reader.memory.blocks[5], pair.source.memory.blocks[3])


def test_without_a_digest_the_bytes_are_taken_as_they_are(pair: Pair) -> None:
    assert pair.read([pair.source.move(3, 5, digest=False)])[0].status is ReadStatus.OK


@pytest.mark.parametrize("block_id", [-1, -8, 8, 1 << 40])
def test_a_source_block_outside_the_pool_fails(pair: Pair, block_id: int) -> None:
    move = pair.source.move(0, 0)
    bad = replace(move, source=replace(move.source, block_id=block_id))
    assert [r.status for r in pair.read([bad, move])] == [ReadStatus.FAILED, ReadStatus.OK]


@pytest.mark.parametrize("target", [-1, 8, 1 << 40])
def test_a_target_outside_the_own_pool_fails_and_writes_nothing(pair: Pair, target: int) -> None:
    before = pair.reader.memory.blocks.copy()
    move = replace(pair.source.move(0, 0), target=target)
    assert pair.read([move])[0].status is ReadStatus.FAILED
    assert np.array_equal(pair.reader.memory.blocks, before)


def test_a_rank_other_than_zero_fails(pair: Pair) -> None:
    assert pair.read([replace(pair.source.move(0, 0), rank=1)])[0].status is ReadStatus.FAILED


def test_a_cancelled_read_writes_nothing_and_reports_nothing(host: Host) -> None:
    pair = make_pair(host, blocks_per_poll=2)
    connector = pair.reader.connector
    read_id = connector.start_read(pair.peer, [pair.source.move(b, b) for b in range(6)])
    polls = [connector.poll(0.0)]  # its last blocks are queued, or under way
    assert [r.index for r in polls[0]] in ([], [0], [0, 1])
    connector.cancel(read_id)
    pair.reader.memory.blocks[:] = 0x5A  # the targets have another owner now
    last = connector.start_read(pair.peer, [pair.source.move(7, 7)])  # behind all of them
    assert [(r.read_id, r.status) for r in collect(connector, 1)] == [(last, ReadStatus.OK)]
    assert (pair.reader.memory.blocks[:7] == 0x5A).all()


def test_cancelling_one_read_leaves_the_others(host: Host) -> None:
    pair = make_pair(host, blocks_per_poll=1)
    connector = pair.reader.connector
    first = connector.start_read(pair.peer, [pair.source.move(b, b) for b in range(3)])
    second = connector.start_read(pair.peer, [pair.source.move(b, b) for b in range(3, 5)])
    connector.cancel(first)
    results = collect(connector, 2)
    assert [(r.read_id, r.index) for r in results] == [(second, 0), (second, 1)]


def test_cancelling_twice_or_an_unknown_read_changes_nothing(pair: Pair) -> None:
    connector = pair.reader.connector
    read_id = connector.start_read(pair.peer, [pair.source.move(0, 0)])
    collect(connector, 1)
    connector.cancel(read_id)
    connector.cancel(read_id)
    assert pair.read([pair.source.move(1, 1)])[0].status is ReadStatus.OK


def test_reads_of_a_closed_peer_fail_at_the_next_poll(pair: Pair) -> None:
    before = pair.reader.memory.blocks.copy()
    pair.reader.connector.start_read(pair.peer, [pair.source.move(b, b) for b in range(2)])
    pair.peer.close()
    pair.peer.close()
    statuses = [r.status for r in pair.reader.connector.poll(0.0)]
    assert statuses == [ReadStatus.FAILED] * 2
    assert np.array_equal(pair.reader.memory.blocks, before)


def test_a_poll_moves_no_more_than_its_budget(host: Host) -> None:
    pair = make_pair(host, blocks_per_poll=3)
    connector = pair.reader.connector
    connector.start_read(pair.peer, [pair.source.move(b, b) for b in range(8)])
    polls = [len(results) for results in polls_until(connector, 8)]
    assert max(polls) <= 3 and sum(polls) == 8
    if host.kind in COPIED_IN_POLL:
        assert polls == [3, 3, 2, 0]


def test_sources_take_turns_and_each_is_read_in_order(host: Host) -> None:
    pair = make_pair(host, blocks_per_poll=1)
    other = host.worker("other", epoch=2, seed=3)
    connector = pair.reader.connector
    peer = connector.connect(other.connector.local_info())
    long = connector.start_read(pair.peer, [pair.source.move(b, b) for b in range(4)])
    short = connector.start_read(peer, [other.move(b, b + 4) for b in range(2)])
    results = collect(connector, 6)
    if host.kind in COPIED_IN_POLL:
        assert [r.read_id for r in results] == [long, short, long, short, long, long]
    assert [r.index for r in results if r.read_id == long] == [0, 1, 2, 3]
    assert [r.index for r in results if r.read_id == short] == [0, 1]
    assert np.array_equal(pair.reader.memory.blocks[4:6], other.memory.blocks[:2])


def test_a_peer_names_its_connector_and_the_reason(pair: Pair, host: Host) -> None:
    wanted = {"auto": "shm", "multi-tcp": "tcp"}.get(host.kind, host.kind)
    assert pair.peer.connector == pair.peer.info.connector == wanted
    assert pair.peer.reason and pair.peer.is_open
    pair.peer.close()
    assert not pair.peer.is_open


def test_withdrawn_blocks_are_not_served_in_their_next_life(pair: Pair) -> None:
    moves = [pair.source.move(b, b) for b in range(4)]
    pair.reader.connector.start_read(pair.peer, moves)
    pair.source.connector.withdraw([1, 2])
    for block_id in (1, 2):
        pair.source.memory.raise_generation(block_id, 4)
        pair.source.memory.blocks[block_id] = 0xAB
    statuses = [r.status for r in collect(pair.reader.connector, 4)]
    ok, stale = ReadStatus.OK, ReadStatus.STALE
    assert statuses == [ok, stale, stale, ok]


def test_a_worker_can_read_from_its_own_reader(pair: Pair) -> None:
    """Every worker is both source and reader."""
    back = pair.source.connector.connect(pair.reader.connector.local_info())
    pair.source.connector.start_read(back, [pair.reader.move(6, 0)])
    assert [r.status for r in collect(pair.source.connector, 1)] == [ReadStatus.OK]
    assert np.array_equal(pair.source.memory.blocks[0], pair.reader.memory.blocks[6])


@pytest.mark.parametrize(
    ("layout", "field", "there", "here"),
    [
        (layout_with(block_size=8), "match_unit", "8", "4"),
        (layout_with(num_layers=3), "num_layers", "3", "2"),
        (layout_with(num_kv_heads=4), "num_kv_heads", "4", "2"),
        (layout_with(head_dim=16), "head_dim", "16", "8"),
        (layout_with(dtype="bfloat16"), "dtype", "'bfloat16'", "'float32'"),
        (layout_with(dtype="float16"), "dtype", "'float16'", "'float32'"),
        (layout_with(dtype="int8", scales="float32"), "dtype", "'int8'", "'float32'"),
        (layout_with(scales="float32"), "scales", "'float32'", "''"),
        (layout_with(num_planes=1), "num_planes", "1", "2"),
        (layout_with(first_kv_head=2), "first_kv_head", "2", "0"),
        (KVCacheLayout(4, LAYOUT.groups, rank=1, num_ranks=2), "num_ranks", "2", "1"),
        (KVCacheLayout(4, LAYOUT.groups * 2), "number of KV groups", "2", "1"),
    ],
)
def test_an_incompatible_layout_is_refused_with_both_values(
    host: Host, layout: KVCacheLayout, field: str, there: str, here: str
) -> None:
    reader = host.worker("reader")
    source = host.worker("source", layout=layout)
    with pytest.raises(IncompatiblePeer, match=rf"{field} is {there} there, {here} here"):
        reader.connector.connect(source.connector.local_info())


def test_another_model_is_refused_with_both_values(host: Host) -> None:
    reader = host.worker("reader")
    source = host.worker("source", model="tiny@2")
    with pytest.raises(IncompatiblePeer, match="model is 'tiny@2' there, 'tiny@1' here"):
        reader.connector.connect(source.connector.local_info())


@pytest.mark.parametrize("change", [{"epoch": 8}, {"worker_id": "someone"}])
def test_a_source_that_is_not_the_one_meant_is_refused(
    host: Host, change: dict[str, object]
) -> None:
    reader, source = host.worker("reader"), host.worker("source", epoch=7)
    meant = replace(source.connector.local_info(), **change)  # type: ignore[arg-type]
    with pytest.raises(TransferFailed):
        reader.connector.connect(meant)


@pytest.mark.parametrize("make_address", [lambda a: a + "x", lambda a: "nowhere", lambda a: ""])
def test_a_source_that_is_not_there_is_refused(
    host: Host, make_address: Callable[[str], str]
) -> None:
    reader, source = host.worker("reader"), host.worker("source")
    info = source.connector.local_info()
    with pytest.raises(TransferFailed):
        reader.connector.connect(at_address(info, make_address))


def test_a_peer_of_another_connector_is_refused(pair: Pair) -> None:
    class Foreign:
        info = pair.source.connector.local_info()
        connector = reason = ""
        setup_s = 0.0
        is_open = True

        def close(self) -> None: ...

    with pytest.raises(TransferFailed, match="connect to it"):
        pair.reader.connector.start_read(Foreign(), [])


def test_a_closed_connector_is_quiet_and_refuses_new_reads(pair: Pair) -> None:
    connector = pair.reader.connector
    connector.start_read(pair.peer, [pair.source.move(0, 0)])
    connector.close()
    connector.close()
    assert pair.reader.memory.closed
    assert connector.poll(0.0) == []
    with pytest.raises(TransferFailed):
        connector.start_read(pair.peer, [])


def test_memory_of_another_shape_than_the_layout_is_refused() -> None:
    memory = allocate_private(4, LAYOUT.block_bytes() + 1)
    with pytest.raises(LayoutMismatch, match=f"{LAYOUT.block_bytes()}"):
        LocalConnector(LocalFabric(), memory, worker_id="w", epoch=1, model=MODEL, layout=LAYOUT)


def test_reads_of_a_killed_local_worker_fail_and_its_successor_is_another_source() -> None:
    host = Host("local")
    pair = make_pair(host)
    address = pair.source.connector.local_info().address
    pair.reader.connector.start_read(pair.peer, [pair.source.move(0, 0)])
    host.fabric.kill(address)
    assert [r.status for r in pair.reader.connector.poll(0.0)] == [ReadStatus.FAILED]
    successor = host.worker("source", epoch=8, seed=9)
    pair.source.connector.close()  # the dead one's clean-up does not take its successor along
    with pytest.raises(TransferFailed, match=r"wanted source \(epoch 7\)"):
        pair.reader.connector.connect(pair.source.connector.local_info())
    pair.peer = pair.reader.connector.connect(successor.connector.local_info())
    assert pair.read([successor.move(0, 0)])[0].status is ReadStatus.OK
    host.close()
