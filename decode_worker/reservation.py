"""What a decode leg holds from the moment it is granted: blocks for the whole prompt.

Those that are here already are shared; the others are taken. Where the prompt's earlier blocks are
here and less than one block lacks, or the router asked for it, this worker computes the rest. Pure;
does not know how blocks get here otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.decode_worker.branching import num_tails
from kvferry.engine.request import RequestSpec
from kvferry.kv_cache.block_table import BlockTable, KVCacheManager, Prefix
from kvferry.kv_cache.hashing import HashChain
from kvferry.worker.messages import FailureCause, Reserve


@dataclass(frozen=True, slots=True)
class Reservation:
    """How a prompt would be held.

    Attributes:
        num_tokens: of the prompt, delivered output included.
        prefix: its whole blocks that are here.
        num_computed: leading positions that need neither computing nor moving.
        computes: this worker computes the others.
        num_tails: blocks for branches' own copies of a partial last block.
    """

    num_tokens: int
    prefix: Prefix
    num_computed: int
    computes: bool
    num_tails: int


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


def never_fits(kv: KVCacheManager, spec: RequestSpec) -> tuple[FailureCause, str] | None:
    """Why no pool of this size ever holds the request; None if it does.

    Branches beyond the first can wait for it; all of them at once hold the prompt. Where blocks are
    quarantined another worker may have enough.
    """
    most = min(len(spec.prompt_token_ids) + spec.sampling.max_tokens - 1, spec.max_model_len)
    tails = num_tails(spec, kv.block_size, computes=True)
    needed = max(kv.blocks_for(most), kv.blocks_for(len(spec.kv_prompt())) + tails)
    if needed <= kv.pool.num_usable:
        return None
    branches = f" in {spec.num_branches} branches" if spec.num_branches > 1 else ""
    why = f"{most} positions{branches} need {needed} blocks, this worker has {kv.pool.num_usable}"
    return FailureCause.SHAPE if needed > kv.pool.num_blocks else FailureCause.STALLED, why


def take(
    kv: KVCacheManager, found: Reservation
) -> tuple[BlockTable, list[tuple[int, int]], list[int]]:
    """A table with the reservation's blocks, the copies to make before it is written, and tails."""
    table = BlockTable(kv.block_size)
    kv.adopt(table, found.prefix, found.num_tokens)
    copies = kv.allocate(table, found.num_computed, found.num_tokens)
    assert copies is not None, "what was found to fit does not"
    return table, copies, kv.pool.allocate(found.num_tails)


def _with(kv: KVCacheManager, prefix: Prefix, num_tokens: int, request: Reserve) -> Reservation:
    short = bool(prefix.block_ids) and num_tokens - prefix.num_tokens < kv.block_size
    computes = request.prefill_here or short
    computed = min(prefix.num_tokens, num_tokens - 1)
    tails = num_tails(request.spec, kv.block_size, computes=computes)
    return Reservation(num_tokens, prefix, computed, computes, tails)


def _lacks(kv: KVCacheManager, found: Reservation) -> int:
    copies = found.num_computed < found.prefix.num_tokens
    lacks = kv.blocks_for(found.num_tokens) - len(found.prefix.block_ids) + copies
    return lacks + found.num_tails
