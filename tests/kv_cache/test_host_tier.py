"""The host tier alone: what it keeps and gives up, and that moves in order give it all back."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvferry.kv_cache.audit import audit_host
from kvferry.kv_cache.hashing import BlockHash
from kvferry.kv_cache.host_tier import (
    Content,
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

BLOCK = 4


def hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def whole(number: int) -> Content:
    """A full block with a hash; it lies in the block of the same number."""
    return Content(hash_of(number), number, BLOCK)


def saved(tier: HostTier, owner: str, *contents: Content) -> list[Move]:
    moves = tier.save(owner, contents)
    assert moves is not None
    return moves


def test_what_is_saved_is_copied_once_for_all_its_owners() -> None:
    tier = HostTier(4)
    assert [type(move) for move in saved(tier, "a", whole(1), whole(2))] == [Save, Save]
    assert [move.block_id for move in saved(tier, "b", whole(2), whole(3))] == [3]  # type: ignore[union-attr]
    assert tier.num_missing([whole(1), whole(4)]) == 1
    tier.release("a")
    entry = tier.find(hash_of(2))
    assert entry is not None and entry.owners == {"b"}


def test_it_takes_all_or_nothing() -> None:
    tier = HostTier(2, 1)
    assert tier.save("a", [whole(n) for n in range(4)]) is None
    assert not len(tier) and not tier.owners
    saved(tier, "a", *(whole(n) for n in range(3)))
    assert tier.save("b", [whole(2), whole(3)]) is None
    entry = tier.find(hash_of(2))
    assert entry is not None and entry.owners == {"a"}
    assert tier.save("b", [whole(2)]) == []


def test_the_least_recently_used_cached_one_goes_first() -> None:
    tier = HostTier(3)
    for number in range(3):
        tier.keep(whole(number))
    tier.keep(whole(0))  # used again
    assert saved(tier, "a", whole(5))
    assert tier.find(hash_of(1)) is None and tier.find(hash_of(0)) is not None
    assert tier.num_evictions == 1


def test_cached_ones_never_displace_owned_ones() -> None:
    tier = HostTier(2)
    saved(tier, "a", whole(0), whole(1))
    assert tier.keep(whole(2)) == []
    assert tier.find(hash_of(2)) is None


def test_memory_overflows_to_the_disk_and_the_disk_to_nowhere() -> None:
    tier = HostTier(1, 1)
    tier.keep(whole(0))
    first = tier.keep(whole(1))
    assert [type(move) for move in first] == [Spill, Save]
    second = tier.keep(whole(2))
    assert [type(move) for move in second] == [Spill, Save]
    assert tier.find(hash_of(0)) is None and len(tier) == 2
    assert (tier.num_spilled, tier.num_evictions) == (2, 1)
    assert [type(move) for move in tier.restore([hash_of(1), hash_of(2)], [7, 8])] == [Read, Load]


def test_tails_go_with_their_owner_and_whole_blocks_stay_cached() -> None:
    tier = HostTier(1, 4)
    tail = Content(TailKey("a", 1), 9, 2)
    saved(tier, "a", tail, whole(1))
    assert [type(move) for move in tier.release("a")] == [Forget]
    assert tier.find(hash_of(1)) is not None and len(tier) == 1
    assert tier.release("a") == []
    without = HostTier(4, caching=False)
    saved(without, "a", tail, whole(1))
    assert without.keep(whole(2)) == []
    without.release("a")
    assert not len(without)


def test_a_tail_that_has_grown_is_copied_anew() -> None:
    tier = HostTier(4)
    saved(tier, "a", Content(TailKey("a", 0), 9, 2))
    assert saved(tier, "a", Content(TailKey("a", 0), 9, 2)) == []
    assert [type(move) for move in saved(tier, "a", Content(TailKey("a", 0), 9, 3))] == [Save]
    entry = tier.find(TailKey("a", 0))
    assert entry is not None and entry.num_tokens == 3


def test_what_is_lost_is_nobody_s() -> None:
    tier = HostTier(4)
    saved(tier, "a", whole(1), whole(2))
    tier.lose(hash_of(1))
    tier.lose(hash_of(1))
    assert tier.find(hash_of(1)) is None
    tier.lose(hash_of(2))
    assert not tier.owners and len(tier.free_slots) == 4


@pytest.mark.parametrize(("slots", "files"), [(0, 1), (-1, 0), (1, -1)])
def test_a_tier_of_nothing_is_refused(slots: int, files: int) -> None:
    with pytest.raises(ValueError, match="wanted at least"):
        HostTier(slots, files)


def test_the_audit_counts_by_owner_and_names_what_leaked() -> None:
    tier = HostTier(4, 1)
    saved(tier, "a", whole(1), whole(2))
    saved(tier, "b", whole(2), Content(TailKey("b", 1), 5, 1))
    tier.keep(whole(6))
    found = audit_host(tier, ["a", "b"])
    assert found.consistent
    assert (found.owned, found.num_cached, found.num_free) == ({"a": 2, "b": 1}, 1, 1)
    (problem,) = audit_host(tier, ["a"]).problems[:1]
    assert "kept for b, which is gone" in problem
    tier._free_slots.append(0)
    assert any("host slot 0 is in 2 places" in p for p in audit_host(tier, ["a", "b"]).problems)
    tier._free_slots.clear()
    entry = tier.find(TailKey("b", 1))
    assert entry is not None
    entry.owners.clear()
    assert any("nobody holds it" in p for p in audit_host(tier, ["a", "b"]).problems)
    entry.owners.add("b")
    tier._free_files.clear()
    assert any("is in 0 places" in p for p in audit_host(tier, ["a", "b"]).problems)


# --- anything goes ------------------------------------------------------------------------------

picks = st.integers(0, 63)


@dataclass(eq=False)
class Holder:
    """Somebody who has saved contents, and what they must read back as."""

    name: str
    contents: dict[HostKey, int] = field(default_factory=dict)


class TierMachine(RuleBasedStateMachine):
    """Holders save, restore and let go; a dictionary remembers what each key must read back as.

    Every content is a number in a pool of numbers; slots and files are dictionaries that the moves
    are made on. What a key held when it was saved is what it must give back, for as long as it is
    found.
    """

    @initialize(slots=st.integers(1, 4), files=st.sampled_from([0, 0, 1, 3]), caching=st.booleans())
    def start(self, slots: int, files: int, caching: bool) -> None:
        self.tier = HostTier(slots, files, caching)
        self.memory: dict[int, int] = {}
        self.disk: dict[int, int] = {}
        self.truth: dict[HostKey, int] = {}
        self.holders: list[Holder] = []
        self.number = 0

    def make(self, moves: list[Move], pool: dict[int, int]) -> None:
        for move in moves:
            match move:
                case Save(_, block_id, slot):
                    self.memory[slot] = pool[block_id]
                case Spill(_, slot, file):
                    self.disk[file] = self.memory[slot]
                case Load(_, slot, block_id):
                    pool[block_id] = self.memory[slot]
                case Read(_, file, block_id):
                    pool[block_id] = self.disk[file]
                case Forget(file):
                    del self.disk[file]

    def fresh(self, key: HostKey) -> int:
        """What a block of this key holds: always the same for a hash."""
        self.number += 1
        return self.truth.get(key, self.number) if isinstance(key, bytes) else self.number

    @rule(hashes=st.lists(st.integers(0, 9), max_size=4, unique=True), tail=st.booleans())
    def save(self, hashes: list[int], tail: bool) -> None:
        holder = Holder(f"h{self.number}")
        self.number += 1
        keys: list[HostKey] = [hash_of(number) for number in hashes]
        keys += [TailKey(holder.name, len(keys))] if tail else []
        pool, contents = {}, []
        for block_id, key in enumerate(keys):
            pool[block_id] = self.fresh(key)
            contents.append(Content(key, block_id, BLOCK if isinstance(key, bytes) else 1))
        held = {key for other in self.holders for key in other.contents}
        capacity = self.tier.num_slots + self.tier.num_files
        moves = self.tier.save(holder.name, contents)
        if moves is None:
            assert len(held | set(keys)) > capacity, "refused, yet it would fit"
            return
        assert len(held | set(keys)) <= capacity
        self.make(moves, pool)
        for block_id, key in enumerate(keys):
            self.truth[key] = pool[block_id]
            holder.contents[key] = pool[block_id]
        if keys:
            self.holders.append(holder)

    @rule(number=st.integers(0, 9))
    def keep(self, number: int) -> None:
        key = hash_of(number)
        pool = {0: self.fresh(key)}
        self.make(self.tier.keep(Content(key, 0, BLOCK)), pool)
        self.truth[key] = pool[0]

    @precondition(lambda self: self.holders)
    @rule(number=picks)
    def restore(self, number: int) -> None:
        holder = self.holders[number % len(self.holders)]
        keys = list(holder.contents)
        pool: dict[int, int] = {}
        self.make(self.tier.restore(keys, range(len(keys))), pool)
        assert [pool[place] for place in range(len(keys))] == list(holder.contents.values())

    @precondition(lambda self: self.holders)
    @rule(number=picks)
    def release(self, number: int) -> None:
        holder = self.holders.pop(number % len(self.holders))
        self.make(self.tier.release(holder.name), {})

    @precondition(lambda self: self.holders)
    @rule(number=picks, which=picks)
    def lose(self, number: int, which: int) -> None:
        holder = self.holders[number % len(self.holders)]
        key = list(holder.contents)[which % len(holder.contents)]
        self.make(self.tier.lose(key), {})
        for other in list(self.holders):
            other.contents.pop(key, None)
            if not other.contents:
                self.holders.remove(other)

    @rule()
    def clear(self) -> None:
        self.make(self.tier.clear_cache(), {})

    @invariant()
    def what_is_found_reads_back_as_it_was(self) -> None:
        for entry in self.tier:
            if entry.slot is not None:
                assert entry.file is None and self.memory[entry.slot] == self.truth[entry.key]
            else:
                assert entry.file is not None and self.disk[entry.file] == self.truth[entry.key]

    @invariant()
    def what_is_held_is_here(self) -> None:
        for holder in self.holders:
            for key in holder.contents:
                entry = self.tier.find(key)
                assert entry is not None and holder.name in entry.owners

    @invariant()
    def the_audit_agrees(self) -> None:
        found = audit_host(self.tier, [holder.name for holder in self.holders])
        assert found.consistent, found.problems
        total = sum(found.owned.values()) + found.num_cached + found.num_free
        assert total == self.tier.num_slots + self.tier.num_files
        assert self.disk.keys() == {e.file for e in self.tier if e.file is not None}

    def teardown(self) -> None:
        """When everybody has let go only cached ones are left."""
        if not hasattr(self, "tier"):
            return
        for holder in self.holders:
            self.make(self.tier.release(holder.name), {})
        assert self.tier.caching or not len(self.tier)
        self.make(self.tier.clear_cache(), {})
        assert not len(self.tier) and not self.disk


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
