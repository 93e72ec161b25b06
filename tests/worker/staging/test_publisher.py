"""Publishing from a device pool: nothing is announced before its copy is done, no slot is given to
another block while a copy into it is queued, and every slot comes back.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.kv_transfer.connector import BlockRef
from kvferry.kv_transfer.digest import block_digest
from kvferry.kv_transfer.local import LocalFabric
from tests.worker.staging.making import NUM_BLOCKS, Staged, content, make_staged


def test_a_block_is_published_when_the_event_behind_its_copy_says_so() -> None:
    made = make_staged(LocalFabric(), "own")
    made.fill(5)
    made.publisher.offer(5)
    for _ in range(3):
        assert made.publisher.poll() == 0
        assert made.publisher.published(5) is None and made.publisher.num_pending == 1
    made.device.run_all()
    assert made.publisher.poll() == 1 and made.publisher.num_pending == 0
    published = made.publisher.published(5)
    assert published is not None
    data = content(5, 1, made.memory.block_bytes)
    assert made.read_slot(published.ref) == data
    assert published.digest == block_digest(data)


def test_blocks_wait_for_slots_in_order_and_get_those_that_come_back() -> None:
    made = make_staged(LocalFabric(), "own", num_slots=2)
    for block_id in range(5):
        made.fill(block_id)
        made.publisher.offer(block_id)

    def published() -> list[int]:
        made.device.run_all()
        made.publisher.poll()
        return [b for b in range(5) if b in offered and made.publisher.published(b) is not None]

    offered = set(range(5))
    assert published() == [0, 1]
    assert published() == [0, 1], "there is no room for more"
    for first in range(3):
        made.publisher.withdraw([first])
        offered.discard(first)
        published()
        assert published() == [first + 1, first + 2]


def test_a_slot_of_a_withdrawn_block_is_nobody_s_until_its_copy_is_done() -> None:
    made = make_staged(LocalFabric(), "own", num_slots=1)
    made.fill(0)
    made.fill(1)
    made.publisher.offer(0)
    made.publisher.withdraw([0])
    made.publisher.offer(1)
    made.publisher.poll()
    assert made.device.num_copies == 1, "the slot is still being written for the first"
    made.device.run_all()
    made.publisher.poll()
    assert made.device.num_copies == 2


def test_names_of_a_slot_s_former_lives_are_stale_before_it_is_written() -> None:
    made = make_staged(LocalFabric(), "own", num_slots=1)
    made.fill(0)
    made.fill(1)
    made.publisher.offer(0)
    made.device.run_all()
    made.publisher.poll()
    first = made.publisher.published(0)
    assert first is not None
    words: list[int] = []
    made.device.on_copy = lambda target, source: words.append(
        int(made.memory.generations[first.ref.block_id])
    )
    made.publisher.withdraw([0])
    made.publisher.offer(1)
    assert words == [first.ref.generation + 1], "raised before the copy was queued"


def test_a_block_rewritten_while_it_is_offered_is_noticed_and_not_published() -> None:
    made = make_staged(LocalFabric(), "own")
    made.fill(0)
    made.publisher.offer(0)
    made.fill(0)
    made.device.run_all()
    with pytest.raises(AssertionError, match="block 0 was rewritten while it was offered"):
        made.publisher.poll()


class PublisherMachine(RuleBasedStateMachine):
    """Blocks are filled, offered by several, published, read and withdrawn, in every order, while
    the device does its work when it likes.
    """

    made: Staged

    @initialize(num_slots=st.integers(1, 3))
    def begin(self, num_slots: int) -> None:
        self.made = make_staged(LocalFabric(), "own", num_slots)
        self.num_slots = num_slots
        self.offers: Counter[int] = Counter()
        self.order: list[int] = []
        self.last_word: dict[int, int] = {}
        self.known: dict[int, BlockRef] = {}
        for block_id in range(NUM_BLOCKS):
            self.made.fill(block_id)
        self.made.device.on_copy = self.copied

    def copied(self, target: object, source: object) -> None:
        """A slot is written: under a word that no copy into it has had."""
        slots = self.made.memory.generations[: self.num_slots]
        raised = [s for s in range(self.num_slots) if int(slots[s]) > self.last_word.get(s, 0)]
        assert len(raised) == 1, "one slot begins another life with each copy"
        self.last_word[raised[0]] = int(slots[raised[0]])

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1))
    def offer(self, block_id: int) -> None:
        if not self.offers[block_id]:
            self.order.append(block_id)
        self.offers[block_id] += 1
        self.made.publisher.offer(block_id)

    @precondition(lambda self: any(self.offers.values()))
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.offers.elements())))
        self.offers[block_id] -= 1
        self.made.publisher.withdraw([block_id])
        if not self.offers[block_id]:
            self.order.remove(block_id)
            self.known.pop(block_id, None)

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1))
    def rewrite(self, block_id: int) -> None:
        """A block that nobody is offered begins another life, even if a copy of it is queued."""
        if not self.offers[block_id]:
            self.made.fill(block_id)

    @rule()
    def poll(self) -> None:
        self.made.publisher.poll()

    @rule(stream=st.integers(0, 1))
    def progress(self, stream: int) -> None:
        streams = self.made.device.streams
        if streams[stream].queue:
            streams[stream].step()

    @invariant()
    def published_is_right_and_stays(self) -> None:
        if not hasattr(self, "offers"):
            return
        for block_id in self.order:
            published = self.made.publisher.published(block_id)
            if published is None:
                assert block_id not in self.known, "it was readable before"
                continue
            assert self.known.setdefault(block_id, published.ref) == published.ref
            slot = self.made.memory.blocks[published.ref.block_id]
            assert not self.made.device.is_pending(slot)
            generation = self.made.pool.generation(block_id)
            data = content(block_id, generation, self.made.memory.block_bytes)
            assert self.made.read_slot(published.ref) == data
            assert published.digest == block_digest(data)
        assert len(self.known) <= self.num_slots

    def teardown(self) -> None:
        """Whoever waits gets a slot as soon as there is one, and all slots come back."""
        if not hasattr(self, "offers"):
            return
        publisher = self.made.publisher
        for _ in range(2 * NUM_BLOCKS):
            self.made.device.run_all()
            publisher.poll()
        readable = [b for b in self.order if publisher.published(b) is not None]
        assert len(readable) == min(len(self.order), self.num_slots)
        publisher.withdraw(list(self.offers.elements()))
        self.made.device.run_all()
        assert publisher.num_pending == 0
        assert publisher._slots.num_free == self.num_slots


PublisherMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPublisherMachine = PublisherMachine.TestCase
