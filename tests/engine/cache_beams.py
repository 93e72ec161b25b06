"""Beams in the cache machine, and what may happen outside the pool: the machine is their owner.

Beams are chosen when all of a group have computed, within the step, as the decode role does it; or
later and one by one, as its owner may. Each goes on with one token, is forked, or is dropped.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvferry.engine.engine import Fork
from kvferry.kv_cache.block_table import BlockTable
from tests.engine.cache_cells import VOCABULARY
from tests.engine.cache_house import CacheHouse, has_room, pick, picks, salts, tails
from tests.engine.cache_model import Group, Record

MOST_BEAMS = 3
WAYS = (1, 2, 1, 0, 1, 3, 2)  # how many beams go on from one


class BeamHouse(CacheHouse):
    """See the module."""

    # --- beams --------------------------------------------------------------------------------

    @precondition(has_room)
    @rule(
        known=picks,
        keep=st.integers(0, 20),
        tail=tails,
        max_tokens=st.integers(2, 6),
        salt=salts,
        eager=st.sampled_from([None, False, None, True]),
    )
    def begin_beams(
        self,
        known: int,
        keep: int,
        tail: list[int],
        max_tokens: int,
        salt: str,
        eager: bool | None,
    ) -> None:
        """A request of which several outputs are searched, one so far; not each time."""
        if eager is None or any(r.group is not None for r in self.records):
            return
        record = self.new_record(pick(self.history, known)[:keep], tail, max_tokens, salt)
        record.group = Group(record.number, eager)
        self.turn(lambda: self.submit(record))

    @precondition(lambda self: self.parked())
    @rule(number=picks, way=picks, together=st.booleans())
    def choose_beams(self, number: int, way: int, together: bool) -> None:
        """The owner of parked beams chooses how they go on, all of a group or one of them."""
        first = pick(self.parked(), number)
        group = [r for r in self.parked() if r.group is first.group]
        self.turn(lambda: self.choose(group if together else [first], way))

    def parked(self) -> list[Record]:
        return [r for r in self.records if r.parked and r not in self.ending]

    def on_parked(self, record: Record) -> None:
        """All of an eager group have computed: they go on while the step is still being told."""
        assert record.group is not None
        group = [r for r in self.records if r.group is record.group and r not in self.ending]
        if record.group.eager and all(r.parked for r in group):
            self.choose(group, record.cells[-1])
            self.seen["beams chosen within the step"] += 1

    def choose(self, beams: list[Record], way: int) -> None:
        """Beams that nothing goes on from are dropped first, then forks made while what they begin
        with is not written, then the others go on.
        """
        ways = [WAYS[(way + 3 * place) % len(WAYS)] for place in range(len(beams))]
        for place, parent in enumerate(beams):
            if len(parent.tokens) + 1 > parent.num_prompt + parent.max_tokens:
                ways[place] = 0
            if not ways[place]:
                self.drop(parent)
                self.seen["beams dropped"] += 1
        going_on = [(parent, n) for parent, n in zip(beams, ways, strict=True) if n]
        for parent, count in going_on:
            for each in range(1, count):
                if sum(r.group is parent.group for r in self.records) < MOST_BEAMS:
                    self.branch_off(parent, (way + each) % VOCABULARY)
        for parent, _ in going_on:
            self.go_on(parent, way % VOCABULARY)

    def go_on(self, record: Record, token: int) -> None:
        assert record.sequence is not None
        self.engine.go_on(record.sequence, token)
        record.parked = False
        record.cells.append(self.model.words.after(record.cells[-1], token))
        record.tokens.append(token)
        self.seen["beams continued"] += 1

    def branch_off(self, parent: Record, token: int) -> None:
        """Another beam that has computed what its parent has, if there is a block for the copy."""
        assert parent.sequence is not None and parent.group is not None
        num_tokens, table = len(parent.held), BlockTable(self.size)
        if num_tokens % self.size and not self.pool.num_free:
            num_tokens = 0
            self.seen["beams without a block"] += 1
        if num_tokens:
            tail = self.pool.allocate(1)[0] if num_tokens % self.size else None
            table = self.engine.fork([Fork(parent.table, num_tokens, tail)])[0]
            assert len(table.block_ids) == -(-num_tokens // self.size)
        self.num_records += 1
        tokens, words = [*parent.tokens, token], self.model.words
        cells = [*parent.cells, words.after(parent.cells[-1], token)]
        record = Record(
            self.num_records,
            parent.salt,
            tokens,
            cells,
            parent.num_prompt,
            parent.max_tokens,
            table,
            group=parent.group,
            beam=parent.group.num_beams,
            held=dict(enumerate(parent.cells[:num_tokens])),
        )
        parent.group.num_beams += 1
        self.submit(record, hashes=parent.sequence.hashes.copy())
        self.seen["beams forked"] += 1

    def go_on_all(self) -> None:
        """Whoever has not reached its length goes on alone; the others are dropped."""
        for record in self.parked():
            self.choose([record], 0)

    # --- outside the pool -----------------------------------------------------------------------

    @precondition(lambda self: self.host is not None and self.host.num_files)
    @rule(number=picks, fault=st.sampled_from(["lost", "damaged", "lost", "mended"]))
    def disturb_disk(self, number: int, fault: str) -> None:
        """Files that are there are lost, or cannot be read or written any more, or can again."""
        assert self.host is not None
        host = self.host
        there = [place for place in host.contents if place[0] == "file"]
        if fault == "mended" or not there:
            self.turn(host.damaged.clear)
        elif fault == "lost":
            self.turn(lambda: host.contents.pop(pick(there, number)))
        else:
            self.turn(lambda: host.damaged.add(pick(there, number)[1]))
