"""Pool, index, tables, scheduler, host tier and leases under everything that may happen to them.

The machine plays the roles and the runner: requests come by themselves, join with blocks read from
a peer, fork, or search beams; steps are computed, fail and are interrupted; blocks are pinned under
leases that are acknowledged, end or expire; KV is off-loaded and restored where there is a host
tier, whose files are lost and damaged. After every step each sequence is read back through its
table, and pool, index, tier, leases and audits are held against dictionaries (``cache_model``,
``cache_host``).

    python -m tests.engine.cache_machine --seed 5 --examples 1000     looks for new ways
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Sequence

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from kvferry.kv_cache.block_table import Prefix
from kvferry.kv_transfer.leases import LeaseKey
from tests.engine.cache_beams import BeamHouse
from tests.engine.cache_house import CacheHouse, Enough, has_room, pick, picks, salts, sures, tails
from tests.engine.cache_model import Read, Record

STEPS_PER_EXAMPLE = 50


class CacheMachine(BeamHouse):
    """See the module."""

    # --- requests ---------------------------------------------------------------------------

    @precondition(has_room)
    @rule(
        known=picks,
        keep=st.integers(0, 20),
        tail=tails,
        max_tokens=st.integers(1, 8),
        salt=salts,
        kind=st.sampled_from(["decode", "decode", "prefill", "prefill", "prompt_logprobs"]),
        reader=st.integers(1, 2),
        twins=st.sampled_from([2, 1, 3]),
    )
    def arrive(
        self,
        known: int,
        keep: int,
        tail: list[int],
        max_tokens: int,
        salt: str,
        kind: str,
        reader: int,
        twins: int,
    ) -> None:
        """Requests that compute whatever is not here; a prefill's blocks are leased."""
        for _ in range(twins):
            record = self.new_record(pick(self.history, known)[:keep], tail, max_tokens, salt)
            record.prefill_only = kind == "prefill"
            record.reuses = kind != "prompt_logprobs"
            self.turn(lambda: self.begin(record, reader))  # noqa: B023

    def begin(self, record: Record, reader: int) -> None:
        if record.prefill_only:
            record.lease = LeaseKey(f"r{record.number}", (1, 1), ("decode", reader))
            assert self.leases.open(record.lease, self.now)
            assert not self.leases.open(record.lease, self.now)
            self.book.begin(record.lease, self.now)
        self.submit(record)

    @precondition(lambda self: has_room(self) and self.forkable())
    @rule(
        number=picks,
        at_most=st.integers(1, 4),
        tail=tails.filter(len),
        max_tokens=st.integers(1, 4),
    )
    def fork(self, number: int, at_most: int, tail: list[int], max_tokens: int) -> None:
        """A new sequence that shares the first blocks of another, the partial one perhaps."""
        parent = pick(self.forkable(), number)
        num_tokens = min(at_most * self.size, len(parent.held))
        num_tokens = min(num_tokens, self.most_tokens - max_tokens - 1)
        if num_tokens < 1:
            return
        record = self.new_record(parent.tokens[:num_tokens], tail, max_tokens, parent.salt)
        self.turn(lambda: self.share(parent, record, num_tokens))
        self.seen["forked"] += 1

    def forkable(self) -> list[Record]:
        sharing = [r for r in self.scheduled if not r.prefill_only and r.group is None]
        return [r for r in sharing if r.held and not r.uncopied]

    def share(self, parent: Record, record: Record, num_tokens: int) -> None:
        table, computed = parent.table, len(parent.held)
        assert parent.sequence is not None
        starts = range(table.num_sealed * self.size, computed, self.size)
        sealed = self.kv.seal(table, parent.tokens, computed, parent.sequence.hashes, True)
        for start, block in zip(starts, sealed, strict=True):
            end = min(start + self.size, computed)
            assert (block.start, block.num_tokens) == (start, end - start)
            self.model.seal(block.block_id, parent.cells, start, end)
        num_blocks = -(-num_tokens // self.size)
        self.kv.adopt(record.table, Prefix(tuple(table.block_ids[:num_blocks]), num_tokens))
        record.held = dict(enumerate(record.cells[:num_tokens]))
        self.submit(record)

    @precondition(lambda self: self.records)
    @rule(number=picks, sure=sures)
    def abort(self, number: int, sure: bool) -> None:
        """Legal in any state: queued, mid-chunk, reading, decoding, preempted."""
        if not sure:
            return
        record = pick(self.records, number)
        self.turn(lambda: self.drop(record))
        self.seen["aborted"] += 1

    # --- steps ------------------------------------------------------------------------------

    @precondition(lambda self: self.scheduled)
    @rule()
    def step(self) -> None:
        self.turn(self.step_engine)

    @precondition(lambda self: self.scheduled)
    @rule(count=st.integers(3, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.scheduled:
                self.turn(self.step_engine)

    @precondition(lambda self: self.scheduled)
    @rule(number=picks, fault=st.sampled_from(["poison", "raise", "abort"]))
    def disturbed_step(self, number: int, fault: str) -> None:
        """One sequence gets no token, or makes the step raise, or is aborted by another's owner."""
        record = pick(self.scheduled, number)
        if fault == "poison":
            self.runner.poison = record.number
        elif fault == "raise":
            self.runner.culprit = record.number
        else:
            self.owner.meanwhile = lambda: self.abort_meanwhile(record)
        self.turn(self.step_engine)
        self.runner.poison = self.runner.culprit = self.owner.meanwhile = None

    def abort_meanwhile(self, record: Record) -> None:
        if record not in self.ending and record in self.records:
            self.drop(record)
            self.seen["aborted meanwhile"] += 1

    # --- leases -----------------------------------------------------------------------------

    @precondition(lambda self: self.book.open)
    @rule(number=picks, until=picks)
    def acknowledge(self, number: int, until: int) -> None:
        """The reader has verified some more; once it has all of a finished prefill, it is over."""
        key = pick(list(self.book.open), number)
        verified = until % (self.book.open[key].announced + 1)
        self.turn(lambda: self.verified(key, verified))

    def verified(self, key: LeaseKey, until: int) -> None:
        released = self.leases.acknowledge(key, until, self.now)
        self.unpin(key, released, self.book.verify(key, until, self.now))
        computed = any(record.lease == key for record in self.records)
        if not computed and not self.book.open[key].blocks:
            self.end_lease(key)

    @precondition(lambda self: self.book.ended)
    @rule(number=picks, until=picks)
    def acknowledge_late(self, number: int, until: int) -> None:
        """Of a lease that has ended: refused, counted, and nothing else."""
        key, refused = pick(self.book.ended[-8:], number), self.leases.stale_refused
        self.turn(lambda: self.unpin(key, self.leases.acknowledge(key, until, self.now), []))
        assert self.leases.stale_refused == refused + 1
        assert self.leases.end(key) == []

    @rule(seconds=st.sampled_from([0.5, 0.5, 2.0, 6.0]))
    def sweep(self, seconds: float) -> None:
        """Time passes; leases whose reader stands still end, and the jobs behind them."""
        self.now += seconds
        self.turn(self.expire)

    def expire(self) -> None:
        stalled = self.book.stalled(self.now)
        ended = self.leases.sweep(self.now)
        assert [key for key, _ in ended] == stalled
        for key, released in ended:
            self.unpin(key, released, self.book.end(key))
            self.seen["expired"] += 1
        for record in [r for r in self.records if r.lease in stalled]:
            self.drop(record)

    @precondition(lambda self: self.book.open)
    @rule(reader=st.integers(1, 2), sure=sures)
    def reader_dies(self, reader: int, sure: bool) -> None:
        if sure:
            self.turn(lambda: self.end_reader(("decode", reader)))

    def end_reader(self, reader: tuple[str, int]) -> None:
        mine = [key for key in self.book.open if key.reader == reader]
        ended = self.leases.end_reader(reader)
        assert [key for key, _ in ended] == mine
        for key, released in ended:
            self.unpin(key, released, self.book.end(key))
        for record in [r for r in self.records if r.lease in mine]:
            self.drop(record)

    # --- reads from a peer ------------------------------------------------------------------

    @precondition(has_room)
    @rule(
        known=picks, keep=st.integers(0, 20), tail=tails, max_tokens=st.integers(1, 4), salt=salts
    )
    def reserve(self, known: int, keep: int, tail: list[int], max_tokens: int, salt: str) -> None:
        """All blocks of a prompt are held; those that are not here are read, or computed."""
        record = self.new_record(pick(self.history, known)[:keep], tail, max_tokens, salt)
        self.turn(lambda: self.take(record))

    def take(self, record: Record) -> None:
        length, model = len(record.tokens), self.model
        prefix = self.kv.find_prefix(self.engine.hash_chain(self.spec(record)), record.tokens)
        assert prefix.num_tokens == model.longest_prefix(record.cells, model.findable)
        num_shared = prefix.num_tokens // self.size
        shared, num_here = prefix.block_ids[:num_shared], num_shared * self.size
        computes = num_shared > 0 and length - num_here < self.size
        start = min(num_here, length - 1)
        num_blocks = -(-length // self.size)
        lacks = num_blocks - num_shared + (start < num_here)
        if lacks > self.pool.num_free - len(set(shared) - model.owned()):
            return
        model.records[record.number] = record
        self.kv.adopt(record.table, Prefix(shared, num_here))
        model.touched.update(shared)
        copies = self.kv.allocate(record.table, start, length)
        assert copies is not None and len(copies) == (start < num_here)
        record.held = dict(enumerate(record.cells[:start]))
        if computes:
            self.submit(record, copies)
            return
        record.reading = set(range(num_shared, num_blocks))
        for index in range(num_shared, num_blocks):
            self.pool.begin_transfer(record.table.block_ids[index])
            model.reads.append(Read(record, index, record.table.block_ids[index]))

    @precondition(lambda self: self.model.reads)
    @rule(
        number=picks,
        outcome=st.sampled_from(["ok"] * 4 + ["failed", "lost"]),
        count=st.integers(1, 4),
    )
    def end_reads(self, number: int, outcome: str, count: int) -> None:
        """Reads arrive, fail, or cannot be fenced; their requests may be gone by then."""
        for _ in range(min(count, len(self.model.reads))):
            self.turn(lambda: self.arrived(number % len(self.model.reads), outcome))

    def arrived(self, number: int, outcome: str) -> None:
        model = self.model
        read = model.reads[number]
        record, block_id, start = read.record, read.block_id, read.index * self.size
        end = min(start + self.size, record.num_prompt)
        if outcome == "lost" and (model.lost or not self.may_lose):
            outcome = "ok"  # one is enough, or nothing would fit any longer
        for position in range(start, end):
            cell = record.cells[position] if outcome == "ok" else -block_id
            model.write(block_id, position - start, cell)
        if outcome == "lost":
            self.pool.quarantine(block_id)
            model.lost.add(block_id)
        del model.reads[number]
        self.pool.end_transfer(block_id)
        if record not in self.records:
            self.seen["read for nobody"] += 1
        elif outcome == "ok":
            marks = self.engine.hash_chain(self.spec(record)).marks(read.index, end, record.tokens)
            self.pool.seal(block_id, end - start, marks[-1].value, marks)
            model.seal(block_id, record.cells, start, end)
            record.held.update((p, record.cells[p]) for p in range(start, end))
            record.reading.discard(read.index)
            if not record.reading:
                self.join(record)
        else:
            self.drop(record)

    def join(self, record: Record) -> None:
        """Every block is here, and so is token 1."""
        record.table.num_sealed = len(record.table.block_ids)
        if record.max_tokens == 1:
            self.drop(record)
            return
        token = self.model.words.next_token(record.cells[-1])
        record.tokens.append(token)
        record.cells.append(self.model.words.after(record.cells[-1], token))
        self.submit(record)
        self.seen["joined"] += 1

    # --- the cache --------------------------------------------------------------------------

    @rule(sure=sures)
    def clear_cache(self, sure: bool) -> None:
        """Now and then everything that nobody holds is forgotten."""
        if sure:
            self.turn(self.clear)
            if self.host is not None:
                self.turn(self.host.clear_cache)

    def clear(self) -> None:
        cached = self.model.found_blocks() - self.model.owned()
        assert self.pool.clear_cache() == len(cached)
        for block_id in cached:
            self.model.forget(block_id)


def run(
    seed: int,
    num_examples: int,
    phases: Sequence[Phase] = (Phase.generate, Phase.shrink),
    most_steps: int | None = None,
) -> None:
    """Run the machine: ``num_examples`` times ``STEPS_PER_EXAMPLE`` rules, the same for a seed.

    Ends early after ``most_steps``. Counts go to the class; raises what the machine finds.
    """
    CacheHouse.num_steps, CacheHouse.failed_at, CacheHouse.most_steps = 0, None, most_steps
    CacheHouse.seen.clear()
    chosen = settings(
        max_examples=num_examples,
        stateful_step_count=STEPS_PER_EXAMPLE,
        deadline=None,
        derandomize=False,
        database=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.normal if Phase.shrink in phases else Verbosity.quiet,
    )
    with contextlib.suppress(Enough):
        run_state_machine_as_test(hypothesis.seed(seed)(CacheMachine), settings=chosen)


def main(arguments: Sequence[str]) -> int:
    """Explore from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.cache_machine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=200)
    args = parser.parse_args(arguments)
    logging.disable()  # steps fail on purpose
    run(args.seed, args.examples)
    print(f"{CacheHouse.num_steps} steps: {dict(sorted(CacheHouse.seen.items()))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
