"""How a leg's branches begin: who gets which blocks of the prompt that they share.

Full blocks are shared by all. The prompt's last, partial block is written by each: the first branch
goes on in the block that was received, the others in copies, whose blocks (``tails``) are reserved
with the prompt's. Where the prompt is computed here for several, one sequence (the **stem**)
computes it and samples every branch's first token, and all begin as forks of it.
"""

from __future__ import annotations

from kvferry.decode_worker.beams import BeamGroup
from kvferry.decode_worker.leg import DecodeLeg, LegBranch
from kvferry.engine.beam_search import searches_beams
from kvferry.engine.engine import Engine, Fork
from kvferry.engine.request import RequestSpec
from kvferry.engine.sequence import SequenceOwner, SequenceState
from kvferry.kv_cache.block_table import BlockTable


def num_tails(spec: RequestSpec, block_size: int, *, computes: bool) -> int:
    """Blocks that the branches need for their own copies of a partial block."""
    if spec.num_branches == 1 or len(spec.kv_prompt()) % block_size == 0:
        return 0
    return spec.num_branches - (not computes)  # the stem keeps its own


def begin_computing(engine: Engine, leg: DecodeLeg, owner: SequenceOwner, computed: int) -> None:
    """Begin to compute the prompt, of which ``computed`` positions are in the leg's table."""
    if searches_beams(leg.request.spec):
        begin_search(engine, leg, owner, computed)
        return
    several = len(leg.branches) > 1
    sequence = engine.new_sequence(
        leg.request.spec,
        leg.request.attempt,
        owner,
        table=leg.table,
        hashes=leg.hashes,
        num_computed_tokens=computed,
        num_cached_tokens=computed,
        copies=leg.copies,
        prefill_only=several,
    )
    leg.table = None
    if several:
        leg.stem = sequence
    else:
        leg.branches[0].sequence = sequence


def begin_search(
    engine: Engine, leg: DecodeLeg, owner: SequenceOwner, computed: int
) -> SequenceState:
    """Begin a beam search with the leg's table, which holds ``computed`` positions: its root."""
    spec, attempt = leg.request.spec, leg.request.attempt
    root = engine.new_sequence(
        spec,
        attempt,
        owner,
        table=leg.table,
        hashes=leg.hashes,
        num_computed_tokens=computed,
        num_cached_tokens=computed if leg.computes else 0,
        copies=leg.copies,
        beam=0,
    )
    leg.beams = BeamGroup(engine, spec, attempt, owner, root)
    leg.table = None
    return root


def begin_decoding(
    engine: Engine, leg: DecodeLeg, owner: SequenceOwner, going_on: list[LegBranch]
) -> None:
    """Begin to decode: every position of the prompt is in the leg's sealed table."""
    assert leg.table is not None
    table, num_tokens = leg.table, leg.num_kv_prompt
    tables = _forks(engine, leg, table, len(going_on[1:]))
    for branch, own in zip(going_on, [table, *tables], strict=False):
        branch.sequence = _sequence(engine, leg, owner, branch, own, num_tokens)
    if not going_on:
        engine.kv.free(table)
    _let_go(engine, leg)


def branch_off(
    engine: Engine, leg: DecodeLeg, owner: SequenceOwner, going_on: list[LegBranch]
) -> None:
    """The stem has computed the prompt and ends; the branches go on from it."""
    assert leg.stem is not None
    stem = leg.stem
    tables = _forks(engine, leg, stem.table, len(going_on))
    engine.remove(stem)
    for branch, table in zip(going_on, tables, strict=True):
        branch.sequence = _sequence(engine, leg, owner, branch, table, leg.num_kv_prompt)
    _let_go(engine, leg)


def _forks(engine: Engine, leg: DecodeLeg, table: BlockTable, count: int) -> list[BlockTable]:
    """Tables with the prompt; if its last block is partial, each in a tail of its own."""
    partial = leg.num_kv_prompt % engine.block_size
    tails = [leg.tails.pop() if partial else None for _ in range(count)]
    return engine.fork([Fork(table, leg.num_kv_prompt, tail) for tail in tails])


def _sequence(
    engine: Engine,
    leg: DecodeLeg,
    owner: SequenceOwner,
    branch: LegBranch,
    table: BlockTable,
    num_computed: int,
) -> SequenceState:
    spec = leg.request.spec
    known = len(spec.kv_prompt()) - len(spec.prompt_token_ids)
    return engine.new_sequence(
        spec,
        leg.request.attempt,
        owner,
        table=table,
        hashes=leg.hashes.copy(),  # a chain is of one sequence's tokens
        output_token_ids=tuple(branch.output[known:]),
        num_computed_tokens=num_computed,
        branches=(branch.number,),
    )


def _let_go(engine: Engine, leg: DecodeLeg) -> None:
    """The blocks are the sequences' from now on; tails of branches that have ended are freed."""
    leg.table = None
    tails, leg.tails = leg.tails, []
    engine.pool.release(tails)
