"""Pool and tables under arbitrary owners, against a dictionary that shares no code with them.

The machine plays everybody who may own a block: requests that grow, fork and are freed in any
order, leases, and reads from a peer. It also plays the memory: it writes and copies where it is
told, and it spoils a block whenever a new life of it begins, so that a block in wrong hands reads
back wrong.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvferry.kv_cache.audit import BlockClass, Owner, OwnerKind, audit
from kvferry.kv_cache.block_pool import BlockPool, BlockState
from kvferry.kv_cache.block_table import BlockTable, KVCacheManager
from kvferry.kv_cache.hashing import HashChain, root_hash

Item = TypeVar("Item")
ROOT = root_hash("m@1")
MOST_REQUESTS = 5
picks = st.integers(0, 63)  # which of a list, modulo its length


def pick(items: list[Item], number: int) -> Item:
    return items[number % len(items)]


@dataclass(eq=False)
class Request:
    """A sequence: its table and what its computed positions must read back as."""

    name: str
    table: BlockTable
    tokens: list[int]
    chain: HashChain
    reading: set[int] = field(default_factory=set)  # block indexes still being read
    failed: bool = False  # a read will not arrive: the request can only be freed

    @property
    def complete(self) -> bool:
        """Whether all its positions are there."""
        return not self.reading and not self.failed


@dataclass
class Lease:
    """A pinned block, the life it was pinned in, and what it held then."""

    block_id: int
    generation: int
    content: list[int]


@dataclass(eq=False)
class Read:
    """A running read into one block."""

    request: Request
    index: int
    block_id: int


class PoolMachine(RuleBasedStateMachine):
    """See the module."""

    @initialize(num_blocks=st.sampled_from([4, 8, 12, 20]), size=st.integers(1, 4))
    def start(self, num_blocks: int, size: int) -> None:
        self.size = size
        self.pool = BlockPool(num_blocks, self.publish)
        self.kv = KVCacheManager(self.pool, size)
        self.memory = {b: [-1] * size for b in range(num_blocks)}
        self.published = dict.fromkeys(range(num_blocks), 0)
        self.held: list[Request] = []
        self.num_requests = 0
        self.pins: list[Lease] = []
        self.running: list[Read] = []
        self.lost: set[int] = set()
        self.closed: set[tuple[int, int]] = set()  # lives that must not be written again
        self.num_tokens = 0

    # --- the memory -------------------------------------------------------------------------

    def publish(self, block_id: int, generation: int) -> None:
        """A new life: strictly younger than any before; its memory is spoilt if it was free."""
        assert generation > self.published[block_id]
        assert block_id not in self.lost
        self.published[block_id] = generation
        if self.pool.blocks[block_id].state is BlockState.FREE:
            assert block_id not in self.owned()
            self.memory[block_id] = [-generation] * self.size

    def write(self, block_id: int, offset: int, value: int) -> None:
        assert (block_id, self.published[block_id]) not in self.closed, "written after sealing"
        self.memory[block_id][offset] = value

    def fresh(self, count: int) -> list[int]:
        self.num_tokens += count
        return list(range(self.num_tokens - count, self.num_tokens))

    def chain(self) -> HashChain:
        return HashChain(ROOT, self.size)

    def close(self, block_id: int) -> None:
        self.closed.add((block_id, self.published[block_id]))

    # --- requests ---------------------------------------------------------------------------

    def hold(self, table: BlockTable, tokens: list[int], chain: HashChain) -> Request:
        self.num_requests += 1
        request = Request(f"r{self.num_requests}", table, tokens, chain)
        self.held.append(request)
        return request

    def complete(self) -> list[Request]:
        return [request for request in self.held if request.complete]

    def append(self, request: Request, count: int) -> bool:
        """Write ``count`` more positions; False, and nothing done, if the pool is too full."""
        table, start = request.table, len(request.tokens)
        before = list(table.block_ids), self.free_blocks()
        copies = self.kv.allocate(table, start, start + count)
        if copies is None:
            wanted = max(0, -(-(start + count) // self.size) - len(before[0]))
            tail_shared = start % self.size and self.users(before[0][start // self.size]) > 1
            assert wanted + bool(tail_shared and count) > before[1], "refused, yet it would fit"
            assert (table.block_ids, self.free_blocks()) == before
            return False
        wanted = -(-(start + count) // self.size)
        assert len(table.block_ids) == max(wanted, len(before[0]))
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        self.kv.copies_made(table)
        for position, token in enumerate(self.fresh(count), start):
            block, offset = divmod(position, self.size)
            assert self.users(table.block_ids[block]) == 1, "written where somebody else reads"
            self.write(table.block_ids[block], offset, token)
            request.tokens.append(token)
        return True

    @precondition(lambda self: len(self.held) < MOST_REQUESTS)
    @rule(count=st.integers(1, 7))
    def begin(self, count: int) -> None:
        self.append(self.hold(BlockTable(self.size), [], self.chain()), count)

    @precondition(lambda self: self.complete())
    @rule(number=picks, count=st.integers(1, 3))
    def grow(self, number: int, count: int) -> None:
        self.append(pick(self.complete(), number), count)

    @precondition(lambda self: self.complete())
    @rule(number=picks, partial=st.booleans())
    def seal(self, number: int, partial: bool) -> None:
        self.seal_computed(pick(self.complete(), number), partial)

    def seal_computed(self, request: Request, partial: bool) -> None:
        table, before = request.table, request.table.num_sealed
        sealed = self.kv.seal(table, request.tokens, len(request.tokens), request.chain, partial)
        for index, block in enumerate(sealed, before):
            start = index * self.size
            filled = request.tokens[start : start + self.size]
            assert (block.start, block.block_id) == (start, table.block_ids[index])
            assert block.num_tokens == len(filled)
            assert partial or len(filled) == self.size
            wanted = self.chain().at(index, request.tokens)
            assert self.pool.blocks[block.block_id].block_hash == wanted
            self.close(block.block_id)
        whole = len(request.tokens) + (self.size - 1 if partial else 0)
        assert table.num_sealed >= whole // self.size

    @precondition(lambda self: self.complete() and len(self.held) < MOST_REQUESTS)
    @rule(number=picks, at_most=st.integers(1, 4))
    def fork(self, number: int, at_most: int) -> None:
        """A new sequence that shares the first blocks of another, the partial one perhaps."""
        request = pick(self.complete(), number)
        self.seal_computed(request, partial=True)
        num_blocks = min(at_most, request.table.num_sealed)
        shared = request.table.block_ids[:num_blocks]
        for block_id in shared:
            self.pool.share(block_id)
        table = BlockTable(self.size, list(shared), num_sealed=num_blocks)
        self.hold(table, request.tokens[: num_blocks * self.size], self.chain())

    @precondition(lambda self: self.held)
    @rule(number=picks)
    def free(self, number: int) -> None:
        """Freeing is legal in any state, also while blocks are being read, and twice."""
        request = pick(self.held, number)
        promised = self.kv.has_freeable_block(request.table)
        before = self.free_blocks()
        self.held = [other for other in self.held if other is not request]
        self.kv.free(request.table)
        assert (self.pool.num_free > before) == promised
        self.kv.free(request.table)

    # --- leases -----------------------------------------------------------------------------

    @precondition(lambda self: any(request.table.num_sealed for request in self.held))
    @rule(number=picks, index=picks)
    def pin(self, number: int, index: int) -> None:
        table = pick([r.table for r in self.held if r.table.num_sealed], number)
        block_id = pick(table.block_ids[: table.num_sealed], index)
        self.pool.pin(block_id)
        lease = Lease(block_id, self.published[block_id], list(self.memory[block_id]))
        self.pins.append(lease)

    @precondition(lambda self: self.pins)
    @rule(number=picks)
    def unpin(self, number: int) -> None:
        self.pool.unpin(self.pins.pop(number % len(self.pins)).block_id)

    # --- reads ------------------------------------------------------------------------------

    @precondition(lambda self: len(self.held) < MOST_REQUESTS)
    @rule(count=st.integers(1, 5))
    def reserve_and_read(self, count: int) -> None:
        """All blocks of a prompt are reserved, and each is the target of a read."""
        num_blocks = -(-count // self.size)
        if num_blocks > self.free_blocks():
            return
        table = BlockTable(self.size, self.pool.allocate(num_blocks))
        request = self.hold(table, self.fresh(count), self.chain())
        request.reading = set(range(num_blocks))
        for index, block_id in enumerate(table.block_ids):
            self.pool.begin_transfer(block_id)
            self.running.append(Read(request, index, block_id))

    @precondition(lambda self: self.running)
    @rule(number=picks, outcome=st.sampled_from(["ok", "ok", "ok", "failed", "lost"]))
    def end_read(self, number: int, outcome: str) -> None:
        """The read arrives, fails, or cannot be fenced; its request may be gone by then."""
        read = self.running.pop(number % len(self.running))
        request, start = read.request, read.index * self.size
        filled = request.tokens[start : start + self.size]
        for offset, token in enumerate(filled):
            self.write(read.block_id, offset, token)
        if outcome == "lost":
            self.pool.quarantine(read.block_id)
            self.lost.add(read.block_id)
        self.pool.end_transfer(read.block_id)
        request.reading.discard(read.index)
        request.failed = request.failed or outcome != "ok"
        if request not in self.held:
            return
        if outcome == "ok":
            self.pool.seal(read.block_id, len(filled), request.chain.at(read.index, request.tokens))
            self.close(read.block_id)
        if request.complete:
            request.table.num_sealed = len(request.table.block_ids)

    # --- what must hold ---------------------------------------------------------------------

    def owned(self) -> set[int]:
        """Blocks with any owner, by the machine's own books."""
        tables = {b for request in self.held for b in request.table.block_ids}
        return tables | {pin.block_id for pin in self.pins} | {r.block_id for r in self.running}

    def free_blocks(self) -> int:
        return len(self.memory) - len(self.owned() | self.lost)

    def users(self, block_id: int) -> int:
        """How many owners a block has."""
        tables = Counter(b for request in self.held for b in request.table.block_ids)
        pins = sum(pin.block_id == block_id for pin in self.pins)
        return tables[block_id] + pins + sum(read.block_id == block_id for read in self.running)

    @invariant()
    def every_sequence_reads_back_what_was_written(self) -> None:
        for request in self.held:
            if not request.complete:
                continue
            for position, token in enumerate(request.tokens):
                block_id, offset = divmod(request.table.slot(position), self.size)
                assert self.memory[block_id][offset] == token, (request.name, position)

    @invariant()
    def what_is_pinned_stays_as_it_was(self) -> None:
        for pin in self.pins:
            assert self.pool.blocks[pin.block_id].generation == pin.generation
            assert self.memory[pin.block_id] == pin.content

    @invariant()
    def the_audit_agrees_with_the_machines_books(self) -> None:
        tables = {b for request in self.held for b in request.table.block_ids}
        reads = {read.block_id for read in self.running}
        pins = {pin.block_id for pin in self.pins}
        owners = [
            *(Owner(OwnerKind.REQUEST, b, r.name) for r in self.held for b in r.table.block_ids),
            *(Owner(OwnerKind.READER, pin.block_id, "lease") for pin in self.pins),
            *(Owner(OwnerKind.WRITER, read.block_id, "read") for read in self.running),
        ]
        found = audit(self.pool, owners)
        assert found.consistent, found.problems
        assert found.counts == {
            BlockClass.REFERENCED: len(tables - self.lost),
            BlockClass.IN_TRANSFER: len(reads - tables - self.lost),
            BlockClass.PINNED: len(pins - reads - tables - self.lost),
            BlockClass.CACHED: 0,
            BlockClass.FREE: self.free_blocks(),
            BlockClass.QUARANTINED: len(self.lost),
        }
        assert sum(found.counts.values()) == len(self.memory)
        assert self.pool.num_free == self.free_blocks()

    @invariant()
    def every_life_was_published(self) -> None:
        for block in self.pool.blocks:
            assert block.generation == self.published[block.block_id]

    def teardown(self) -> None:
        """Whatever order it comes in, when everybody has left the pool is whole."""
        if not hasattr(self, "pool"):
            return
        for lease in self.pins:
            self.pool.unpin(lease.block_id)
        for request in self.held:
            self.kv.free(request.table)
        for read in self.running:
            self.pool.end_transfer(read.block_id)
        assert self.pool.num_free == len(self.memory) - len(self.lost)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
