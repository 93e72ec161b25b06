"""A leg that searches beams: each beam a sequence of the engine, all of them a token at a time.

A beam that has computed is parked until all have; then the search chooses. Of the beams that go on
from one, the first keeps its sequence and table; each other begins with a fork: full blocks shared,
the partial one copied. Where no block is free for the copy, or the table has been taken from the
parked beam, the new one begins with what the prefix index finds and computes the rest again.
Nothing is reported before the search is over.
"""

from __future__ import annotations

from itertools import count

from kvferry.engine.batch import TokenLogprobs
from kvferry.engine.beam_search import Beam, Continuation, search_of
from kvferry.engine.engine import Engine, Fork
from kvferry.engine.request import Attempt, RequestSpec
from kvferry.engine.sequence import SequenceOwner, SequenceState
from kvferry.kv_cache.block_table import BlockTable


class BeamGroup:
    """See the module.

    Args:
        engine: computes the beams.
        spec: the request.
        attempt: which try of it.
        owner: hears of the sequences' steps, and tells ``take`` of each.
        root: the beam of no tokens, whose prompt is computed or is being computed.

    Attributes:
        sequences: what computes the beams, in their order.
        num_preemptions, recomputed_prompt_tokens: of beams that have been given up.
    """

    def __init__(
        self,
        engine: Engine,
        spec: RequestSpec,
        attempt: Attempt,
        owner: SequenceOwner,
        root: SequenceState,
    ) -> None:
        self.sequences = [root]
        self.num_preemptions = 0
        self.recomputed_prompt_tokens = 0
        self._engine = engine
        self._spec = spec
        self._attempt = attempt
        self._owner = owner
        self._search = search_of(spec)
        self._found: dict[SequenceState, TokenLogprobs] = {}
        self._numbers = count(1)

    def take(self, sequence: SequenceState, logprobs: TokenLogprobs) -> Beam | None:
        """A beam has computed; the best output, once the search is over."""
        self._found[sequence] = logprobs
        if len(self._found) < len(self.sequences):
            return None
        found = [self._found[each] for each in self.sequences]
        self._found.clear()
        self._search.advance(
            [list(map(Continuation, each.top_ids, each.top_logprobs)) for each in found]
        )
        if self._search.is_over:
            self.stop()
            return self._search.hypotheses[0]
        self._go_on(self._search.beams)
        return None

    def stop(self) -> None:
        """Give everything up."""
        for sequence in self.sequences:
            self._engine.remove(sequence)

    def _go_on(self, beams: list[Beam]) -> None:
        """Compute the chosen beams: forks first, while what they begin with is not written."""
        parents = self.sequences
        first: dict[int, int] = {}
        for place, beam in enumerate(beams):
            first.setdefault(beam.parent, place)
        for place, parent in enumerate(parents):
            if place not in first:
                self._give_up(parent)
        begun = [place for place, beam in enumerate(beams) if first[beam.parent] != place]
        tables = self._engine.fork([self._fork(parents[beams[place].parent]) for place in begun])
        self.sequences = [parents[beam.parent] for beam in beams]
        for place, table in zip(begun, tables, strict=True):
            self.sequences[place] = self._branch_off(self.sequences[place], beams[place], table)
        for number, place in first.items():
            self._engine.go_on(parents[number], beams[place].token_ids[-1])

    def _give_up(self, parent: SequenceState) -> None:
        """Nothing goes on from it: its blocks may be what the others need."""
        self.num_preemptions += parent.num_preemptions
        self.recomputed_prompt_tokens += parent.recomputed_prompt_tokens
        self._engine.remove(parent)

    def _branch_off(self, parent: SequenceState, beam: Beam, table: BlockTable) -> SequenceState:
        return self._engine.new_sequence(
            self._spec,
            self._attempt,
            self._owner,
            table=table,
            hashes=parent.hashes.copy(),
            output_token_ids=beam.token_ids,
            num_computed_tokens=parent.num_computed_tokens if table.block_ids else 0,
            beam=next(self._numbers),
            parent=parent,
        )

    def _fork(self, parent: SequenceState) -> Fork:
        """All that the parked parent has; nothing where no block is free for a copy."""
        num_tokens = parent.num_computed_tokens
        if num_tokens % self._engine.block_size == 0:
            return Fork(parent.table, num_tokens, None)
        if not self._engine.pool.num_free:
            return Fork(parent.table, 0, None)
        (tail,) = self._engine.pool.allocate(1)
        return Fork(parent.table, num_tokens, tail)
