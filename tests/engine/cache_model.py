"""What the cache must hold, as dictionaries: the model beside which the machine runs the product.

Of the product it reads what a runner and a peer are shown (tables, copies, slots); who owns what,
what is where, what can be found and what is taken next it works out by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.engine.sequence import SequenceState
from kvferry.kv_cache.audit import Owner, OwnerKind
from kvferry.kv_cache.block_table import BlockTable
from kvferry.kv_transfer.leases import LeaseKey
from tests.engine.cache_cells import Cells


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
        self.memory[block_id] = [-generation] * self.size

    def _check_eviction(self, block_id: int) -> None:
        """Free blocks go before cached ones, those unused for longest first, tails before heads."""
        gone = self.owned() | self.lost | self.fresh_lives | {block_id}
        others = set(self.memory) - gone
        found = self.found_blocks()
        assert others <= found, "a cached block is taken before a free one"
        since = self.cached_since.get(block_id, self.turn)
        record, place = self.alone_in.get(block_id, (-1, 0))
        for other in others:
            assert self.cached_since.get(other, self.turn) >= since, "the least used goes first"
            if self.cached_since.get(other, self.turn) == since:
                its_record, its_place = self.alone_in.get(other, (-2, 0))
                assert its_record != record or its_place < place, "the tail goes first"

    def write(self, block_id: int, offset: int, cell: int) -> None:
        """A runner or a read writes one slot."""
        assert self.closed.get(block_id) != self.published[block_id], "a sealed block is written"
        assert len(self.holders(block_id)) <= 1, "written where somebody else reads"
        self.memory[block_id][offset] = cell

    def copy(self, source: int, target: int) -> None:
        """A runner copies one block."""
        assert self.closed.get(target) != self.published[target], "a sealed block is copied over"
        assert len(self.holders(target)) == 1, "a copy's target is not one sequence's"
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

    # --- turns ------------------------------------------------------------------------------

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
