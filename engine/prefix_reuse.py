"""Which KV a sequence begins with, and for which it waits.

A sequence begins with the longest part of its tokens whose KV is in the pool, less the last token,
which is computed to get logits; where there is a host tier, what follows there is copied back and
counts as the rest of it. Where the next block after that is being computed for another
running sequence, it waits for it instead of computing it too. The wait ends with that sequence's
next steps: a running sequence gets tokens in every step, and one that is preempted, fails or is
removed computes nothing any longer, so that whoever waited takes over.

Pure; knows the pool through its manager, and nothing of lines or budgets.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.engine.offload import Offloading
from kvferry.engine.sequence import SequenceState
from kvferry.kv_cache.block_table import KVCacheManager, Prefix, SealedBlock
from kvferry.kv_cache.hashing import BlockHash
from kvferry.kv_cache.host_tier import HostKey


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a sequence would begin.

    Attributes:
        prefix: KV that it would share.
        num_computed: leading positions that need no computing.
        num_blocks: blocks that the whole sequence lacks then, the copy of a shared block included.
        num_available: blocks that can be taken once it shares the prefix.
        host: contents of the host tier that follow the prefix, of the next blocks in order.
    """

    prefix: Prefix
    num_computed: int
    num_blocks: int
    num_available: int
    host: tuple[HostKey, ...] = ()


class PrefixReuse:
    """See the module."""

    def __init__(self, kv: KVCacheManager, offloading: Offloading | None = None) -> None:
        self._kv = kv
        self._offloading = offloading
        self._computing: dict[BlockHash, SequenceState] = {}

    def find(self, sequence: SequenceState) -> Beginning:
        """How the sequence, whose table is empty, would begin now."""
        prefix = Prefix()
        if _may_reuse(sequence):
            prefix = self._kv.find_prefix(sequence.hashes, sequence.token_ids)
        whole = self._kv.whole_blocks(prefix)
        host, end = self._outside(sequence, whole)
        if end > prefix.num_tokens:
            return self._with(sequence, whole, host, end)
        beginning = self._with(sequence, prefix)
        if prefix.block_ids and beginning.num_blocks > beginning.num_available:
            # The copy may be what is too much. What its source holds is copied back from the host
            # tier if it is there too, or computed: either needs no block more.
            shorter = self._kv.without_last_block(prefix)
            beginning = self._with(sequence, shorter, *self._outside(sequence, shorter))
        return beginning

    def _outside(self, sequence: SequenceState, whole: Prefix) -> tuple[tuple[HostKey, ...], int]:
        """What follows whole blocks in the host tier, and up to which position."""
        if self._offloading is None:
            return (), whole.num_tokens
        return self._offloading.find(sequence, len(whole.block_ids))

    def _with(
        self,
        sequence: SequenceState,
        prefix: Prefix,
        host: tuple[HostKey, ...] = (),
        end: int = 0,
    ) -> Beginning:
        """Of a prefix, and of contents of the host tier after it, up to position ``end``."""
        kv, length = self._kv, len(sequence.token_ids)
        computed = min(max(prefix.num_tokens, end), length - 1)
        copies = len(prefix.block_ids) * kv.block_size > computed
        lacks = kv.blocks_for(length) - len(prefix.block_ids) + copies
        available = kv.pool.num_free - kv.num_cached(prefix)
        return Beginning(prefix, computed, lacks, available, host)

    def must_wait(self, sequence: SequenceState, beginning: Beginning) -> bool:
        """Whether the block after its beginning is being computed for another."""
        if not self._computing or not _may_reuse(sequence):
            return False
        num_blocks = len(beginning.prefix.block_ids) + len(beginning.host)
        end = (num_blocks + 1) * self._kv.block_size
        if end > len(sequence.token_ids) or beginning.num_computed % self._kv.block_size:
            return False
        other = self._computing.get(sequence.hashes.value_at(end, sequence.token_ids))
        return other is not None and other is not sequence

    def begin(self, sequence: SequenceState, beginning: Beginning) -> None:
        """The sequence takes its prefix; what it will compute is noted for others."""
        size = self._kv.block_size
        if self._offloading is not None:
            self._offloading.hold(sequence, beginning.host)
        # A beam that begins amid its search looks for what the search had: that is no reuse.
        counts = not sequence.is_beam or not sequence.max_computed_tokens
        queried = len(sequence.token_ids) if counts else None
        self._kv.adopt(sequence.table, beginning.prefix, queried)
        if self._offloading is not None and beginning.host and counts:
            found = beginning.num_computed - beginning.prefix.num_tokens
            self._offloading.counters.hit_tokens_host += found
        sequence.num_computed_tokens = beginning.num_computed
        whole = beginning.num_computed // size
        ids = beginning.prefix.block_ids[:whole]
        sequence.reused = [SealedBlock(place * size, b, size) for place, b in enumerate(ids)]
        if sequence.first_scheduled_at is None:
            sequence.num_cached_tokens = min(beginning.num_computed, sequence.num_kv_prompt)
        if self._kv.pool.index is None:
            return
        for end in range((whole + 1) * size, len(sequence.token_ids) + 1, size):
            value = sequence.hashes.value_at(end, sequence.token_ids)
            if value not in self._computing:
                self._computing[value] = sequence
                sequence.computing.append(value)

    def restore(self, sequence: SequenceState, beginning: Beginning) -> None:
        """Copy back what follows the prefix, into blocks that the sequence has by now."""
        if self._offloading is not None and beginning.host:
            first = len(beginning.prefix.block_ids)
            block_ids = sequence.table.block_ids[first : first + len(beginning.host)]
            self._offloading.restore(beginning.host, block_ids)

    def stop(self, sequence: SequenceState) -> None:
        """The sequence computes nothing any longer, or all that it was to compute is done."""
        for value in sequence.computing:
            del self._computing[value]
        sequence.computing.clear()
        sequence.reused.clear()


def _may_reuse(sequence: SequenceState) -> bool:
    """Not where every position's logits are wanted."""
    return sequence.spec.sampling.prompt_logprobs is None
