"""What an engine counts, in one place: totals since its start, as plain numbers.

Evictions and copies of the pool are counted where they happen (``BlockPool.num_evictions``,
``KVCacheManager.num_copies``), those of the host tier likewise (``HostTier.num_evictions``,
``num_spilled``).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.engine.sequence import SequenceState


@dataclass(slots=True)
class EngineCounters:
    """Totals.

    Attributes:
        preemptions_recompute: preemptions whose KV was given up, to be computed again.
        preemptions_offload: preemptions whose KV was copied to the host tier.
        recomputed_tokens_preemption: positions computed here again, because they were preempted.
        recomputed_tokens_recovery: positions computed here of requests that had delivered tokens
            before they came, so that their KV was lost with another worker.
        hit_tokens_host: positions of those that began whose KV was in the host tier.
        host_hit_blocks: blocks copied back from the host tier, for whomever.
        host_lost_blocks: blocks that were to be copied from or to a disk and could not be: their
            positions are computed again.
        offloaded_bytes, restored_bytes: copied out of the pool and into it.
    """

    preemptions_recompute: int = 0
    preemptions_offload: int = 0
    recomputed_tokens_preemption: int = 0
    recomputed_tokens_recovery: int = 0
    hit_tokens_host: int = 0
    host_hit_blocks: int = 0
    host_lost_blocks: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0

    @property
    def num_preemptions(self) -> int:
        """Preemptions of either kind."""
        return self.preemptions_recompute + self.preemptions_offload


def count_computed(sequence: SequenceState, count: int, counters: EngineCounters) -> None:
    """Note that a step has computed the sequence's next ``count`` positions."""
    start = sequence.num_computed_tokens
    sequence.num_computed_tokens = end = start + count
    if start < sequence.num_kv_prompt:
        sequence.num_prefill_chunks += 1
    if start < sequence.num_lost:
        first = min(end, sequence.num_lost) - max(start, sequence.max_computed_tokens)
        counters.recomputed_tokens_recovery += max(0, first)
    if start >= sequence.max_computed_tokens:  # the common case: nothing is recomputed
        sequence.max_computed_tokens = end
        return
    again = min(end, sequence.max_computed_tokens) - start
    sequence.recomputed_tokens += again
    counters.recomputed_tokens_preemption += again
    sequence.recomputed_prompt_tokens += max(0, min(start + again, sequence.num_kv_prompt) - start)
    sequence.max_computed_tokens = max(sequence.max_computed_tokens, end)
