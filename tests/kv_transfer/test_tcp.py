"""What TCP adds to the contract: sends that are overtaken, streams that break, bounds."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.kv_transfer.authentication import NO_KEY
from kvferry.kv_transfer.connector import (
    BlockRef,
    Move,
    Peer,
    ReadId,
    ReadStatus,
    SlotRun,
    TransferFailed,
)
from kvferry.kv_transfer.digest import block_digest
from kvferry.kv_transfer.memory import allocate_private
from kvferry.kv_transfer.tcp import TcpConnector
from kvferry.kv_transfer.tcp_peer import TcpPeer
from kvferry.kv_transfer.tcp_wire import (
    HEADER,
    MAX_IN_FLIGHT_BLOCKS,
    REQUEST,
    TRAILER,
    BlockStatus,
    Kind,
    tune,
)
from tests.kv_transfer.helpers import (
    LAYOUT,
    MODEL,
    PATIENT,
    SOON_S,
    SOURCE_EPOCH,
    Host,
    Worker,
    collect,
    fill,
    layout_with,
    make_pair,
)
from tests.kv_transfer.open_files import open_files
from tests.kv_transfer.tcp_ends import (
    RawReader,
    RawSource,
    answer,
    has_arrived,
    is_hung_up,
    read_requests,
    receive,
    soon,
    tcp_of,
)

BIG = layout_with(num_layers=64, num_kv_heads=16, head_dim=128)  # 4 MiB a block
SMALL_BUFFERS = 64 * 1024  # what two kernels hold of it is far less
OK, STALE, CORRUPT, FAILED = (
    ReadStatus.OK,
    ReadStatus.STALE,
    ReadStatus.CORRUPT,
    ReadStatus.FAILED,
)


@pytest.fixture
def tcp_host() -> Iterator[Host]:
    made = Host("tcp")
    yield made
    made.close()


@pytest.fixture
def raw_source(tcp_host: Host) -> Iterator[RawSource]:
    source = tcp_host.worker("source", epoch=7)
    made = RawSource(source.connector.local_info())
    yield made
    made.close()


@pytest.fixture
def raw_reader(tcp_host: Host) -> Iterator[tuple[Worker, RawReader]]:
    source = tcp_host.worker("source", epoch=7, seed=1)
    made = RawReader(source.connector.local_info())
    yield source, made
    made.close()


def joined(source: RawSource, host: Host, **options: Any) -> tuple[Worker, Peer, socket.socket]:
    """A reader of 64 blocks connected to a source played by hand."""
    memory = allocate_private(64, LAYOUT.block_bytes())
    connector = TcpConnector(
        memory,
        worker_id="reader",
        epoch=1,
        model=MODEL,
        layout=LAYOUT,
        key=NO_KEY,
        **PATIENT,
        **options,
    )
    fill(memory, 2, generation=3)
    host.workers.append(Worker(memory, connector))
    return host.workers[-1], *source.join(host.workers[-1])


def readable(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(SOON_S)


@pytest.fixture
def big_source(tcp_host: Host) -> Worker:
    """A source that cannot have sent a block before its reader has taken a part of it."""
    memory = allocate_private(4, BIG.block_bytes())
    connector = TcpConnector(
        memory,
        worker_id="source",
        epoch=7,
        model=MODEL,
        layout=BIG,
        key=NO_KEY,
        socket_buffer_bytes=SMALL_BUFFERS,
        **PATIENT,
    )
    fill(memory, 1, generation=3)
    tcp_host.workers.append(Worker(memory, connector))
    return tcp_host.workers[-1]


def test_a_block_rewritten_while_it_is_sent_is_stale(big_source: Worker) -> None:
    """Look-up found it valid; the word rises before its last byte has left."""
    reader = RawReader(big_source.connector.local_info(), SMALL_BUFFERS)
    reader.connection.sendall(reader.request(0, block_id=0) + reader.request(1, block_id=1))
    begun = receive(reader.connection, HEADER.size + 4096)
    assert begun[0] == BlockStatus.VALID
    assert begun[HEADER.size :] == big_source.memory.blocks[0, :4096].tobytes()
    big_source.connector.withdraw([0])
    big_source.memory.raise_generation(0, 4)
    big_source.memory.blocks[0] = 0xAB
    receive(reader.connection, BIG.block_bytes() - 4096)
    assert TRAILER.unpack(receive(reader.connection, TRAILER.size)) == (BlockStatus.STALE, 0)
    assert reader.answer() == (BlockStatus.VALID, 1, big_source.memory.blocks[1].tobytes())
    assert tcp_of(big_source).served.stale_refused == 1
    assert tcp_of(big_source).served.blocks_sent == 1
    reader.close()


def test_a_reader_that_stands_still_does_not_hold_back_another(big_source: Worker) -> None:
    still = RawReader(big_source.connector.local_info(), SMALL_BUFFERS)
    still.connection.sendall(still.request(0, block_id=0))
    receive(still.connection, HEADER.size)
    other = RawReader(big_source.connector.local_info(), SMALL_BUFFERS)
    other.connection.sendall(other.request(0, block_id=1))
    assert other.answer()[2] == big_source.memory.blocks[1].tobytes()
    other.close()
    still.close()


def test_no_block_is_a_mixture_of_two_lives(tcp_host: Host) -> None:
    """A writer gives a block new lives as fast as it can; every byte of a life is its number."""
    pair = make_pair(tcp_host, layout=BIG, checksum=False)
    source = pair.source.memory
    source.blocks[0] = 3
    sealed = [3]
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            generation = sealed[0] + 1
            source.raise_generation(0, generation)
            source.blocks[0] = generation % 251
            sealed[0] = generation

    def announced(target: int) -> Move:
        return Move(BlockRef(SOURCE_EPOCH, 0, sealed[0]), target, BIG.block_size, None)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(50):
            for result in pair.read([announced(target) for target in range(3)]):
                if result.status is OK:
                    block = pair.reader.memory.blocks[result.move.target]
                    assert (block == result.move.source.generation % 251).all()
    finally:
        done.set()
        writer.join()
    assert pair.read([announced(0)])[0].status is OK


def begun_read(
    reader: Worker, peer: Peer, connection: socket.socket, moves: Sequence[Move]
) -> tuple[ReadId, bytes]:
    """A read whose first block has come by half; the other half is yet to be sent."""
    reader.memory.blocks[:] = 0
    read_id = reader.connector.start_read(peer, moves)
    assert reader.connector.poll(0.0) == []
    requests = read_requests(connection, len(moves))
    said = b"".join(answer(request, b"\x01" * LAYOUT.block_bytes()) for request in requests)
    half = HEADER.size + LAYOUT.block_bytes() // 2
    connection.sendall(said[:half])
    target = reader.memory.blocks[moves[0].target]
    soon(
        "half of the block",
        lambda: reader.connector.poll(0.0) == [] and target.sum() == target.size // 2,
    )
    return read_id, said[half:]


def test_a_cancel_in_the_middle_of_a_block_fences_it(raw_source: RawSource, tcp_host: Host) -> None:
    reader, peer, connection = joined(raw_source, tcp_host)
    source = tcp_host.workers[0]
    moves = [source.move(b, b) for b in range(3)]
    read_id, rest = begun_read(reader, peer, connection, moves)
    reader.connector.cancel(read_id)
    reader.memory.blocks[:] = 0x5A  # the targets have another owner now
    last = reader.connector.start_read(peer, [source.move(3, 3)])
    connection.sendall(rest)
    assert reader.connector.poll(0.0) == []
    (request,) = read_requests(connection, 1)
    connection.sendall(answer(request, source.memory.blocks[3]))
    assert [(r.read_id, r.status) for r in collect(reader.connector, 1)] == [(last, OK)]
    assert (reader.memory.blocks[:3] == 0x5A).all()


def test_a_peer_closed_in_the_middle_of_a_block_writes_no_more(
    raw_source: RawSource, tcp_host: Host
) -> None:
    reader, peer, connection = joined(raw_source, tcp_host)
    moves = [tcp_host.workers[0].move(b, b) for b in range(3)]
    begun_read(reader, peer, connection, moves)
    peer.close()
    reader.memory.blocks[:] = 0x5A
    assert [r.status for r in collect(reader.connector, 3)] == [FAILED] * 3
    assert (reader.memory.blocks == 0x5A).all()
    assert is_hung_up(connection)


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_half_a_block_that_goes_slot_by_slot_leaves_no_slot_written(
    raw_source: RawSource, tcp_host: Host, how: str
) -> None:
    reader, peer, connection = joined(raw_source, tcp_host)
    source = tcp_host.workers[0]
    runs = tuple(SlotRun(slot, slot, 0, 1) for slot in range(4))
    read_id = reader.connector.start_read(peer, [replace(source.move(0, 0), runs=runs)])
    assert reader.connector.poll(0.0) == []
    (request,) = read_requests(connection, 1)
    said = answer(request, b"\x01" * LAYOUT.block_bytes())
    half = HEADER.size + LAYOUT.block_bytes() // 2
    connection.sendall(said[:half])
    assert isinstance(peer, TcpPeer)
    receiver = peer._receiver
    assert receiver is not None
    soon(
        "half of the block",
        lambda: reader.connector.poll(0.0) == [] and receiver._count == half - HEADER.size,
    )
    reader.memory.blocks[:] = 0x5A  # the targets have another owner now
    if how == "close":
        peer.close()
        assert [r.status for r in collect(reader.connector, 1)] == [FAILED]
    else:
        reader.connector.cancel(read_id)
        connection.sendall(said[half:])
        reader.connector.start_read(peer, [source.move(7, 7)])
        assert reader.connector.poll(0.0) == []
        connection.sendall(answer(read_requests(connection, 1)[0], source.memory.blocks[7]))
        assert [r.status for r in collect(reader.connector, 1)] == [OK]
    assert (reader.memory.blocks[:7] == 0x5A).all()


def test_many_reads_of_one_peer_end_in_the_order_in_which_they_were_started(
    tcp_host: Host,
) -> None:
    pair = make_pair(tcp_host, num_blocks=64, blocks_per_poll=7)
    connector = pair.reader.connector
    expected = []
    for start in range(0, 64, 4):
        moves = [pair.source.move(b, 63 - b) for b in range(start, start + 4)]
        moves[1] = replace(moves[1], rank=1)  # refused on our side, yet in its turn
        read_id = connector.start_read(pair.peer, moves)
        expected += [(read_id, index, FAILED if index == 1 else OK) for index in range(4)]
    results = collect(connector, 64)
    assert [(r.read_id, r.index, r.status) for r in results] == expected


def test_bytes_in_flight_are_bounded_and_topped_up_in_order(
    raw_source: RawSource, tcp_host: Host
) -> None:
    bound = 20 * LAYOUT.block_bytes()
    reader, peer, connection = joined(raw_source, tcp_host, max_in_flight_bytes=bound)
    move = tcp_host.workers[0].move(0, 0)
    moves = [replace(move, target=t) for t in range(60)]
    reader.connector.start_read(peer, moves)
    asked = 0
    for ended in range(60):
        for _ in range(3):
            assert reader.connector.poll(0.0) == []
        assert isinstance(peer, TcpPeer) and peer.in_flight_bytes <= bound
        if readable(connection):
            asked += len(connection.recv(1 << 16)) // REQUEST.size
        assert asked == min(60, ended + 20)
        connection.sendall(HEADER.pack(BlockStatus.STALE, ended, 1, move.source.generation, 0, 0))
        assert [r.index for r in collect(reader.connector, 1)] == [ended]


def test_a_block_larger_than_the_bound_is_read_alone(raw_source: RawSource, tcp_host: Host) -> None:
    reader, peer, connection = joined(raw_source, tcp_host, max_in_flight_bytes=1)
    source = tcp_host.workers[0]
    reader.connector.start_read(peer, [source.move(b, b) for b in range(3)])
    for block in range(3):
        assert reader.connector.poll(0.0) == []
        (request,) = read_requests(connection, 1)
        assert request.block_id == block
        assert isinstance(peer, TcpPeer) and peer.in_flight_bytes == LAYOUT.block_bytes()
        connection.sendall(answer(request, source.memory.blocks[block]))
        assert [r.status for r in collect(reader.connector, 1)] == [OK]


def test_two_sources_that_are_both_ahead_are_read_in_turns(
    raw_source: RawSource, tcp_host: Host
) -> None:
    """A long read of one does not hold back the other, even where a poll has room for one block."""
    budget = LAYOUT.block_bytes()
    reader, peer, connection = joined(raw_source, tcp_host, bytes_per_poll=budget)
    other_peer, other_connection = raw_source.join(reader)
    move = tcp_host.workers[0].move(0, 0)
    reads = [
        reader.connector.start_read(to, [replace(move, target=first + t) for t in range(4)])
        for to, first in ((peer, 0), (other_peer, 4))
    ]
    assert reader.connector.poll(0.0) == []
    for end in (connection, other_connection):
        for request in read_requests(end, 4):
            end.sendall(answer(request, tcp_host.workers[0].memory.blocks[0]))
    soon("all there", lambda: has_arrived(connection) and has_arrived(other_connection))
    order = [r.read_id for r in collect(reader.connector, 8)]
    assert all(set(order[i : i + 2]) == set(reads) for i in range(0, 8, 2))


@pytest.mark.parametrize("announced", [True, False])
def test_a_byte_damaged_on_the_way_is_corrupt_and_the_next_read_is_good(
    raw_source: RawSource, tcp_host: Host, announced: bool
) -> None:
    """Against the announcement's digest, or else against the one that the source sends along."""
    reader, peer, connection = joined(raw_source, tcp_host)
    source = tcp_host.workers[0]
    move = source.move(3, 5, digest=announced)
    block = source.memory.blocks[3]
    damaged = block.copy()
    damaged[77] ^= 4
    for sent, status in ((damaged, CORRUPT), (block, OK)):
        reader.connector.start_read(peer, [move])
        assert reader.connector.poll(0.0) == []
        (request,) = read_requests(connection, 1)
        assert request.kind is (Kind.READ if announced else Kind.READ_WITH_DIGEST)
        digest = 0 if announced else block_digest(block)
        connection.sendall(answer(request, sent, digest=digest))
        assert [r.status for r in collect(reader.connector, 1)] == [status]
    assert np.array_equal(reader.memory.blocks[5], block)


def test_without_checksums_no_digest_is_asked_for(raw_source: RawSource, tcp_host: Host) -> None:
    reader, peer, connection = joined(raw_source, tcp_host, checksum=False)
    source = tcp_host.workers[0]
    reader.connector.start_read(peer, [source.move(3, 5, digest=False)])
    assert reader.connector.poll(0.0) == []
    (request,) = read_requests(connection, 1)
    assert request.kind is Kind.READ
    connection.sendall(answer(request, bytes(LAYOUT.block_bytes())))
    assert [r.status for r in collect(reader.connector, 1)] == [OK]


def test_stale_wins_over_corrupt(raw_source: RawSource, tcp_host: Host) -> None:
    reader, peer, connection = joined(raw_source, tcp_host)
    reader.connector.start_read(peer, [tcp_host.workers[0].move(0, 0)])
    assert reader.connector.poll(0.0) == []
    (request,) = read_requests(connection, 1)
    connection.sendall(answer(request, bytes(LAYOUT.block_bytes()), last=BlockStatus.STALE))
    assert [r.status for r in collect(reader.connector, 1)] == [STALE]


def test_a_source_that_stalls_leaves_the_read_open_and_one_that_hangs_up_fails_it(
    raw_source: RawSource, tcp_host: Host
) -> None:
    reader, peer, connection = joined(raw_source, tcp_host)
    source = tcp_host.workers[0]
    reader.connector.start_read(peer, [source.move(b, b) for b in range(4)])
    assert reader.connector.poll(0.0) == []
    requests = read_requests(connection, 4)
    connection.sendall(answer(requests[0], source.memory.blocks[0]))
    connection.sendall(answer(requests[1], source.memory.blocks[1])[:-1])
    assert [r.status for r in collect(reader.connector, 1)] == [OK]
    assert [reader.connector.poll(0.0) for _ in range(100)] == [[]] * 100
    connection.close()
    assert [r.status for r in collect(reader.connector, 3)] == [FAILED] * 3


@pytest.mark.parametrize(
    "change",
    [
        {"index": 1},
        {"read_id": 2},
        {"generation": 4},
        {"length": LAYOUT.block_bytes() - 1},
        {"length": 0},
        {"status": 3},
        {"last_index": 1},
        {"last": 3},
    ],
)
def test_an_answer_to_another_request_fails_the_connection(
    raw_source: RawSource, tcp_host: Host, change: dict[str, int]
) -> None:
    """Its bytes are the right ones, so that nothing but its fields can tell."""
    reader, peer, connection = joined(raw_source, tcp_host)
    source = tcp_host.workers[0]
    reader.connector.start_read(peer, [source.move(0, b, digest=False) for b in range(2)])
    assert reader.connector.poll(0.0) == []
    request = read_requests(connection, 2)[0]
    block = source.memory.blocks[0]
    said = {
        "status": BlockStatus.VALID,
        "index": request.index,
        "read_id": request.read_id,
        "generation": request.generation,
        "length": LAYOUT.block_bytes(),
        "digest": block_digest(block),
        "last": BlockStatus.VALID,
        "last_index": request.index,
    } | change
    head = list(said.values())
    connection.sendall(HEADER.pack(*head[:6]) + block.tobytes() + TRAILER.pack(*head[6:]))
    assert [r.status for r in collect(reader.connector, 2)] == [FAILED] * 2
    assert is_hung_up(connection)


def hostile(request_bytes: int) -> st.SearchStrategy[bytes]:
    """Answers of the right length with wrong fields, cut ones, and rubbish."""
    statuses, indexes = st.integers(0, 5), st.integers(0, 3)
    headers = st.builds(
        lambda status, index, read, generation, length: HEADER.pack(
            status, index, read, generation, length, 0
        ),
        statuses,
        indexes,
        st.integers(0, 3),
        st.integers(2, 4),
        st.sampled_from([0, 1, request_bytes, request_bytes + 1, 1 << 40]),
    )
    trailers = st.builds(TRAILER.pack, statuses, indexes)
    blocks = st.just(bytes(request_bytes))
    return st.lists(headers | trailers | blocks | st.binary(max_size=100)).map(b"".join)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(said=hostile(LAYOUT.block_bytes()))
def test_no_stream_breaks_the_reader_or_passes_for_a_block(
    raw_source: RawSource, tcp_host: Host, said: bytes
) -> None:
    """No answer has the right digest, so nothing may end OK; every read ends."""
    reader, peer, connection = joined(raw_source, tcp_host)
    reader.connector.start_read(peer, [tcp_host.workers[0].move(b, b) for b in range(2)])
    assert reader.connector.poll(0.0) == []
    read_requests(connection, 2)
    connection.sendall(said)
    connection.close()
    statuses = {r.status for r in collect(reader.connector, 2)}
    assert statuses <= {STALE, CORRUPT, FAILED}
    reader.connector.close()


def test_a_lost_connection_heals_with_the_next_read(raw_source: RawSource, tcp_host: Host) -> None:
    reader, peer, connection = joined(raw_source, tcp_host)
    source = tcp_host.workers[0]
    connection.close()
    second = threading.Thread(target=raw_source.greet)
    second.start()
    reader.connector.start_read(peer, [source.move(0, 0)])
    soon("greeted again", lambda: reader.connector.poll(0.0) == [] and not second.is_alive())
    again = raw_source.connections[-1]
    soon("asked", lambda: reader.connector.poll(0.0) == [] and readable(again))
    (request,) = read_requests(again, 1)
    again.sendall(answer(request, source.memory.blocks[0]))
    assert [r.status for r in collect(reader.connector, 1)] == [OK]


def test_a_connection_that_breaks_again_fails_the_read(
    raw_source: RawSource, tcp_host: Host
) -> None:
    reader, peer, _ = joined(raw_source, tcp_host)

    raw_source.connections[-1].close()
    thread = threading.Thread(target=lambda: raw_source.greet().close())
    thread.start()
    reader.connector.start_read(peer, [tcp_host.workers[0].move(0, 0)])
    assert [r.status for r in collect(reader.connector, 1)] == [FAILED]
    thread.join()


def test_reads_of_a_source_that_has_gone_fail_and_its_successor_is_another_source(
    tcp_host: Host,
) -> None:
    own = f"127.77.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"  # nobody else takes its ports
    pair = make_pair(tcp_host, host=own)
    info, move = pair.source.connector.local_info(), pair.source.move(0, 0)
    pair.source.connector.close()
    assert pair.read([move])[0].status is FAILED
    assert not pair.peer.is_open
    memory = allocate_private(8, LAYOUT.block_bytes())
    successor = TcpConnector(
        memory,
        worker_id="source",
        epoch=8,
        model=MODEL,
        layout=LAYOUT,
        host=own,
        key=NO_KEY,
        port=int(info.address.rpartition(":")[2]),
        **PATIENT,
    )
    fill(memory, 9, generation=3)
    assert successor.local_info().address == info.address
    assert pair.read([move])[0].status is FAILED
    assert successor.source.refused["wrong_receiver"] == 1
    with pytest.raises(TransferFailed):
        pair.reader.connector.connect(info)
    pair.peer = pair.reader.connector.connect(successor.local_info())
    worker = Worker(memory, successor)
    assert pair.read([worker.move(0, 0)])[0].status is OK
    successor.close()


def test_a_source_answers_what_is_not_a_block_of_its_life_and_goes_on(
    raw_reader: tuple[Worker, RawReader],
) -> None:
    source, reader = raw_reader
    reader.connection.sendall(
        reader.request(0, block_id=8)
        + reader.request(1, block_id=-1)
        + reader.request(2, block_id=(1 << 63) - 1)
        + reader.request(3, block_id=0, epoch=8)
        + reader.request(4, block_id=0, generation=4)
        + reader.request(5, block_id=5)
        + reader.request(6, block_id=99, epoch=8)
    )
    refused, stale, valid = BlockStatus.REFUSED, BlockStatus.STALE, BlockStatus.VALID
    answers = [reader.answer() for _ in range(7)]
    assert [(status, index) for status, index, _ in answers] == list(
        zip([refused, refused, refused, stale, stale, valid, stale], range(7), strict=True)
    )
    assert [data for _, _, data in answers if data] == [source.memory.blocks[5].tobytes()]
    assert tcp_of(source).served.stale_refused == 3


def test_more_requests_than_a_source_takes_in_advance_are_all_answered_in_order(
    raw_reader: tuple[Worker, RawReader],
) -> None:
    """They wait in the network meanwhile, not in the source's memory."""
    _, reader = raw_reader
    count = 8 * MAX_IN_FLIGHT_BLOCKS
    requests = b"".join(reader.request(i, block_id=i % 8) for i in range(count))
    thread = threading.Thread(target=reader.connection.sendall, args=(requests,))
    thread.start()
    assert [reader.answer()[1] for _ in range(count)] == list(range(count))
    thread.join()


def test_a_reader_that_asks_and_never_listens_cannot_fill_the_source(
    raw_reader: tuple[Worker, RawReader],
) -> None:
    """Its requests stay in the network once the source has taken its share of them."""
    _, reader = raw_reader
    requests = b"".join(reader.request(i, block_id=0) for i in range(1000))
    reader.connection.setblocking(False)
    taken = refused = 0
    while refused < 1000:
        try:
            taken += reader.connection.send(requests)
            refused = 0
        except BlockingIOError:
            refused += 1
            time.sleep(0)
        assert taken < 64 << 20, "the source takes whatever it is told"


def test_a_request_of_an_unknown_kind_ends_its_connection_only(
    raw_reader: tuple[Worker, RawReader],
) -> None:
    source, reader = raw_reader
    other = RawReader(source.connector.local_info())
    reader.connection.sendall(bytes([9]) + reader.request(0, 0)[1:])
    assert is_hung_up(reader.connection)
    assert tcp_of(source).source.refused["malformed"] == 1
    other.connection.sendall(other.request(0, 0))
    assert other.answer()[0] is BlockStatus.VALID
    other.close()


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(said=st.binary(max_size=400))
def test_no_request_kills_the_source(raw_reader: tuple[Worker, RawReader], said: bytes) -> None:
    source, _ = raw_reader
    hostile_reader = RawReader(source.connector.local_info())
    hostile_reader.connection.sendall(said)
    hostile_reader.close()
    honest = RawReader(source.connector.local_info())
    honest.connection.sendall(honest.request(0, block_id=2))
    assert honest.answer() == (BlockStatus.VALID, 0, source.memory.blocks[2].tobytes())
    honest.close()
    assert tcp_of(source).source.refused["failed"] == 0


def test_a_vanished_host_is_noticed_by_the_kernel() -> None:
    with socket.socket() as connection:
        tune(connection, 20.0, None)
        options = {
            name: connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        }
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert options["TCP_USER_TIMEOUT"] == 20_000
    idle_s = options["TCP_KEEPIDLE"] + options["TCP_KEEPINTVL"] * options["TCP_KEEPCNT"]
    assert idle_s == 20


def test_nothing_is_left_of_a_pair_however_it_ended() -> None:
    files, threads = open_files(), set(threading.enumerate())
    host = Host("tcp")
    pair = make_pair(host)
    moves = [pair.source.move(b, b) for b in range(8)]
    assert {r.status for r in pair.read(moves)} == {OK}
    second = pair.reader.connector.connect(pair.source.connector.local_info())
    second.close()
    nowhere = replace(pair.source.connector.local_info(), address="127.0.0.1:1")
    with pytest.raises(TransferFailed):
        pair.reader.connector.connect(nowhere)
    pair.reader.connector.cancel(pair.reader.connector.start_read(pair.peer, moves))
    pair.reader.connector.start_read(pair.peer, moves)
    pair.reader.connector.poll(0.0)
    pair.source.connector.close()
    pair.reader.connector.start_read(pair.peer, moves)
    pair.reader.connector.poll(0.0)
    host.close()
    assert set(threading.enumerate()) == threads
    del pair, second, host
    gc.collect()
    assert open_files() == files
