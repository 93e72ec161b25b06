"""An engine over the stub model, stepped by hand, that checks every step it takes.

``Bench`` spoils a block's memory whenever the block begins a new life, so that whatever is read
from it without having been written shows as a wrong token. It keeps books of its own: which
positions each sequence computed how often, and what was copied to the host tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.engine.batch import PoisonedRows, RunnerOutput, SchedulerOutput
from kvferry.engine.costs import Costs
from kvferry.engine.counters import EngineCounters
from kvferry.engine.engine import Engine
from kvferry.engine.offload import Offloading
from kvferry.engine.request import Attempt, RequestSpec
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.engine.sequence import SequenceProgress, SequenceState, SequenceStatus
from kvferry.kv_cache.audit import (
    BlockClass,
    Owner,
    OwnerKind,
    PoolAudit,
    audit,
    audit_host,
    index_owners,
)
from kvferry.kv_cache.block_pool import BlockPool, BlockState
from kvferry.kv_cache.block_table import BlockTable
from kvferry.kv_cache.hashing import HashChain, root_hash
from kvferry.kv_cache.host_tier import HostTier
from kvferry.kv_cache.prefix_index import PrefixIndex
from tests.engine.dict_mover import DictMover, FixedCosts
from tests.fakes import (
    ATTEMPT,
    FakeClock,
    RecordingOwner,
    StubRunner,
    stub_layout,
    stub_output,
    stub_spec,
    stub_value,
)

MODEL = "stub@1"


def config(seqs: int = 8, tokens: int = 64, chunk: int = 64, mark: float = 0.0) -> SchedulerConfig:
    """A scheduler's budgets, wide where nothing is said."""
    return SchedulerConfig(seqs, tokens, chunk, mark)


@dataclass
class CheckingRunner:
    """Runs the stub and keeps every step, which ``check`` holds against the budgets.

    ``poison`` names the rows of a step, computed all the same, for which no token is to be had.
    """

    stub: StubRunner
    config: SchedulerConfig
    before: Callable[[], None] = lambda: None
    steps: list[SchedulerOutput] = field(default_factory=list)
    poison: Callable[[SchedulerOutput], Sequence[int]] | None = None

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        self.steps.append(output)
        self.before()
        result = self.stub.execute(output)
        rows = self.poison(output) if self.poison is not None else ()
        if rows:
            raise PoisonedRows(rows)
        return result

    def check(self, output: SchedulerOutput) -> None:
        """Budgets hold, tables cover what is written, and no slot has two writers."""
        assert output.sequences
        assert output.num_scheduled_tokens <= self.config.max_num_batched_tokens
        assert len(output.sequences) <= self.config.max_num_seqs
        written: Counter[tuple[int, int]] = Counter()
        for share in output.sequences:
            end = share.start + len(share.token_ids)
            assert 1 <= len(share.token_ids) <= self.config.chunk_tokens
            assert len(share.block_table) * self.stub.block_size >= end
            for position in range(share.start, end):
                block, slot = divmod(position, self.stub.block_size)
                written[share.block_table[block], slot] += 1
        assert set(written.values()) == {1}


@dataclass
class CountingOwner(RecordingOwner):
    """Counts by position what each sequence computed, and checks what was sealed."""

    computed: dict[str, Counter[int]] = field(default_factory=dict)
    pool: BlockPool | None = None

    def on_progress(self, progress: SequenceProgress, now: float) -> None:
        super().on_progress(progress, now)
        sequence = progress.sequence
        end = sequence.num_computed_tokens
        counts = self.computed.setdefault(sequence.key.request_id, Counter())
        counts.update(range(end - progress.num_computed, end))
        assert self.pool is not None
        size = sequence.table.block_size
        for sealed in progress.sealed:
            index = sealed.start // size
            block = self.pool.blocks[sealed.block_id]
            root = root_hash(MODEL, sequence.spec.cache_salt)
            chain = HashChain(root, size, sequence.hashes.unit)
            shown = sequence.token_ids[: sealed.start + sealed.num_tokens]
            assert sequence.table.block_ids[index] == sealed.block_id
            assert block.num_tokens == sealed.num_tokens == len(shown) - index * size
            assert block.block_hash == chain.at(index, shown)
            assert sealed.start + sealed.num_tokens <= end, "sealed before it was computed"


@dataclass
class Bench:
    """See the module. ``host`` are the slots and files of a host tier, ``costs`` decide on its use.

    With one, a block is spoilt when the next step computes: until then its old content can still be
    copied, as it can in a real pool.
    """

    num_blocks: int
    block_size: int = 4
    config: SchedulerConfig = field(default_factory=config)
    owner: CountingOwner = field(default_factory=CountingOwner)
    caching: bool = False
    match_unit: int | None = None
    host: tuple[int, int] | None = None
    costs: Costs = field(default_factory=lambda: FixedCosts(True))

    def __post_init__(self) -> None:
        self.memory = np.zeros((self.num_blocks, stub_layout(self.block_size).block_bytes()), "u1")
        self.slots = self.memory.view(np.int64)
        self.spoilt: set[int] = set()
        self.runner = CheckingRunner(
            StubRunner(self.memory, self.block_size), self.config, self._spoil_all
        )
        index = PrefixIndex() if self.caching else None
        self.pool = BlockPool(self.num_blocks, self._spoil, index)
        self.owner.pool = self.pool
        self.clock = FakeClock()
        self.mover = DictMover(self.slots, self.spoilt)
        self.offloading: Offloading | None = None
        if self.host is not None:
            self.offloading = Offloading(
                HostTier(*self.host, self.caching),
                self.mover,
                self.block_size,
                self.clock,
                self.costs,
            )
        self.engine = Engine(
            self.config,
            self.runner,
            self.pool,
            self.block_size,
            MODEL,
            self.clock,
            self.match_unit,
            self.offloading,
        )
        self.sequences: dict[str, SequenceState] = {}
        self.leases: list[tuple[str, int]] = []
        self.reserved: list[BlockTable] = []
        self.num_steps = 0

    def _spoil(self, block_id: int, generation: int) -> None:
        if self.pool.blocks[block_id].state is BlockState.FREE:
            self.spoilt.add(block_id)
            if self.host is None:
                self._spoil_all()

    def _spoil_all(self) -> None:
        for block_id in self.spoilt:
            self.slots[block_id] = -self.pool.blocks[block_id].generation - 1
        self.spoilt.clear()

    # --- sequences --------------------------------------------------------------------------

    def submit(
        self, spec: RequestSpec, prefill_only: bool = False, attempt: Attempt = ATTEMPT
    ) -> SequenceState:
        """A sequence that computes everything itself."""
        sequence = self.engine.new_sequence(spec, attempt, self.owner, prefill_only=prefill_only)
        self.sequences[spec.request_id] = sequence
        return sequence

    def add(self, name: str, num_prompt: int, max_tokens: int = 1) -> SequenceState:
        """A request of so many tokens."""
        return self.submit(stub_spec(name, range(num_prompt), max_tokens))

    def join(self, spec: RequestSpec, num_computed: int | None = None) -> SequenceState | None:
        """A sequence whose prompt, or its beginning, was computed elsewhere, with token 1 if it
        is the whole; None if the pool is too full for it.
        """
        prompt = spec.kv_prompt()
        count = len(prompt) if num_computed is None else num_computed
        if self.engine.kv.blocks_for(count) > self.pool.num_free:
            return None
        table = BlockTable(self.block_size, self.pool.allocate(self.engine.kv.blocks_for(count)))
        self._spoil_all()
        for position in range(count):
            block, slot = divmod(table.slot(position), self.block_size)
            self.slots[block, slot] = stub_value(prompt[position], position)
        hashes = self.engine.hash_chain(spec)
        self.engine.kv.seal(table, prompt, count, hashes, include_partial=True)
        sequence = self.engine.new_sequence(
            spec,
            ATTEMPT,
            self.owner,
            table=table,
            hashes=hashes,
            output_token_ids=tuple(stub_output(prompt, 1)) if count == len(prompt) else (),
            num_computed_tokens=count,
        )
        self.sequences[spec.request_id] = sequence
        return sequence

    def add_joined(self, name: str, num_prompt: int, max_tokens: int = 9) -> SequenceState:
        """A request that joins with its whole prompt and token 1."""
        sequence = self.join(stub_spec(name, range(num_prompt), max_tokens))
        assert sequence is not None
        return sequence

    def add_half(self, name: str, num_computed: int, num_prompt: int = 14) -> SequenceState:
        """A request that joins with the first positions of its prompt."""
        sequence = self.join(stub_spec(name, range(num_prompt), 2), num_computed)
        assert sequence is not None
        return sequence

    def reserve(self, num_blocks: int) -> BlockTable:
        """Blocks that are held for a request which is not here yet."""
        self.reserved.append(BlockTable(self.block_size, self.pool.allocate(num_blocks)))
        return self.reserved[-1]

    def pin(self, name: str, block_id: int) -> None:
        """A lease on a sealed block."""
        self.pool.pin(block_id)
        self.leases.append((name, block_id))

    def unpin_all(self) -> None:
        """Every lease ends."""
        for _, block_id in self.leases:
            self.pool.unpin(block_id)
        self.leases.clear()

    # --- steps ------------------------------------------------------------------------------

    @property
    def running(self) -> list[str]:
        """Names of the running sequences, in the scheduler's order."""
        return [s.key.request_id for s in self.engine.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        """Names of the waiting sequences, first in line first."""
        return [s.key.request_id for s in self.engine.scheduler.waiting]

    @property
    def swapped(self) -> list[str]:
        """Names of those whose KV waits in the host tier."""
        waiting = self.engine.scheduler.waiting
        return [s.key.request_id for s in waiting if s.status is SequenceStatus.SWAPPED]

    @property
    def counters(self) -> EngineCounters:
        """What the engine has counted."""
        return self.engine.scheduler.counters

    def has_preempted(self) -> bool:
        """Whether a preempted sequence waits."""
        return self.engine.scheduler.has_preempted

    def preemptions(self) -> list[int]:
        """How often each sequence was preempted, in order of submission."""
        return [sequence.num_preemptions for sequence in self.sequences.values()]

    def scheduled(self) -> list[int]:
        """Tokens of each sequence of the last step."""
        return [len(share.token_ids) for share in self.runner.steps[-1].sequences]

    def step(self) -> bool:
        """One step, audited."""
        self.num_steps += 1
        self.clock.now += 1.0
        before = len(self.runner.steps)
        computed = self.engine.step()
        for output in self.runner.steps[before:]:
            self.runner.check(output)  # here: the engine ends a batch whose step raises
        found = self.audit()
        assert found.consistent, found.problems
        assert sum(found.counts.values()) == self.num_blocks
        self.check_host()
        return computed

    def check_host(self) -> None:
        """The tier has what its owners need, and nothing else; its books are those of the mover."""
        if self.offloading is None:
            return
        tier = self.offloading.tier
        scheduler = self.engine.scheduler
        # Whoever waits without its KV there holds nothing.
        waiting = {s.key for s in scheduler.waiting if s.status is SequenceStatus.WAITING}
        found = audit_host(tier, scheduler.sequences.keys() - waiting)
        assert found.consistent, found.problems
        total = sum(found.owned.values()) + found.num_cached + found.num_free
        assert total == tier.num_slots + tier.num_files
        for entry in tier:
            level = self.mover.memory if entry.slot is not None else self.mover.disk
            place = entry.slot if entry.slot is not None else entry.file
            assert place is not None and level[place][0] == entry.key
        files = {entry.file for entry in tier} - {None}
        assert self.mover.disk.keys() == files, "files nobody knows of"

    def run(self, most_steps: int = 500) -> None:
        """Step until no sequence is left."""
        for _ in range(most_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"running {self.running}, waiting {self.waiting}")

    def audit(self) -> PoolAudit:
        """Hold the pool against the sequences' tables and the leases."""
        tables = [s.table for s in self.engine.scheduler.sequences.values()] + self.reserved
        owners = [Owner(OwnerKind.REQUEST, b, "r") for table in tables for b in table.held_ids]
        owners.extend(Owner(OwnerKind.READER, block_id, name) for name, block_id in self.leases)
        owners.extend(index_owners(self.pool))
        return audit(self.pool, owners)

    # --- what must hold ---------------------------------------------------------------------

    def assert_empty(self) -> None:
        """Nobody holds anything."""
        counts = self.audit().counts
        assert counts[BlockClass.FREE] + counts[BlockClass.CACHED] == self.num_blocks
        assert not self.engine.has_work and not self.running and not self.waiting
        if self.offloading is not None:
            assert not self.offloading.tier.owners
            assert self.caching or not len(self.offloading.tier)

    def assert_exact(self, *but: str) -> None:
        """Every sequence has sampled exactly what the stub answers, except those named."""
        for name, sequence in self.sequences.items():
            if name not in but:
                assert sequence.token_ids == expected_tokens(sequence), name


def expected_tokens(sequence: SequenceState) -> list[int]:
    """All tokens of a finished sequence."""
    spec = sequence.spec
    delivered = len(spec.suffixes[0])
    count = 1 if sequence.prefill_only else max(1, spec.sampling.max_tokens - delivered)
    prompt = spec.kv_prompt()
    return [*prompt, *stub_output(prompt, count)]
