"""What a decode leg holds from the moment it is granted: blocks for the whole prompt.

Those that are here already are shared; the others are taken. Where the prompt's earlier blocks are
here and less than one block lacks, or the router asked for it, this worker computes the rest. Pure;
does not know how blocks get here otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.kv_cache.block_table import BlockTable, KVCacheManager, Prefix
from kvferry.kv_cache.hashing import HashChain
from kvferry.worker.messages import Reserve


@dataclass(frozen=True, slots=True)
class Reservation:
    """How a prompt would be held.

    Attributes:
        num_tokens: of the prompt, delivered output included.
        prefix: its whole blocks that are here.
        num_computed: leading positions that need neither computing nor moving.
        computes: this worker computes the others.
    """

    num_tokens: int
    prefix: Prefix
    num_computed: int
    computes: bool


def reservation(
    kv: KVCacheManager, hashes: HashChain, request: Reserve, num_available: int
) -> Reservation | None:
    """How the request would be held with so many blocks to take; None: not at all now."""
    prompt = request.spec.kv_prompt()
    whole = Prefix()
    if request.spec.sampling.prompt_logprobs is None:
        whole = kv.whole_blocks(kv.find_prefix(hashes, prompt))
    found = _with(kv, whole, len(prompt), request)
    if whole.block_ids and _lacks(kv, found) > num_available - kv.num_cached(whole):
        # The copy of a last block may be what is too much.
        found = _with(kv, kv.without_last_block(whole), len(prompt), request)
    fits = _lacks(kv, found) <= num_available - kv.num_cached(found.prefix)
    return found if fits else None


def take(kv: KVCacheManager, found: Reservation) -> tuple[BlockTable, list[tuple[int, int]]]:
    """A table with the reservation's blocks, and the copies to make before it is written."""
    table = BlockTable(kv.block_size)
    kv.adopt(table, found.prefix)
    copies = kv.allocate(table, found.num_computed, found.num_tokens)
    assert copies is not None, "what was found to fit does not"
    return table, copies


def _with(kv: KVCacheManager, prefix: Prefix, num_tokens: int, request: Reserve) -> Reservation:
    short = bool(prefix.block_ids) and num_tokens - prefix.num_tokens < kv.block_size
    computes = request.prefill_here or short
    computed = min(prefix.num_tokens, num_tokens - 1)
    return Reservation(num_tokens, prefix, computed, computes)


def _lacks(kv: KVCacheManager, found: Reservation) -> int:
    copies = found.num_computed < found.prefix.num_tokens
    return kv.blocks_for(found.num_tokens) - len(found.prefix.block_ids) + copies
