"""The decode role: reserves blocks, pulls the prompt into them, decodes, reports tokens.

Owns the legs and the line of those that found the pool FULL. Freed blocks go first to the
engine's own preempted sequences, then are saved up for the first FULL request in rank: nobody
overtakes it, so a large request is not starved by small ones. Does not know where prompts are
computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvferry.decode_worker import branching
from kvferry.decode_worker.leg import DecodeLeg, LegBranch
from kvferry.decode_worker.puller import Puller, acknowledgement
from kvferry.decode_worker.reservation import never_fits, reservation, take
from kvferry.decode_worker.step_timer import StepTimer
from kvferry.engine.batch import TokenLogprobs
from kvferry.engine.beam_search import searches_beams
from kvferry.engine.engine import ForkFailed
from kvferry.engine.first_tokens import first_tokens
from kvferry.engine.request import Attempt, RequestId
from kvferry.engine.sequence import SequenceFailure, SequenceProgress, SequenceState
from kvferry.kv_cache.audit import Owner, OwnerKind
from kvferry.worker import messages as m
from kvferry.worker.messages import (
    Envelope,
    FailureCause,
    Leg,
    LegState,
    LoadReport,
    NodeRef,
    Role,
)
from kvferry.worker.wanted import EndedAttempts, WantedMark
from kvferry.worker.worker import Worker

LegKey = tuple[RequestId, Attempt]


class DecodeRole:
    """See the module. Invariant: a RESERVED or RUNNING leg holds every block of its prompt."""

    role = Role.DECODE

    def __init__(self, worker: Worker) -> None:
        self.legs: dict[LegKey, DecodeLeg] = {}
        self.puller = Puller(worker, self)
        self._worker = worker
        self._engine = worker.engine
        self._ended = EndedAttempts()
        self._outgoing: dict[NodeRef, list[tuple[DecodeLeg, m.TokenEvent]]] = {}
        self._next_lists = 0.0
        self._timer = StepTimer()

    # --- messages ---------------------------------------------------------------------------

    def handle(self, envelope: Envelope, now: float) -> bool:
        """Take a message; False if it does not concern this role."""
        match envelope.body:
            case m.Reserve() as request:
                self._reserve(request, envelope, now)
            case m.CancelLeg(request_id, attempt, Leg.DECODE, number):
                leg = self.legs.get((request_id, attempt))
                mine = leg is not None and leg.router == envelope.sender
                if number is None:
                    self._ended.add(request_id, attempt)
                    if leg is not None and mine:
                        self._drop(leg)
                elif leg is not None and mine and (branch := leg.branch(number)) is not None:
                    self._drop_branch(leg, branch)
            case m.WantedList(items):
                self._judge_router(envelope, items, now)
            case m.Announce(request_id, attempt):
                self._announced(envelope, self.legs.get((request_id, attempt)), now)
            case m.HandOffRecord(request_id, attempt, hand_off):
                leg = self.legs.get((request_id, attempt))
                if leg is not None and leg.router == envelope.sender:
                    self._hand_off_from_router(leg, hand_off, now)
            case m.LeaseEnded(request_id, attempt):
                leg = self.legs.get((request_id, attempt))
                if leg is not None and leg.pull.source == envelope.sender:
                    self._source_gone(leg, FailureCause.STALLED, "the source ended its lease")
            case m.Replay(request_id, attempt, from_index, number):
                leg = self.legs.get((request_id, attempt))
                if leg is not None and leg.router == envelope.sender:
                    if (branch := leg.branch(number)) is not None:
                        self._report(leg, branch, from_index)
                    self.flush(now)
            case _:
                return False
        return True

    def _reserve(self, request: m.Reserve, envelope: Envelope, now: float) -> None:
        spec, attempt = request.spec, request.attempt
        key = (spec.request_id, attempt)
        if key in self.legs:
            leg = self.legs[key]
            leg.wanted.since = envelope.seq
            self._reply(leg)
            return
        newer = any(r == spec.request_id and a > attempt for r, a in self.legs)
        if newer or self._ended.covers(*key):
            self._fail(envelope.sender, key, FailureCause.ENDED, "this attempt has ended here")
            return
        for old in [leg for (r, _), leg in self.legs.items() if r == spec.request_id]:
            self._drop(old)
        if refusal := never_fits(self._engine.kv, spec):
            self._fail(envelope.sender, key, *refusal)
            return
        leg = DecodeLeg(
            request,
            envelope.sender,
            WantedMark(envelope.seq),
            self._engine.hash_chain(spec),
            now,
        )
        self.legs[key] = leg
        self._grant_in_order()
        if leg.state is LegState.FULL:
            self._reply(leg)

    def _grant_in_order(self) -> None:
        """Give free blocks to FULL legs, oldest first, while the first in line fits."""
        if self._engine.scheduler.has_preempted:
            return
        full = [leg for leg in self.legs.values() if leg.state is LegState.FULL]
        ageing = self._engine.scheduler.config.ageing
        for leg in sorted(full, key=lambda leg: leg.rank(ageing)):
            idle = self._engine.pool.num_free == self._engine.pool.num_usable
            spare = 0 if idle else self._engine.scheduler.watermark_blocks
            found = reservation(
                self._engine.kv, leg.hashes, leg.request, self._engine.pool.num_free - spare
            )
            if found is None:
                if refusal := never_fits(self._engine.kv, leg.request.spec):  # blocks were lost
                    self._fail_leg(leg, *refusal)
                return
            leg.table, leg.copies, leg.tails = take(self._engine.kv, found)
            leg.computes, leg.state = found.computes, LegState.RESERVED
            leg.pull.begin_at(found.num_computed, len(found.prefix.block_ids))
            self._reply(leg)
            if leg.computes:
                leg.state = LegState.RUNNING
                branching.begin_computing(self._engine, leg, self, found.num_computed)

    def _reply(self, leg: DecodeLeg) -> None:
        outcome = m.ReserveOutcome.COMPUTING if leg.computes else m.ReserveOutcome.GRANTED
        if leg.state is LegState.FULL:
            outcome = m.ReserveOutcome.FULL
        self._worker.send(
            leg.router,
            m.ReserveReply(
                leg.request.spec.request_id,
                leg.request.attempt,
                outcome,
                leg.pull.verified_until,
            ),
        )

    def _announced(self, envelope: Envelope, leg: DecodeLeg | None, now: float) -> None:
        announce = envelope.body
        assert isinstance(announce, m.Announce)
        if leg is None or leg.state is LegState.FULL or leg.computes:
            refused = m.PullRefused(announce.request_id, announce.attempt)
            self._worker.send(envelope.sender, refused)
        else:
            self.puller.announced(leg, envelope, now)

    def _judge_router(
        self, envelope: Envelope, items: tuple[m.WantedItem, ...], now: float
    ) -> None:
        wanted = {(i.request_id, i.attempt): i for i in items if i.leg is Leg.DECODE}
        for key, leg in list(self.legs.items()):
            if leg.router != envelope.sender:
                continue
            item = wanted.get(key)
            if leg.wanted.judge(item is not None, envelope.seq):
                self._drop(leg)
            elif item is not None:
                self._heal(leg, dict(item.received), newer=leg.last_event_seq > envelope.heard)
        self.flush(now)

    def _heal(self, leg: DecodeLeg, received: dict[int, int], *, newer: bool) -> None:
        """Let go of branches that are wanted no longer, repeat what others have lost."""
        for branch in leg.branches:
            known = received.get(branch.number)
            if known is None:
                self._drop_branch(leg, branch)
            elif not newer:
                unheard_finish = branch.finish is not None
                if known < branch.reported or unheard_finish:
                    self._report(leg, branch, known)

    # --- pulling and starting ---------------------------------------------------------------

    def pull_advanced(self, leg: DecodeLeg, now: float) -> None:
        """Start decoding when every block is verified and the hand-off is here."""
        if leg.state is not LegState.RESERVED or leg.hand_off is None:
            return
        if leg.pull.verified_until < leg.hand_off.num_computed_tokens:
            return
        hand_off = leg.hand_off
        if problem := leg.misfit(hand_off):
            self._fail_leg(leg, FailureCause.TRANSFER, problem)
            return
        assert leg.table is not None
        self.puller.completed(leg)
        leg.ready_at, leg.state = now, LegState.RUNNING
        leg.table.num_sealed = len(leg.table.block_ids)
        try:
            self._begin(leg, hand_off)
        except ForkFailed as error:
            self._fail_leg(leg, FailureCause.STEP, str(error))

    def _begin(self, leg: DecodeLeg, hand_off: m.HandOff) -> None:
        """Decode what the hand-off begins."""
        if searches_beams(leg.request.spec):
            root = branching.begin_search(self._engine, leg, self, leg.num_kv_prompt)
            self._report(leg, leg.branches[0], 0)  # no token, but its prefill worker may go
            self._search(leg, root, hand_off.logprobs[0])
            return
        going_on = leg.take_first(hand_off.token_ids, hand_off.logprobs)
        branching.begin_decoding(self._engine, leg, self, going_on)
        for branch in leg.branches:
            if branch.finish is not None:
                self._report(leg, branch, branch.reported)
        leg.note_end()

    def pull_failed(self, leg: DecodeLeg, cause: FailureCause, message: str) -> None:
        """The blocks cannot be had: the leg fails, nothing unverified is used."""
        self._fail_leg(leg, cause, message)

    def _hand_off_from_router(self, leg: DecodeLeg, hand_off: m.HandOff, now: float) -> None:
        """The prefill worker is dead: start with what is here, else the leg has failed."""
        if leg.hand_off is None and hand_off.num_computed_tokens == leg.num_kv_prompt:
            leg.hand_off = hand_off
            leg.pull.hand_off_received(now)
        self.pull_advanced(leg, now)
        if leg.pull.source not in self._worker.members:
            self._source_gone(leg, FailureCause.SOURCE_LOST, "the source died with blocks unread")

    # --- the engine -------------------------------------------------------------------------

    def on_progress(self, progress: SequenceProgress, now: float) -> None:
        """Note a new token; it leaves with the others of this step."""
        sequence = progress.sequence
        leg = self.legs[(sequence.key.request_id, sequence.key.attempt)]
        if progress.token_id is None:
            return
        leg.time_first(sequence, self._engine.step_started_at, now)
        self._timer.note(progress.num_computed, self._engine.step_started_at, now)
        if sequence is leg.stem:
            branching.branch_off(self._engine, leg, self, leg.take_first(*first_tokens(progress)))
            for each in leg.branches:
                self._report(leg, each, each.reported)
            leg.note_end()
            return
        if leg.beams is not None:
            self._search(leg, sequence, progress.logprobs)
            return
        branch = leg.branch(sequence.key.branch)
        assert branch is not None
        branch.take(progress.token_id, progress.logprobs)
        branch.finish = progress.finish
        leg.note_end()
        self._report(leg, branch, branch.reported)

    def _search(self, leg: DecodeLeg, beam: SequenceState, logprobs: TokenLogprobs | None) -> None:
        """A beam has computed; report the output once the search is over."""
        assert leg.beams is not None and logprobs is not None
        best = leg.beams.take(beam, logprobs)
        if best is not None:
            leg.conclude(best)
            self._report(leg, leg.branches[0], 0)

    def on_failure(self, failure: SequenceFailure, now: float) -> None:
        """The step gave nothing: the leg fails."""
        key = failure.sequence.key
        leg = self.legs[(key.request_id, key.attempt)]
        cause = FailureCause.SHAPE if failure.is_requests_fault else FailureCause.STEP
        self._fail_leg(leg, cause, failure.message)

    def _report(self, leg: DecodeLeg, branch: LegBranch, from_index: int) -> None:
        """Queue a branch's tokens from an output index on (and its finish) for the router."""
        if branch.dropped:
            return
        event = leg.event(branch, from_index)
        branch.reported = len(branch.output)
        self._outgoing.setdefault(leg.router, []).append((leg, event))

    # --- time and death ---------------------------------------------------------------------

    def flush(self, now: float) -> None:
        """Acknowledge what was verified, start what is complete, send each router its tokens."""
        for leg in list(self.legs.values()):
            if leg.state is LegState.RESERVED and leg.pull.unacknowledged:
                self.puller.read_missing(leg, now)
                self.puller.acknowledge(leg)
                self.pull_advanced(leg, now)
        outgoing, self._outgoing = self._outgoing, {}
        for router, events in outgoing.items():
            seq = self._worker.send(router, m.TokenEvents(tuple(event for _, event in events)))
            for leg, _ in events:
                leg.last_event_seq = seq
        self._grant_in_order()

    def tick(self, now: float) -> None:
        """Send the sources the list of what is still wanted; grant what fits."""
        self._grant_in_order()
        for leg in list(self.legs.values()):
            if leg.state is LegState.RESERVED:
                self.puller.give_up_late(leg, now)
        if now < self._next_lists:
            return
        self._next_lists = now + self._worker.times.list_period
        waiting = [leg for leg in self.legs.values() if leg.state is LegState.RESERVED]
        for leg in waiting:
            self.puller.read_missing(leg, now)
        if not waiting:
            return
        for ref, member in self._worker.members.items():
            if Role.PREFILL in member.roles and ref != self._worker.ref:
                mine = [leg for leg in waiting if leg.pull.source in (None, ref)]
                self._worker.send(ref, m.PullList(tuple(map(acknowledgement, mine))))

    def drop_router(self, router: NodeRef) -> None:
        """Release every leg of a dead router."""
        self._outgoing.pop(router, None)
        for leg in [leg for leg in self.legs.values() if leg.router == router]:
            self._drop(leg)

    def drop_peer(self, peer: NodeRef) -> None:
        """A dead source announces nothing more; what is complete here goes on."""
        for leg in [leg for leg in self.legs.values() if leg.pull.source == peer]:
            self._source_gone(leg, FailureCause.SOURCE_LOST, f"{peer.node_id} is gone")

    def _source_gone(self, leg: DecodeLeg, cause: FailureCause, message: str) -> None:
        if leg.state is LegState.RESERVED and leg.pull.verified_until < leg.num_kv_prompt:
            self._fail_leg(leg, cause, message)

    def _fail_leg(self, leg: DecodeLeg, cause: FailureCause, message: str) -> None:
        key = (leg.request.spec.request_id, leg.request.attempt)
        self._fail(leg.router, key, cause, message)
        self._drop(leg)

    def _fail(self, router: NodeRef, key: LegKey, cause: FailureCause, message: str) -> None:
        self._worker.send(router, m.LegFailed(*key, Leg.DECODE, cause, message))

    def _drop(self, leg: DecodeLeg) -> None:
        """End a leg in any state: reads are fenced first, then its blocks are given back."""
        key = (leg.request.spec.request_id, leg.request.attempt)
        if self.legs.pop(key, None) is None:
            return
        self._ended.add(*key)
        self.puller.stop(leg)
        if leg.state is LegState.RESERVED and leg.pull.source is not None:
            self._worker.send(leg.pull.source, m.PullRefused(*key))
        for sequence in leg.sequences:
            self._engine.remove(sequence)
        if leg.table is not None:
            self._engine.kv.free(leg.table)
        tails, leg.tails = leg.tails, []
        self._engine.pool.release(tails)

    def _drop_branch(self, leg: DecodeLeg, branch: LegBranch) -> None:
        """One of several branches is wanted no longer."""
        branch.dropped = True
        for sequence in leg.computing(branch):
            self._engine.remove(sequence)
        if leg.state is LegState.RUNNING:
            leg.note_end()

    # --- reports ----------------------------------------------------------------------------

    def held(self, router: NodeRef) -> list[m.HeldItem]:
        """Every leg of a router."""
        return [leg.held_item() for leg in self.legs.values() if leg.router == router]

    def owners(self, now: float) -> Iterator[Owner]:
        """Blocks in the legs' tables."""
        for (request_id, attempt), leg in self.legs.items():
            for block_id in leg.held_ids:
                yield Owner(OwnerKind.REQUEST, block_id, request_id, attempt.number)

    def add_load(self, load: LoadReport) -> LoadReport:
        """Reservations and the FULL line, and what was moved."""
        states = [leg.state for leg in self.legs.values()]
        return replace(
            load,
            tallies=replace(load.tallies, transfers=self.puller.tallies()),
            num_reserved=states.count(LegState.RESERVED),
            num_full=states.count(LegState.FULL),
            decode_step_s=self._timer.step_s,
        )
