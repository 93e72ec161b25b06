"""The prefill role: computes prompts, seals and announces their blocks, hands off token 1.

Owns the jobs and the leases that pin their blocks. Every job is held for a router (which wants
token 1) and for a decode worker (which reads the blocks); either may let go of it by cancel,
by refusing, by omitting it from two lists in a row, or by dying. Does not know how blocks
travel, nor what becomes of the request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvferry.engine.batch import TokenLogprobs
from kvferry.engine.first_tokens import first_tokens, goes_on
from kvferry.engine.request import Attempt, RequestId
from kvferry.engine.sequence import SequenceFailure, SequenceProgress
from kvferry.kv_cache.audit import Owner, OwnerKind
from kvferry.kv_cache.block_table import SealedBlock
from kvferry.kv_transfer.leases import LeaseKey, LeaseTable
from kvferry.prefill_worker.job import PrefillJob
from kvferry.worker import messages as m
from kvferry.worker.messages import Envelope, FailureCause, Leg, LoadReport, NodeRef, Role
from kvferry.worker.wanted import EndedAttempts, WantedMark
from kvferry.worker.worker import Worker

JobKey = tuple[RequestId, Attempt]


class PrefillRole:
    """See the module.

    Invariant: every unverified announced block is pinned by its lease, every offered one by its
    job.
    """

    role = Role.PREFILL

    def __init__(self, worker: Worker) -> None:
        self.jobs: dict[JobKey, PrefillJob] = {}
        self.leases = LeaseTable(worker.times.stall_limit)
        self._worker = worker
        self._engine = worker.engine
        self._ended = EndedAttempts()
        self._speed: float | None = None

    # --- messages ---------------------------------------------------------------------------

    def handle(self, envelope: Envelope, now: float) -> bool:
        """Take a message; False if it does not concern this role."""
        match envelope.body:
            case m.PrefillRequest() as request:
                self._begin(request, envelope, now)
            case m.CancelLeg(request_id, attempt, Leg.PREFILL):
                job = self.jobs.get((request_id, attempt))
                self._ended.add(request_id, attempt)
                if job is not None and job.router == envelope.sender:
                    self._drop(job)
            case m.WantedList(items):
                self._judge_router(envelope, items)
            case m.Acknowledge() as acknowledgement:
                self._acknowledged(envelope.sender, acknowledgement, now)
            case m.PullRefused(request_id, attempt):
                job = self._job_read_by(envelope.sender, request_id, attempt)
                if job is not None:
                    self._reader_gone(job)
            case m.PullList(items):
                self._judge_reader(envelope, items, now)
            case _:
                return False
        return True

    def _begin(self, request: m.PrefillRequest, envelope: Envelope, now: float) -> None:
        spec, attempt = request.spec, request.attempt
        key = (spec.request_id, attempt)
        if key in self.jobs:
            self.jobs[key].wanted.since = envelope.seq
            return
        newer = [j for (r, a), j in self.jobs.items() if r == spec.request_id and a > attempt]
        if newer or self._ended.covers(*key):
            self._fail(envelope.sender, key, FailureCause.ENDED, "this attempt has ended here")
            return
        for old in [j for (r, _), j in self.jobs.items() if r == spec.request_id]:
            self._drop(old)
        num_tokens = len(spec.kv_prompt())
        needed = self._engine.kv.blocks_for(num_tokens)
        pool = self._engine.pool
        if needed > pool.num_usable:
            self._fail(
                envelope.sender,
                key,
                FailureCause.SHAPE if needed > pool.num_blocks else FailureCause.STALLED,
                f"{num_tokens} tokens need {needed} blocks, this worker has {pool.num_usable}",
            )
            return
        lease = LeaseKey(
            spec.request_id,
            (attempt.router_epoch, attempt.number),
            (request.decode.node_id, request.decode.epoch),
        )
        self.leases.open(lease, now)
        sequence = self._engine.new_sequence(spec, attempt, self, prefill_only=True)
        self.jobs[key] = PrefillJob(
            request, envelope.sender, sequence, lease, now, WantedMark(envelope.seq)
        )

    def _judge_router(self, envelope: Envelope, items: tuple[m.WantedItem, ...]) -> None:
        wanted = {(i.request_id, i.attempt): i for i in items if i.leg is Leg.PREFILL}
        for key, job in list(self.jobs.items()):
            if job.router != envelope.sender:
                continue
            item = wanted.get(key)
            if job.wanted.judge(item is not None, envelope.seq):
                self._drop(job)
            elif item is not None and (done := job.unheard(item.received, envelope.heard)):
                job.done_seq = self._worker.send(job.router, done)

    def _acknowledged(self, reader: NodeRef, ack: m.Acknowledge, now: float) -> None:
        job = self._job_read_by(reader, ack.request_id, ack.attempt)
        if job is None or job.reader_done or ack.verified_until > job.next_position:
            return
        self._take_back(self.leases.acknowledge(job.lease, ack.verified_until, now))
        job.verified_until = max(job.verified_until, ack.verified_until)
        job.hand_off_received = job.hand_off_received or ack.hand_off_received
        if job.reader_wanted is not None:
            job.reader_wanted.misses = 0
        if job.is_read:
            self._end_lease(job)

    def _judge_reader(
        self, envelope: Envelope, items: tuple[m.Acknowledge, ...], now: float
    ) -> None:
        named = {(item.request_id, item.attempt) for item in items}
        for item in items:
            self._acknowledged(envelope.sender, item, now)
        for key, job in list(self.jobs.items()):
            if job.request.decode != envelope.sender or job.reader_done:
                continue
            mark = job.reader_wanted
            if mark is not None and mark.judge(key in named, envelope.heard):
                self._reader_gone(job)

    def _job_read_by(
        self, reader: NodeRef, request_id: RequestId, attempt: Attempt
    ) -> PrefillJob | None:
        job = self.jobs.get((request_id, attempt))
        return job if job is not None and job.request.decode == reader else None

    # --- the engine -------------------------------------------------------------------------

    def on_progress(self, progress: SequenceProgress, now: float) -> None:
        """Pin and announce what the step sealed; with token 1 hand off."""
        sequence = progress.sequence
        job = self.jobs[(sequence.key.request_id, sequence.key.attempt)]
        for block in progress.sealed:
            self._offer(job, block)
        blocks = self._published(job, now)
        if progress.token_id is not None:
            token_ids, logprobs = first_tokens(progress)
            if goes_on(sequence.spec, token_ids):
                job.hand_off = m.HandOff(
                    token_ids,
                    sequence.num_computed_tokens,
                    logprobs,
                    tuple(sequence.prompt_logprobs),
                )
            self._finish_prefill(job, token_ids, logprobs, now)
        if blocks or job.hand_off is not None:
            self._announce(job, blocks, now)

    def on_failure(self, failure: SequenceFailure, now: float) -> None:
        """The step gave nothing: the leg fails."""
        key = failure.sequence.key
        job = self.jobs[(key.request_id, key.attempt)]
        cause = FailureCause.SHAPE if failure.is_requests_fault else FailureCause.STEP
        self._fail_job(job, cause, failure.message)

    def _offer(self, job: PrefillJob, block: SealedBlock) -> None:
        """Pin a sealed block for the reader, unless that has all its positions already."""
        if block.start + block.num_tokens > job.offered_until:
            self._engine.pool.pin(block.block_id)
            self._worker.publisher.offer(block.block_id)
            job.offered.append(block)

    def _published(self, job: PrefillJob, now: float) -> tuple[m.AnnouncedBlock, ...]:
        """The next of the offered blocks that can be read by now: their leases begin.

        Each is leased by its last position: a reader that has only the first ones still reads it.
        """
        fresh = []
        while job.offered:
            block = job.offered[0]
            published = self._worker.publisher.published(block.block_id)
            if published is None:
                break
            job.offered.popleft()
            block_hash = self._engine.pool.blocks[block.block_id].block_hash
            assert block_hash is not None
            end = block.start + block.num_tokens
            if not self.leases.add(job.lease, end - 1, block.block_id, now):
                self._take_back([block.block_id])
            fresh.append(
                m.AnnouncedBlock(
                    block.start, block.num_tokens, published.ref, block_hash, published.digest
                )
            )
        job.announced += fresh
        return tuple(fresh)

    def _finish_prefill(
        self,
        job: PrefillJob,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        now: float,
    ) -> None:
        sequence = job.sequence
        blocks = self._engine.pool.blocks
        job.held = [(b, blocks[b].generation) for b in sequence.table.block_ids]
        started = sequence.first_scheduled_at if sequence.first_scheduled_at is not None else now
        prefill_s = now - started
        job.done = m.PrefillDone(
            job.request.spec.request_id,
            job.request.attempt,
            token_ids,
            m.PrefillStats(
                started - job.received_at,
                prefill_s,
                sequence.num_prefill_chunks,
                sequence.recomputed_prompt_tokens,
                sequence.num_preemptions,
                sequence.num_cached_tokens,
            ),
            logprobs,
            tuple(sequence.prompt_logprobs),
        )
        job.done_seq = self._worker.send(job.router, job.done)
        if prefill_s > 0:
            speed = sequence.num_computed_tokens / prefill_s
            self._speed = speed if self._speed is None else 0.8 * self._speed + 0.2 * speed

    def _announce(self, job: PrefillJob, blocks: tuple[m.AnnouncedBlock, ...], now: float) -> None:
        spec = job.request.spec
        seq = self._worker.send(
            job.request.decode,
            m.Announce(spec.request_id, job.request.attempt, blocks, job.hand_off),
        )
        job.last_announced_at = now
        if job.reader_wanted is None:
            job.reader_wanted = WantedMark(seq)

    # --- time and death ---------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Repeat unacknowledged announcements; end leases whose reader stands still."""
        for job in self.jobs.values():
            due = now - job.last_announced_at >= self._worker.times.list_period
            if job.reader_done or not due:
                continue
            if job.unverified or (job.hand_off is not None and not job.hand_off_received):
                self._announce(job, job.unverified, now)
        for lease, block_ids in self.leases.sweep(now):
            self._take_back(block_ids)
            job = self.jobs[(RequestId(lease.request_id), Attempt(*lease.attempt))]
            self._fail_job(
                job,
                FailureCause.STALLED,
                f"{job.request.decode.node_id} read nothing for {self.leases.stall_limit:g} s",
            )

    def flush(self, now: float) -> None:
        """Announce what could not be read when the step that made it had completed."""
        for job in self.jobs.values():
            if job.offered and (blocks := self._published(job, now)):
                self._announce(job, blocks, now)

    def drop_router(self, router: NodeRef) -> None:
        """Release every job of a dead router."""
        for job in [job for job in self.jobs.values() if job.router == router]:
            self._drop(job)

    def drop_peer(self, peer: NodeRef) -> None:
        """A dead reader reads nothing more."""
        for job in [job for job in self.jobs.values() if job.request.decode == peer]:
            if not job.reader_done:
                self._reader_gone(job)

    def _reader_gone(self, job: PrefillJob) -> None:
        if job.reader_done:
            return
        self._fail_job(job, FailureCause.READER_GONE, f"{job.request.decode.node_id} let go of it")

    def _fail_job(self, job: PrefillJob, cause: FailureCause, message: str) -> None:
        key = (job.request.spec.request_id, job.request.attempt)
        self._fail(job.router, key, cause, message)
        self._drop(job)

    def _fail(self, router: NodeRef, key: JobKey, cause: FailureCause, message: str) -> None:
        self._worker.send(router, m.LegFailed(*key, Leg.PREFILL, cause, message))

    def _drop(self, job: PrefillJob) -> None:
        """End a job in any state: compute stops, blocks are unpinned, the reader is told."""
        key = (job.request.spec.request_id, job.request.attempt)
        if self.jobs.pop(key, None) is None:
            return
        self._ended.add(*key)
        self._engine.remove(job.sequence)
        if not job.reader_done:
            if job.reader_wanted is not None:
                self._worker.send(job.request.decode, m.LeaseEnded(*key))
            self._end_lease(job)

    def _end_lease(self, job: PrefillJob) -> None:
        job.reader_done = True
        self._take_back(self.leases.end(job.lease) + [block.block_id for block in job.offered])
        job.offered.clear()
        self._engine.pool.used(job.held)

    def _take_back(self, block_ids: list[int]) -> None:
        """Unpin blocks that their reader may still be reading: first nobody is served them."""
        if block_ids:
            self._worker.publisher.withdraw(block_ids)
        for block_id in block_ids:
            self._engine.pool.unpin(block_id)

    # --- reports ----------------------------------------------------------------------------

    def held(self, router: NodeRef) -> list[m.HeldItem]:
        """Every job of a router."""
        return [
            m.HeldItem(
                request_id,
                attempt,
                Leg.PREFILL,
                m.LegState.RUNNING if job.done is None else m.LegState.FINISHED,
                tokens_produced=0 if job.done is None else len(job.done.token_ids),
            )
            for (request_id, attempt), job in self.jobs.items()
            if job.router == router
        ]

    def owners(self, now: float) -> Iterator[Owner]:
        """Blocks in the jobs' tables, and blocks pinned by leases."""
        for (request_id, attempt), job in self.jobs.items():
            for block_id in job.sequence.table.held_ids:
                yield Owner(OwnerKind.REQUEST, block_id, request_id, attempt.number)
            for block in job.offered:
                peer = job.lease.reader[0]
                yield Owner(OwnerKind.READER, block.block_id, request_id, attempt.number, peer)
        for lease, _, block_id in self.leases:
            yield Owner(
                OwnerKind.READER,
                block_id,
                lease.request_id,
                lease.attempt[1],
                lease.reader[0],
                self.leases.remaining(lease, now),
            )

    def add_load(self, load: LoadReport) -> LoadReport:
        """Measured prefill speed, and leases."""
        stale = (("lease", self.leases.stale_refused),) if self.leases.stale_refused else ()
        tallies = replace(
            load.tallies,
            num_leases_expired=self.leases.num_expired,
            refused=(*load.tallies.refused, *stale),
        )
        return replace(
            load,
            prefill_tokens_per_s=self._speed,
            num_leases=len(self.leases),
            tallies=tallies,
        )
