"""The host tier as the model keeps it: what lies outside the pool, where, for whom; and the mover.

The mover plays the host's memory and its disk. It is told what to copy and nothing else; who must
hold what follows from who was preempted, who was admitted and who has computed since. What the
least recently used is, and what goes to the disk, the tier decides: here it is held to losing
nothing that somebody holds, keeping nothing that nobody can use, and giving back what it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.kv_cache.audit import audit_host
from kvferry.kv_cache.host_tier import (
    Forget,
    HostKey,
    HostTier,
    Load,
    Move,
    Read,
    Save,
    Spill,
    TailKey,
)
from tests.engine.cache_model import CacheModel, Name, Record

Place = tuple[str, int]  # "slot" or "file", and its number


@dataclass
class Kept:
    """A content: where it lies, and the cells that its filled slots must have."""

    place: Place
    cells: list[int]


class HostModel:
    """See the module.

    Attributes:
        kept: what the tier has: whole blocks by chain value, last ones by record and place.
        always, ever: names of what it had all through the turn, and at any time in it.
        contents: blocks by place, as they were copied.
        damaged: files that can be neither read nor written.
    """

    block_bytes = 64

    def __init__(self, model: CacheModel, tier: HostTier) -> None:
        self.kept: dict[Name, Kept] = {}
        self.always: set[Name] = set()
        self.ever: set[Name] = set()
        self.contents: dict[Place, list[int]] = {}
        self.damaged: set[int] = set()
        self.num_files = tier.num_files
        self._model, self._tier = model, tier
        self._stopped: list[Record] = []

    def begin_turn(self) -> None:
        """Something is about to happen."""
        self.always, self.ever = set(self.kept), set(self.kept)

    def close(self) -> None:
        """Nothing to give back."""

    # --- copies -----------------------------------------------------------------------------

    def move(self, moves: Sequence[Move]) -> list[Move]:
        """Make the moves in order; returns those that a file made fail."""
        self._model.notice_preemptions()
        failed = [move for move in moves if not self._make(move)]
        for move in failed:
            if isinstance(move, Spill | Read):
                self._lose(self._name(move.key), ("file", move.file))
        self.settle()
        return failed

    def _make(self, move: Move) -> bool:
        match move:
            case Save(key, block_id, slot):
                self._save(self._name(key), block_id, ("slot", slot))
            case Spill(key, slot, file):
                return self._spill(self._name(key), ("slot", slot), ("file", file))
            case Load(key, slot, block_id):
                return self._restore(key, ("slot", slot), block_id)
            case Read(key, file, block_id):
                return self._restore(key, ("file", file), block_id)
            case Forget(file):
                self._vacate(("file", file))
                self.contents.pop(("file", file), None)
        return True

    def _save(self, name: Name, block_id: int, place: Place) -> None:
        """Whatever is off-loaded is what its name says."""
        model, content = self._model, self._model.memory[block_id]
        if isinstance(name, bytes):
            cells = model.words.ending_in(content[-1], model.size)
            assert model.words.value(content[-1]) == name, "off-loaded under another's name"
        else:
            record = model.records[name[0]]
            cells = record.cells[name[1] * model.size : record.num_swapped]
            assert 0 < len(cells) < model.size, "the part of a block that is off-loaded"
        assert content[: len(cells)] == cells, "off-loaded, yet another's"
        self._vacate(place)
        self.kept[name] = Kept(place, cells)
        self.contents[place] = list(content)
        self.ever.add(name)
        model.seen["saved blocks"] += 1

    def _spill(self, name: Name, slot: Place, file: Place) -> bool:
        assert self.kept[name].place == slot, "another content lies there"
        self._vacate(file)
        self.kept[name].place = file
        self._model.seen["spilled blocks"] += 1
        if file[1] in self.damaged:
            self.contents.pop(file, None)
            return False
        self.contents[file] = self.contents[slot]
        return True

    def _restore(self, key: HostKey, place: Place, block_id: int) -> bool:
        """Whatever is restored is what was off-loaded, belongs where it goes, and is kept."""
        model, name = self._model, self._name(key)
        (record,) = model.holders(block_id)
        index = record.table.block_ids.index(block_id)
        own = (record.number, index)
        assert name == own or name == model.name_of(record, index), "another's block"
        record.holding.add(name)
        broken = place[0] == "file" and place[1] in self.damaged
        if broken or place not in self.contents:
            assert place[0] == "file", "memory loses nothing"
            model.note_owners()
            model.touched.update(record.table.block_ids)
            self._stopped.append(record)
            return False
        assert self.kept[name].place == place, "another content lies there"
        entry = self._tier.find(key)
        assert entry is not None and record.key in entry.owners, "not kept until it has computed"
        content, cells = self.contents[place], self.kept[name].cells
        assert content[: len(cells)] == cells, "restored, yet another's"
        model.fill(block_id, content)
        model.seen["restored blocks"] += 1
        return True

    def _name(self, key: HostKey) -> Name:
        if not isinstance(key, TailKey):
            return key
        return self._model.every[key.owner].number, key.block_index

    def _vacate(self, place: Place) -> None:
        """Something else lies there from now on."""
        for name in [name for name, kept in self.kept.items() if kept.place == place]:
            self._forget(name)

    def _forget(self, name: Name) -> None:
        del self.kept[name]
        self.always.discard(name)

    def _lose(self, name: Name, place: Place) -> None:
        """A file is not what it should be: if that is where the content lies, it is gone."""
        self._model.seen["lost blocks"] += 1
        if name in self.kept and self.kept[name].place == place:
            self._forget(name)
        if name not in self.kept:
            for record in self._model.records.values():
                record.lost_some |= name in record.holding
                record.holding.discard(name)

    # --- what must be there -------------------------------------------------------------------

    def settle(self) -> None:
        """What somebody holds is here; what nobody holds only if others may find it."""
        held = {name for r in self._model.records.values() for name in r.holding}
        for name in list(self.kept):
            if name not in held and not (isinstance(name, bytes) and self._tier.caching):
                self._forget(name)
        assert held <= self.kept.keys(), "what somebody holds is gone"

    def end_stopped(self) -> None:
        """Who was to begin with lost blocks waits again, and keeps what is left if it was his."""
        for record in self._model.records.values():
            sequence = record.sequence
            if record.num_swapped and sequence is not None and not sequence.num_swapped_tokens:
                # Lost by another's read while room was made for it: it was told of no copy.
                assert record.lost_some and not record.holding and record.fresh
                record.let_go()
        for record in self._stopped:
            self._model.seen["stopped for lost blocks"] += 1
            if not (record.num_swapped and record.holding):
                record.let_go()
        self._stopped.clear()

    def clear_cache(self) -> None:
        """Everything that nobody holds is forgotten."""
        held = {name for r in self._model.records.values() for name in r.holding}
        moves = self._tier.clear_cache()
        for name in self.kept.keys() - held:
            self._forget(name)
        assert not self.move(moves)

    def check(self) -> None:
        """The tier has what the model has, where the model has it, for the same owners."""
        self.settle()
        tier, records = self._tier, self._model.records.values()
        theirs = {}
        for entry in tier:
            assert (entry.slot is None) != (entry.file is None)
            place = ("file", entry.file) if entry.slot is None else ("slot", entry.slot)
            theirs[self._name(entry.key)] = place, entry.num_tokens, entry.owners
        assert theirs == {
            name: (kept.place, len(kept.cells), {r.key for r in records if name in r.holding})
            for name, kept in self.kept.items()
        }
        found = audit_host(tier, [r.key for r in records if r.holding])
        assert found.consistent, found.problems
        total = sum(found.owned.values()) + found.num_cached + found.num_free
        assert total == tier.num_slots + tier.num_files
        self.no_file_is_left_over()

    def no_file_is_left_over(self) -> None:
        """What is on the disk is known."""
        files = {place for place in self.contents if place[0] == "file"}
        assert files <= {kept.place for kept in self.kept.values()}, "files nobody knows of"

    def reach(self, record: Record, found: int, names: set[Name]) -> int:
        """Leading positions that a record can begin with, ``found`` of them in the pool."""
        model, size = self._model, self._model.size
        end = found // size * size
        last = len(record.cells) if record.reuses else record.num_swapped
        while end + size <= last and model.name_of(record, end // size) in names:
            end += size
        if (record.number, end // size) in names and record.num_swapped:
            end += record.num_swapped - end
        return max(found, end)
