"""The house that the cache machine works in: the product's parts beside the model of them.

No rule stands here, only what rules are made of: a turn that is checked, a request that is handed
to the engine, an end, and what must hold after each turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from kvferry.engine.engine import Engine
from kvferry.engine.offload import Offloading
from kvferry.engine.request import Attempt, RequestId, RequestSpec, SamplingParams
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.engine.sequence import SequenceProgress, SequenceStatus
from kvferry.kv_cache.audit import BlockClass, audit
from kvferry.kv_cache.block_pool import BlockPool, BlockState
from kvferry.kv_cache.block_table import BlockTable
from kvferry.kv_cache.hashing import HashChain
from kvferry.kv_cache.host_tier import HostTier
from kvferry.kv_cache.prefix_index import PrefixIndex
from kvferry.kv_transfer.leases import LeaseKey, LeaseTable
from tests.engine.cache_cells import VOCABULARY, Cells
from tests.engine.cache_host import HostModel
from tests.engine.cache_leases import LeaseBook
from tests.engine.cache_model import CacheModel, Pin, Record
from tests.engine.cache_runner import MachineOwner, MemoryRunner
from tests.engine.dict_mover import WaveringCosts

Item = TypeVar("Item")
MODEL = "cells@1"
STALL_LIMIT_S = 5.0
MOST_RECORDS = 7  # beams not counted
MOST_STEPS_TO_THE_END = 400
picks = st.integers(0, 63)  # which of a list, modulo its length
tails = st.lists(st.integers(0, VOCABULARY - 1), max_size=9)
sures = st.sampled_from([False, False, False, True])  # what ends much happens less often
salts = st.sampled_from(["", "", "", "", "tenant"])


class Enough(KeyboardInterrupt):
    """As many steps as were asked for; hypothesis lets it through."""


def pick(items: list[Item], number: int) -> Item:
    return items[number % len(items)]


def has_room(machine: CacheHouse) -> bool:
    return sum(record.group is None for record in machine.records) < MOST_RECORDS


class CacheHouse(RuleBasedStateMachine):
    """See the module.

    Attributes:
        num_steps: turns that rules took, of all machines of this process.
        failed_at: the first of them in which something did not hold.
        most_steps: steps after which ``Enough`` is raised.
        seen: what has happened how often, of all machines.
    """

    most_steps: ClassVar[int | None] = None
    num_steps: ClassVar[int] = 0
    failed_at: ClassVar[int | None] = None
    seen: ClassVar[Counter[str]] = Counter()
    holds: bool | None = None

    @initialize(
        sizes=st.sampled_from([(2, 1), (1, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 4)]),
        num_blocks=st.sampled_from([8, 4, 5, 6, 7, 10, 14]),
        seats=st.sampled_from([4, 1, 2, 3, 5]),
        budget=st.sampled_from([16, 1, 2, 5, 8, 12]),
        chunk=st.sampled_from([16, 1, 3, 8]),
        watermark=st.sampled_from([0.0, 0.0, 0.2]),
        may_lose=st.booleans(),
        host=st.sampled_from([None, (1, 16), (12, 0), None, (2, 8), (3, 0), (1, 1), (1, 8)]),
        caching=st.booleans(),
        decisions=st.lists(st.booleans(), max_size=2),
    )
    def start(
        self,
        sizes: tuple[int, int],
        num_blocks: int,
        seats: int,
        budget: int,
        chunk: int,
        watermark: float,
        may_lose: bool,
        host: tuple[int, int] | None,
        caching: bool,
        decisions: list[bool],
    ) -> None:
        self.size, unit = sizes
        self.model = CacheModel(num_blocks, self.size, Cells(MODEL, unit))
        self.model.seen = self.seen
        self.pool = BlockPool(num_blocks, self.model.publish, PrefixIndex())
        config = SchedulerConfig(seats, budget, chunk, watermark)
        self.runner = MemoryRunner(self.model, config)
        self.owner = MachineOwner(self.model, self.lease_sealed, self.over, self.on_parked)
        self.now = 0.0
        self.host: HostModel | None = None
        offloading = self.outside(host, caching, decisions) if host is not None else None
        self.engine = Engine(
            config, self.runner, self.pool, self.size, MODEL, lambda: self.now, unit, offloading
        )
        self.kv = self.engine.kv
        self.leases, self.book = LeaseTable(STALL_LIMIT_S), LeaseBook(STALL_LIMIT_S)
        self.may_lose = may_lose
        self.most_tokens = (num_blocks - 1 - may_lose) * self.size
        self.num_records = 0
        self.history: list[list[int]] = [[]]
        self.ending: list[Record] = []
        self.holds = True

    def outside(self, places: tuple[int, int], caching: bool, decisions: list[bool]) -> Offloading:
        """A host tier of so many slots and files."""
        tier, self.host_caches = HostTier(*places, caching), caching
        self.host = self.runner.host = HostModel(self.model, tier)
        self.model.lazy = True
        costs = WaveringCosts([*decisions, True])
        return Offloading(tier, self.host, self.size, lambda: self.now, costs)

    @property
    def records(self) -> list[Record]:
        return list(self.model.records.values())

    @property
    def scheduled(self) -> list[Record]:
        return [record for record in self.records if record.sequence is not None]

    # --- turns ------------------------------------------------------------------------------

    def turn(self, action: Callable[[], object]) -> None:
        """One step of the machine: counted, and checked. Raises Enough."""
        if CacheHouse.num_steps == CacheHouse.most_steps:
            raise Enough
        CacheHouse.num_steps += 1
        self.uncounted(action)

    def uncounted(self, action: Callable[[], object]) -> None:
        self.holds = False
        self.model.begin_turn()
        if self.host is not None:
            self.host.begin_turn()
        action()
        self.model.spoil()
        self.model.notice_preemptions()
        if self.host is not None:
            self.host.end_stopped()
            self.host.check()
        self.check()
        self.model.end_turn()
        self.holds = True

    def step_engine(self) -> None:
        self.now += 0.25
        self.engine.step()
        if self.runner.fault is not None:
            raise self.runner.fault
        for record in self.ending:
            self.bury(record)
        self.ending.clear()

    # --- requests ---------------------------------------------------------------------------

    def new_record(self, start: list[int], tail: list[int], max_tokens: int, salt: str) -> Record:
        """A request that goes on from ``start``, cut to what fits the pool."""
        max_tokens = min(max_tokens, self.most_tokens - 1)
        tokens = ([*start, *tail] or [0])[: self.most_tokens - max_tokens]
        self.num_records += 1
        cells = self.model.words.extend(salt, tokens)
        table = BlockTable(self.size)
        return Record(self.num_records, salt, tokens, cells, len(tokens), max_tokens, table)

    def spec(self, record: Record) -> RequestSpec:
        sampling = SamplingParams(
            max_tokens=record.max_tokens,
            seed=record.number,
            prompt_logprobs=None if record.reuses else 0,
            num_beams=2 if record.group is not None else 1,
        )
        name = f"r{record.number}" if record.group is None else f"beams{record.group.number}"
        return RequestSpec(
            RequestId(name),
            tuple(record.tokens[: record.num_prompt]),
            sampling=sampling,
            cache_salt=record.salt,
        )

    def submit(
        self,
        record: Record,
        copies: list[tuple[int, int]] | None = None,
        hashes: HashChain | None = None,
    ) -> None:
        """Hand a record to the engine, with the positions that it holds."""
        record.uncopied = {target: source for source, target in copies or []}
        record.told = len(record.held) // self.size * self.size
        record.fresh = not record.table.block_ids
        self.model.records[record.number] = record
        record.sequence = self.engine.new_sequence(
            self.spec(record),
            Attempt(1, 1),
            self.owner,
            table=record.table,
            hashes=hashes,
            output_token_ids=tuple(record.tokens[record.num_prompt :]),
            num_computed_tokens=len(record.held),
            copies=copies or [],
            prefill_only=record.prefill_only,
            beam=record.beam if record.group is not None else None,
        )
        self.model.every[record.sequence.key] = record

    def over(self, record: Record) -> None:
        """The engine frees it when this returns."""
        record.let_go()
        self.ending.append(record)

    def on_parked(self, record: Record) -> None:
        """A beam has computed, and waits for what its owner chooses."""

    def bury(self, record: Record) -> None:
        """Whoever has ended holds nothing."""
        assert not record.table.block_ids and not record.table.copied_from
        self.model.records.pop(record.number, None)
        self.history = [*self.history[-7:], list(record.tokens)]

    def drop(self, record: Record) -> None:
        """End a record in any state, twice, and with it the lease that it is still computed for."""
        record.let_go()
        for _ in range(2):
            if record.sequence is None:
                self.kv.free(record.table)
            else:
                self.engine.remove(record.sequence)
        self.bury(record)
        if record.lease in self.book.open:
            assert record.lease is not None
            self.end_lease(record.lease)

    # --- leases -----------------------------------------------------------------------------

    def lease_sealed(self, record: Record, progress: SequenceProgress) -> None:
        """Pin what a prefill's step has sealed, where its reader has not heard of it yet."""
        key = record.lease
        if key is None or key not in self.book.open:
            return
        lease = self.book.open[key]
        for block in progress.sealed:
            if block.start < lease.announced:
                continue
            lease.announced = block.start + block.num_tokens
            assert self.leases.add(key, block.start, block.block_id, self.now)
            self.pool.pin(block.block_id)
            self.book.add(key, block.start, block.block_id, self.now)
            life, content = self.model.published[block.block_id], self.model.memory[block.block_id]
            pin = Pin(key, block.start, block.block_id, life, tuple(content[: block.num_tokens]))
            self.model.pins.append(pin)
            self.model.alone_in.pop(block.block_id, None)
            self.seen["pinned"] += 1

    def unpin(self, key: LeaseKey, released: list[int], expected: list[int]) -> None:
        """The table has let go of blocks of a lease."""
        assert released == expected, "a lease gives up other blocks than it holds"
        for block_id in released:
            self.pool.unpin(block_id)
        held = self.book.open[key].blocks if key in self.book.open else {}
        self.model.pins = [p for p in self.model.pins if p.key != key or p.position in held]

    def end_lease(self, key: LeaseKey) -> None:
        released, expected = self.leases.end(key), self.book.end(key)
        self.unpin(key, released, expected)

    # --- what must hold ---------------------------------------------------------------------

    def check(self) -> None:
        for record in self.records:
            self.reads_back(record)
        for pin in self.model.pins:
            assert self.model.published[pin.block_id] == pin.generation
            content = self.model.memory[pin.block_id][: len(pin.content)]
            assert tuple(content) == pin.content, "a pinned block reads otherwise"
        self.index_is_right()
        self.pool_is_right()
        held = [
            (key, p, b) for key, x in self.book.open.items() for p, b in sorted(x.blocks.items())
        ]
        assert list(self.leases) == held and len(self.leases) == len(self.book.open)

    def reads_back(self, record: Record) -> None:
        """All positions that are computed, through the table."""
        if record.sequence is not None:
            assert record.sequence.token_ids == record.tokens
            assert record.sequence.num_computed_tokens == len(record.held)
            assert record.sequence.parked == record.parked
            assert record.sequence.num_swapped_tokens == record.num_swapped
            swapped = record.sequence.status is SequenceStatus.SWAPPED
            assert not swapped or (record.num_swapped and not record.table.block_ids)
        assert not record.sequence or record.sequence.table is record.table
        for position, cell in record.held.items():
            (slot,) = record.table.slot_mapping(position, 1)
            block_id, offset = divmod(slot, self.size)
            block_id = record.uncopied.get(block_id, block_id)
            found = self.model.memory[block_id][offset]
            assert found == cell, f"r{record.number} reads another's token at {position}"

    def index_is_right(self) -> None:
        """What is found is what the model finds, and holds what its chain value says."""
        index, found = self.pool.index, self.model.findable
        assert index is not None
        entries = {value: index.find(value) for value in index.values()}
        assert entries == {value: entry[:2] for value, entry in found.items()}
        for block_id, num_tokens, cell in found.values():
            content = self.model.memory[block_id][:num_tokens]
            assert content == self.model.words.ending_in(cell, num_tokens), "found, yet another's"
            assert self.pool.blocks[block_id].state is BlockState.SEALED

    def pool_is_right(self) -> None:
        found = audit(self.pool, self.model.owners())
        assert found.consistent, found.problems
        owned, lost = self.model.owned(), self.model.lost
        free = set(self.model.memory) - owned - lost
        cached = free & self.model.found_blocks()
        counts = found.counts
        assert sum(counts.values()) == self.pool.num_blocks == len(self.model.memory)
        assert (counts[BlockClass.CACHED], counts[BlockClass.FREE]) == (
            len(cached),
            len(free - cached),
        )
        assert (self.pool.num_cached, self.pool.num_free) == (len(cached), len(free))
        for block in self.pool.blocks:
            assert block.generation == self.model.published[block.block_id]

    def teardown(self) -> None:
        """Whatever has happened, everybody comes to an end, and the pool is whole."""
        try:
            if self.holds:
                self.to_the_end()
        finally:
            if self.holds is False and CacheHouse.failed_at is None:
                CacheHouse.failed_at = CacheHouse.num_steps

    def to_the_end(self) -> None:
        self.uncounted(self.leave)
        for _ in range(MOST_STEPS_TO_THE_END):
            if not self.engine.has_work:
                break
            self.uncounted(self.step_engine)
            self.uncounted(self.go_on_all)
            for key in list(self.book.open):
                self.end_lease(key)
        self.holds = False
        assert not self.engine.has_work and not self.records, "somebody waits for ever"
        whole = len(self.model.memory) - len(self.model.lost)
        assert self.pool.num_free == whole and not self.model.owned()
        if self.host is not None:
            assert not self.host.kept or self.host_caches
        self.holds = True

    def go_on_all(self) -> None:
        """Nothing waits for whoever chooses."""

    def leave(self) -> None:
        """No read arrives any longer, no lease goes on."""
        for record in self.records:
            if record.sequence is None:
                self.drop(record)
        for read in self.model.reads:
            self.pool.end_transfer(read.block_id)
        self.model.reads.clear()
        for key in list(self.book.open):
            self.end_lease(key)
