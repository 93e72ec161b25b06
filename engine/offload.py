"""Off-loading: the KV of preempted sequences waits in the host tier, and comes back from there.

Puts together the tier, which decides where contents lie, the costs, which decide whether copying
is worth it, and a mover, which copies. What is decided while a step is planned is gathered and
handed to the mover at the step's boundary, in order, before anything is written to the pool. A copy
that a disk does not give back is a miss: its key is forgotten, and whoever was to have the block
computes it again.

A sequence holds its contents here from its preemption until the first step after they are back in
the pool; so one that is stopped between the two can begin again. Does not know lines or budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol

from kvferry.engine.costs import Costs, MeasuredCosts
from kvferry.engine.counters import EngineCounters
from kvferry.engine.sequence import SequenceState
from kvferry.kv_cache.block_pool import KVCacheBlock
from kvferry.kv_cache.host_tier import (
    Content,
    HostKey,
    HostTier,
    Load,
    Move,
    Read,
    Save,
    Spill,
    TailKey,
)


class BlockMover(Protocol):
    """Copies blocks between the pool, the host's memory and a disk."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        ...

    def move(self, moves: Sequence[Move]) -> list[Move]:
        """Make the moves in order; returns those that failed, which only a disk's can."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class Offloading:
    """See the module.

    Args:
        tier: decides where contents lie.
        mover: copies them.
        block_size: positions per block.
        clock: seconds, monotonic.
        costs: decides whether to copy; None: by what is measured.
    """

    def __init__(
        self,
        tier: HostTier,
        mover: BlockMover,
        block_size: int,
        clock: Callable[[], float],
        costs: Costs | None = None,
    ) -> None:
        self.tier = tier
        self.costs: Costs = costs if costs is not None else MeasuredCosts()
        self.counters = EngineCounters()
        self._mover = mover
        self._block_size = block_size
        self._clock = clock
        self._pending: list[Move] = []
        self._lost: set[int] = set()

    # --- what the scheduler decides -----------------------------------------------------------

    def save(self, sequence: SequenceState) -> bool:
        """Keep a running sequence's KV, if that costs less than computing it again and fits.

        Call before its table is freed. If not, nothing of it is kept here.
        """
        num_tokens, key = sequence.num_computed_tokens, sequence.key
        contents = self._contents(sequence)
        size = self._mover.block_bytes
        bytes_out = self.tier.num_missing(contents) * size
        if contents and self.costs.prefers_offload(num_tokens, bytes_out, len(contents) * size):
            moves = self.tier.save(key, contents)
            if moves is not None:
                self._pending.extend(moves)
                sequence.num_swapped_tokens = num_tokens
                return True
        self.release(sequence)
        return False

    def find(self, sequence: SequenceState, num_blocks: int) -> tuple[tuple[HostKey, ...], int]:
        """What follows the sequence's first blocks here: keys, and the positions up to its end."""
        end = num_blocks * self._block_size
        if not len(self.tier):
            return (), end
        keys: list[HostKey] = []
        # Whoever wants every position's logits takes nothing but what it had computed itself.
        looks = sequence.spec.sampling.prompt_logprobs is not None
        last = sequence.num_swapped_tokens if looks else len(sequence.token_ids)
        while end + self._block_size <= last:
            value = sequence.hashes.value_at(end + self._block_size, sequence.token_ids)
            if self.tier.find(value) is None:
                break
            keys.append(value)
            end += self._block_size
        tail = TailKey(sequence.key, num_blocks + len(keys))
        entry = self.tier.find(tail) if sequence.num_swapped_tokens else None
        if entry is not None:
            keys.append(tail)
            end += entry.num_tokens
        return tuple(keys), end

    def hold(self, sequence: SequenceState, keys: Sequence[HostKey]) -> None:
        """What was found stays until the sequence has computed with it."""
        self.tier.hold(sequence.key, keys)

    def has_swapped(self, sequence: SequenceState) -> bool:
        """Whether KV of a sequence that has to wait waits here. If not, nothing is held for it."""
        if sequence.num_swapped_tokens and self.tier.holds(sequence.key):
            return True
        self.release(sequence)
        return False

    def restore(self, keys: Sequence[HostKey], block_ids: Sequence[int]) -> None:
        """Copy contents that were found into blocks of the pool. Making room for them may have
        shown that one cannot be had (a file was to be read or written): its block is lost.
        """
        here = {key: b for key, b in zip(keys, block_ids, strict=True) if self.tier.find(key)}
        self._lost.update(set(block_ids) - set(here.values()))
        self._pending.extend(self.tier.restore(list(here), list(here.values())))

    def release(self, sequence: SequenceState) -> None:
        """The sequence needs nothing of what it holds here. Nothing if it holds nothing."""
        if sequence.num_swapped_tokens or self.tier.holds(sequence.key):
            sequence.num_swapped_tokens = 0
            self._pending.extend(self.tier.release(sequence.key))

    def keep(self, block: KVCacheBlock) -> None:
        """The pool is about to give up a cached block: keep it, if that is worth it."""
        whole = block.num_tokens == self._block_size
        if block.block_hash is None or not whole or not self.tier.caching:
            return
        size = self._mover.block_bytes
        known = self.tier.find(block.block_hash) is not None
        if known or self.costs.prefers_offload(self._block_size, size, size):
            content = Content(block.block_hash, block.block_id, block.num_tokens)
            self._pending.extend(self.tier.keep(content))

    def _contents(self, sequence: SequenceState) -> list[Content]:
        """What the sequence's computed positions are kept under, and where they are now."""
        size, computed = self._block_size, sequence.num_computed_tokens
        not_copied = {target: source for source, target in sequence.pending_copies}
        contents = []
        for index in range(-(-computed // size)):
            filled = min(size, computed - index * size)
            end = index * size + size
            key: HostKey = (
                sequence.hashes.value_at(end, sequence.token_ids)
                if filled == size
                else TailKey(sequence.key, index)
            )
            block_id = sequence.table.block_ids[index]
            contents.append(Content(key, not_copied.get(block_id, block_id), filled))
        return contents

    # --- what is done at the step's boundary ----------------------------------------------------

    def flush(self) -> None:
        """Make the moves that were decided."""
        while self._pending:
            pending, self._pending = self._pending, []
            for inward, run in groupby(pending, key=lambda move: isinstance(move, Load | Read)):
                self._make(list(run), inward)

    def take_lost(self) -> set[int]:
        """Blocks whose content could not be had, since last asked."""
        lost, self._lost = self._lost, set()
        return lost

    def close(self) -> None:
        """Give memory and files back."""
        self._mover.close()

    def _make(self, moves: list[Move], inward: bool) -> None:
        started = self._clock()
        failed = self._mover.move(moves)
        took = self._clock() - started
        copied = sum(isinstance(m, Load | Read | Save) for m in moves)
        copied -= sum(isinstance(m, Read) for m in failed)
        num_bytes = copied * self._mover.block_bytes
        if inward:
            self.costs.restored(num_bytes, took)
            self.counters.restored_bytes += num_bytes
            self.counters.host_hit_blocks += copied
        else:
            self.costs.offloaded(num_bytes, took)
            self.counters.offloaded_bytes += num_bytes
        for move in failed:
            self._miss(move)

    def _miss(self, move: Move) -> None:
        assert isinstance(move, Read | Spill), f"{move} cannot fail"
        self.counters.host_lost_blocks += 1
        if isinstance(move, Read):
            self._lost.add(move.block_id)
        entry = self.tier.find(move.key)
        if entry is not None and entry.file == move.file:
            self._pending.extend(self.tier.lose(move.key))
