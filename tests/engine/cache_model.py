"""What the cache must hold, as dictionaries: the model beside which the machine runs the product.

Of the product it reads what a runner and a peer are shown (tables, copies, slots); who owns what,
what is where, what can be found and what is taken next it works out by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.engine.sequence import SequenceKey, SequenceState
from kvferry.kv_cache.audit import Owner, OwnerKind
from kvferry.kv_cache.block_table import BlockTable
from kvferry.kv_transfer.leases import LeaseKey
from tests.engine.cache_cells import Cells

Name = bytes | tuple[int, int]
"""Of a content outside the pool: a whole block's chain value, or a record and a place in it."""


@dataclass(eq=False)
class Group:
    """Beams of one request.

    Attributes:
        eager: they are chosen as soon as all have computed, within the step.
    """

    number: int
    eager: bool
    num_beams: int = 1


@dataclass(eq=False)
class Record:
    """What one sequence must be.

    Attributes:
        number: its seed, by which a runner's share is known.
        cells: of every token.
        held: position to the cell that was written there for it.
        sequence: the product's; None while its blocks are still being read from a peer.
        fresh: nothing was computed since it came, or since it was preempted.
        reading: indexes of blocks that a read still writes.
        uncopied: block of its table to the block whose content it is yet to get.
        told: positions that its owner was told of.
        group, beam: if it is a beam, of which request, and which of its beams.
        parked: a beam whose tokens are computed, and whose next one nobody has chosen.
        num_swapped: positions that were off-loaded when it was preempted, until it computes again.
        holding: contents outside the pool that are kept for it.
        lost_some: of what was kept for it something could not be had.
    """

    number: int
    salt: str
    tokens: list[int]
    cells: list[int]
    num_prompt: int
    max_tokens: int
    table: BlockTable
    prefill_only: bool = False
    reuses: bool = True
    held: dict[int, int] = field(default_factory=dict)
    sequence: SequenceState | None = None
    fresh: bool = True
    num_preemptions: int = 0
    reading: set[int] = field(default_factory=set)
    uncopied: dict[int, int] = field(default_factory=dict)
    told: int = 0
    lease: LeaseKey | None = None
    group: Group | None = None
    beam: int = 0
    parked: bool = False
    num_swapped: int = 0
    holding: set[Name] = field(default_factory=set)
    lost_some: bool = False

    @property
    def key(self) -> SequenceKey | None:
        """By what the product knows it."""
        return self.sequence.key if self.sequence is not None else None

    def let_go(self) -> None:
        """Nothing outside the pool is kept for it."""
        self.num_swapped, self.lost_some = 0, False
        self.holding.clear()


@dataclass(frozen=True)
class Read:
    """A running read into one block, for ``record``'s block at ``index``."""

    record: Record
    index: int
    block_id: int


@dataclass(frozen=True)
class Pin:
    """A block held by a lease: the life it was pinned in, and what it held then."""

    key: LeaseKey
    position: int
    block_id: int
    generation: int
    content: tuple[int, ...]


class CacheModel:
    """See the module.

    Attributes:
        findable_before: ``findable`` when the turn began.
        memory: block to what its slots hold; a cell, or minus a generation where nothing was
            written since the block's life began.
        closed: sealed blocks and the life in which they may not be written.
        findable: chain value to (block, filled slots, cell).
        fresh_lives: blocks that began a life in this turn.
        cached_since: turn in which a block that nobody holds was last used.
        alone_in: the one sequence, and the place in it, that last held a block.
        every: all records that the product ever knew, by its key.
        lazy: a new life's old content stays until something is computed: it may yet be copied.
        seen: what has happened how often.
    """

    def __init__(self, num_blocks: int, block_size: int, cells: Cells) -> None:
        self.size = block_size
        self.words = cells
        self.memory = {b: [0] * block_size for b in range(num_blocks)}
        self.published = dict.fromkeys(range(num_blocks), 0)
        self.closed: dict[int, int] = {}
        self.findable: dict[bytes, tuple[int, int, int]] = {}
        self.findable_before = self.findable
        self.records: dict[int, Record] = {}
        self.every: dict[Hashable, Record] = {}
        self.lazy = False
        self.spoilt: set[int] = set()
        self.pins: list[Pin] = []
        self.reads: list[Read] = []
        self.lost: set[int] = set()
        self.fresh_lives: set[int] = set()
        self.cached_since: dict[int, int] = {}
        self.alone_in: dict[int, tuple[int, int]] = {}
        self.touched: set[int] = set()
        self.turn = 0
        self.seen: Counter[str] = Counter()

    # --- who owns what ----------------------------------------------------------------------

    def holders(self, block_id: int) -> list[Record]:
        """The records whose table lists the block, once per listing."""
        return [r for r in self.records.values() for b in r.table.block_ids if b == block_id]

    def owners(self) -> list[Owner]:
        """Every owner of every block, the index by what the model finds."""
        held = [(r, b) for r in self.records.values() for b in self.held_by(r)]
        return [
            *(Owner(OwnerKind.REQUEST, b, f"r{r.number}") for r, b in held),
            *(Owner(OwnerKind.READER, p.block_id, p.key.request_id) for p in self.pins),
            *(Owner(OwnerKind.WRITER, r.block_id, f"r{r.record.number}") for r in self.reads),
            *(Owner(OwnerKind.INDEX, b, "") for b in self.found_blocks()),
        ]

    def held_by(self, record: Record) -> list[int]:
        """The blocks that a record refers to, sources of copies still to be made included."""
        return [*record.table.block_ids, *record.table.copied_from]

    def owned(self) -> set[int]:
        """Blocks with an owner other than the index."""
        tables = {b for record in self.records.values() for b in self.held_by(record)}
        return tables | {p.block_id for p in self.pins} | {r.block_id for r in self.reads}

    def found_blocks(self) -> set[int]:
        """Blocks that a chain value leads to."""
        return {block_id for block_id, _, _ in self.findable.values()}

    # --- memory -----------------------------------------------------------------------------

    def publish(self, block_id: int, generation: int) -> None:
        """A block begins a new life: either nobody's, or kept by the one that appends to it."""
        assert generation > self.published[block_id], f"block {block_id} begins no new life"
        assert block_id not in self.lost, "a quarantined block is used"
        assert all(p.block_id != block_id for p in self.pins), "a pinned block is taken"
        assert all(r.block_id != block_id for r in self.reads), "a read's target is taken"
        self.published[block_id] = generation
        holders = self.holders(block_id)
        if holders:
            assert len(holders) == 1, "a block that others read is reopened"
            assert block_id not in self.found_blocks(), "a block that others find is reopened"
            self.seen["reopened"] += 1
            return
        if block_id in self.found_blocks():
            self._check_eviction(block_id)
            self.seen["evicted"] += 1
        self.forget(block_id)
        self.fresh_lives.add(block_id)
        self.cached_since.pop(block_id, None)
        self.spoilt.add(block_id)
        if not self.lazy:
            self.spoil()

    def spoil(self) -> None:
        """What was in blocks that began a new life is gone."""
        for block_id in self.spoilt:
            self.memory[block_id] = [-self.published[block_id]] * self.size
        self.spoilt.clear()

    def _check_eviction(self, block_id: int) -> None:
        """Free blocks go before cached ones, those unused for longest first, tails before heads."""
        gone = self.owned() | self.lost | self.fresh_lives | {block_id}
        others = set(self.memory) - gone
        found = self.found_blocks()
        assert others <= found, "a cached block is taken before a free one"
        since = self._idle_since(block_id)
        record, place = self.alone_in.get(block_id, (-1, 0))
        for other in others:
            assert self._idle_since(other) >= since, "the least used goes first"
            if self._idle_since(other) == since:
                its_record, its_place = self.alone_in.get(other, (-2, 0))
                assert its_record != record or its_place < place, "the tail goes first"

    def _idle_since(self, block_id: int) -> int:
        used = block_id in self.touched
        return self.turn if used else self.cached_since.get(block_id, self.turn)

    def write(self, block_id: int, offset: int, cell: int) -> None:
        """A runner or a read writes one slot."""
        assert self.closed.get(block_id) != self.published[block_id], "a sealed block is written"
        assert len(self.holders(block_id)) <= 1, "written where somebody else reads"
        self.memory[block_id][offset] = cell

    def fill(self, block_id: int, content: Sequence[int]) -> None:
        """A content from outside the pool is copied into a block."""
        assert self.closed.get(block_id) != self.published[block_id], "a sealed block is filled"
        self.spoilt.discard(block_id)
        self.memory[block_id] = list(content)
        self.touched.add(block_id)

    def copy(self, source: int, target: int, num_holders: int = 1) -> None:
        """A runner copies one block; a beam's copy is made before its table is a record's."""
        assert self.closed.get(target) != self.published[target], "a sealed block is copied over"
        assert len(self.holders(target)) == num_holders, "a copy's target is not one sequence's"
        self.memory[target] = list(self.memory[source])
        self.touched |= {source, target}
        self.seen["copied"] += 1

    def seal(self, block_id: int, cells: Sequence[int], start: int, end: int) -> None:
        """A block is filled with positions ``start .. end - 1`` of a sequence."""
        self.closed[block_id] = self.published[block_id]
        unit = self.words.unit
        for at in [*range(start + unit, end, unit), end]:
            value = self.words.value(cells[at - 1])
            self.findable.setdefault(value, (block_id, at - start, cells[at - 1]))

    def forget(self, block_id: int) -> None:
        """Nothing leads to the block any longer."""
        self.findable = {v: f for v, f in self.findable.items() if f[0] != block_id}

    def longest_prefix(self, cells: Sequence[int], findable: Mapping[bytes, object]) -> int:
        """Leading positions of a chain that are found one unit after the other."""
        found = 0
        while found < len(cells):
            end = min(found + self.words.unit, len(cells))
            if self.words.value(cells[end - 1]) not in findable:
                break
            found = end
        return found

    def name_of(self, record: Record, index: int) -> Name:
        """Under what a record's whole block is known outside the pool."""
        return self.words.value(record.cells[(index + 1) * self.size - 1])

    # --- turns ------------------------------------------------------------------------------

    def notice_preemptions(self) -> None:
        """Whoever was preempted holds nothing here, and elsewhere what it had computed, if that."""
        for record in self.records.values():
            sequence = record.sequence
            if sequence is None or sequence.num_preemptions == record.num_preemptions:
                continue
            record.num_preemptions = sequence.num_preemptions
            self.seen["preempted"] += 1
            self.seen["parked beams preempted"] += record.parked
            if sequence.num_swapped_tokens:
                self._swap(record, sequence.num_swapped_tokens)
            else:
                record.let_go()
            record.held.clear()
            record.uncopied.clear()
            record.fresh, record.told = True, 0

    def _swap(self, record: Record, num_tokens: int) -> None:
        assert num_tokens == len(record.held), "off-loaded is not what was computed"
        record.num_swapped, record.lost_some = num_tokens, False
        whole, rest = divmod(num_tokens, self.size)
        record.holding.update(self.name_of(record, index) for index in range(whole))
        if rest:
            record.holding.add((record.number, whole))
        self.seen["off-loaded"] += 1

    def begin_turn(self) -> None:
        """Something is about to happen."""
        self.turn += 1
        self.findable_before = dict(self.findable)
        self.fresh_lives.clear()
        self.touched.clear()

    def note_owners(self) -> None:
        """Which blocks are one sequence's alone: these leave together, the tail first."""
        count = Counter(owner.block_id for owner in self.owners() if owner.kind != OwnerKind.INDEX)
        for block_id in count:
            self.alone_in.pop(block_id, None)
        for record in self.records.values():
            for place, block_id in enumerate(record.table.block_ids):
                if count[block_id] == 1:
                    self.alone_in[block_id] = record.number, place

    def end_turn(self) -> None:
        """Note who is cached since when."""
        owned = self.owned()
        for block_id in list(self.cached_since):
            if block_id in owned or block_id in self.touched:
                del self.cached_since[block_id]
        for block_id in self.found_blocks() - owned:
            self.cached_since.setdefault(block_id, self.turn)
        self.note_owners()
