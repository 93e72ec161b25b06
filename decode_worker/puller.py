"""Pulling announced blocks into reserved ones: start reads, verify, retry, acknowledge.

Owns what happens between an announcement and the moment every block of a reservation is
verified. Reports the end of a pull to the role; does not decide what follows.

Blocks are announced, read and verified as the source has cut them. What of their positions is not
here yet goes to the slots of own blocks that hold these positions; an own block is sealed when all
its positions are here.

What has come for another request meanwhile is shared instead of read, and what is being read for
one is waited for (``decode_worker.arrivals``).

A corrupt or failed block is read again, ``MAX_READS`` times in all; a stale one is not, for its
source has moved on. Nothing unverified is ever sealed.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

from kvferry.decode_worker.arrivals import Arrivals
from kvferry.decode_worker.leg import DecodeLeg, Reading
from kvferry.kv_cache.hashing import BlockHash
from kvferry.kv_transfer.connector import (
    BlockResult,
    Move,
    Peer,
    ReadStatus,
    SlotRun,
    TransferFailed,
)
from kvferry.worker import messages as m
from kvferry.worker.counting import TransferCount
from kvferry.worker.messages import (
    AnnouncedBlock,
    Envelope,
    FailureCause,
    LegState,
    NodeRef,
    TransferTally,
)
from kvferry.worker.worker import Worker

MAX_READS = 3


class PullListener(Protocol):
    """Who hears of a pull's end."""

    def pull_advanced(self, leg: DecodeLeg, now: float) -> None:
        """More blocks, or the hand-off, have arrived."""
        ...

    def pull_failed(self, leg: DecodeLeg, cause: FailureCause, message: str) -> None:
        """The blocks cannot be had from this source."""
        ...


class Puller:
    """See the module."""

    def __init__(self, worker: Worker, listener: PullListener) -> None:
        self._worker = worker
        self._pool = worker.engine.pool
        self._listener = listener
        self._used: dict[str, Peer] = {}
        self._arrivals = Arrivals()
        self._counts: defaultdict[str, TransferCount] = defaultdict(TransferCount)

    @property
    def blocks_moved(self) -> int:
        """Blocks verified since the start."""
        return sum(count.num_moved for count in self._counts.values())

    @property
    def bytes_moved(self) -> int:
        """Their bytes."""
        return sum(count.bytes_moved for count in self._counts.values())

    def tallies(self) -> tuple[TransferTally, ...]:
        """What was moved, by connector."""
        return tuple(count.tally(connector) for connector, count in self._counts.items())

    def completed(self, leg: DecodeLeg) -> None:
        """Every block of the leg is verified: note how long they took, if any was read."""
        pull = leg.pull
        if pull.verified and (took := pull.stats().transfer_s) is not None:
            self._counts[pull.connector].seconds.observe(took)

    def announced(self, leg: DecodeLeg, envelope: Envelope, now: float) -> None:
        """Take an announcement for a reservation: read what is new in it."""
        announce = envelope.body
        assert isinstance(announce, m.Announce)
        pull = leg.pull
        if pull.source != envelope.sender:
            self._begin_source(leg, envelope.sender)
        for block in announce.blocks:
            if not pull.here.missing(block.start, block.start + block.num_tokens):
                continue
            problem = self._mismatch(leg, envelope.sender, block)
            if problem:
                self._listener.pull_failed(leg, FailureCause.TRANSFER, problem)
                return
            known = pull.announced.get(block.start)
            if known is not None and known.ref != block.ref:
                pull.failures.pop(block.start, None)
            pull.announced[block.start] = block
        hand_off = announce.hand_off
        if hand_off is not None and hand_off.num_computed_tokens != leg.num_kv_prompt:
            problem = f"hand-off of {hand_off.num_computed_tokens} positions, "
            problem += f"the prompt has {leg.num_kv_prompt}"
            self._listener.pull_failed(leg, FailureCause.TRANSFER, problem)
            return
        if announce.hand_off is not None and leg.hand_off is None:
            leg.hand_off = announce.hand_off
            pull.hand_off_received(now)
        self.read_missing(leg, now)
        self.acknowledge(leg)
        self._listener.pull_advanced(leg, now)

    def read_missing(self, leg: DecodeLeg, now: float) -> None:
        """Start reading every announced block that is neither verified nor being read."""
        pull = leg.pull
        peer = self._worker.peers.get(pull.source) if pull.source is not None else None
        if peer is None or leg.table is None or leg.state is not LegState.RESERVED:
            return  # the connection is tried again; the announcement will be repeated
        self._share_what_has_come(leg)
        wanted = [
            block
            for start, block in sorted(pull.announced.items())
            if pull.here.missing(start, start + block.num_tokens)
            and not pull.is_reading(start)
            and not self._comes_for_another(leg, block)
        ]
        if not wanted:
            return
        source_size = peer.info.layout.block_size
        moves = [self._move(leg, block, source_size) for block in wanted]
        spec = leg.request.spec
        try:
            read_id = self._worker.reads.start(
                peer,
                moves,
                spec.request_id,
                leg.request.attempt.number,
                lambda result, at: self._ended(leg, wanted[result.index], peer, result, at),
            )
        except TransferFailed:
            self._worker.lose_connection(peer)
            self._counts[peer.connector].failures["connection"] += 1
            return  # the connection is tried again
        pull.reading[read_id] = Reading({block.start for block in wanted}, now)
        for block in wanted:
            self._arrivals.begin(block_hash(block), leg)
        pull.connector = peer.connector
        if self._used.get(peer.info.worker_id) is not peer:
            self._used[peer.info.worker_id] = peer
            pull.setup_s = peer.setup_s
        if pull.first_read_at is None:
            pull.first_read_at = now

    def give_up_late(self, leg: DecodeLeg, now: float) -> None:
        """Fence reads that have given no block for ``read_timeout``; they count as failed."""
        limit = self._worker.times.read_timeout
        late = [(i, r) for i, r in leg.pull.reading.items() if now - r.progress_at > limit]
        for read_id, _ in late:
            self._worker.reads.cancel(read_id)
            del leg.pull.reading[read_id]
            self._arrivals.end_all(leg)
        for start in sorted(start for _, read in late for start in read.starts):
            self._counts[leg.pull.connector].failures["late"] += 1
            if not self._failed(leg, start, ReadStatus.FAILED):
                return  # the leg is over, and holds no blocks to read into
        if late:
            self.read_missing(leg, now)

    def stop(self, leg: DecodeLeg) -> None:
        """Fence every read of the leg."""
        for read_id in list(leg.pull.reading):
            self._worker.reads.cancel(read_id)
        leg.pull.reading.clear()
        self._arrivals.end_all(leg)

    def acknowledge(self, leg: DecodeLeg) -> None:
        """Tell the source what is verified (cumulative)."""
        leg.pull.unacknowledged = False
        if leg.pull.source is not None:
            self._worker.send(leg.pull.source, acknowledgement(leg))

    def _share_what_has_come(self, leg: DecodeLeg) -> None:
        """Put blocks that can be found by now in the place of reserved ones that wait for them."""
        assert leg.table is not None
        if self._pool.index is None or leg.request.spec.sampling.prompt_logprobs is not None:
            return
        size, prompt = self._worker.engine.block_size, leg.request.spec.kv_prompt()
        for index in range(leg.pull.verified_until // size, len(prompt) // size):
            start, end = index * size, (index + 1) * size
            if leg.pull.here.missing(start, end) != [(start, end)]:
                continue
            entry = self._pool.index.find(leg.hashes.value_at(end, prompt))
            if entry is None or entry.num_tokens < size or leg.pull.is_reading_any(start, end):
                continue
            self._pool.share(entry.block_id)
            block_ids = list(leg.table.block_ids)
            self._pool.release([block_ids[index]])
            block_ids[index] = entry.block_id
            leg.table.block_ids = block_ids
            leg.pull.share(start, size)

    def _comes_for_another(self, leg: DecodeLeg, block: AnnouncedBlock) -> bool:
        whole = block.num_tokens % self._worker.engine.block_size == 0
        can_be_found = self._pool.index is not None and whole
        return can_be_found and self._arrivals.is_read_for_another(block_hash(block), leg)

    def _begin_source(self, leg: DecodeLeg, source: NodeRef) -> None:
        """From now on the blocks are this source's, cut as it cuts them: none of another's is under
        way into the same slots.
        """
        self.stop(leg)
        leg.pull.announced.clear()
        leg.pull.failures.clear()
        leg.pull.source = source

    def _mismatch(self, leg: DecodeLeg, sender: NodeRef, block: AnnouncedBlock) -> str:
        """Why an announced block is not the one wanted at its position; empty if it is."""
        member = self._worker.members.get(sender)
        if member is None:
            return f"block announced by {sender}, which is no member"
        size = member.peer_info.layout.block_size
        prompt = leg.request.spec.kv_prompt()
        end = min(block.start + size, len(prompt))
        if block.start % size or block.start < 0 or block.start >= len(prompt):
            return f"block announced at position {block.start}, not a block of this prompt"
        if block.start + block.num_tokens != end:
            return f"block at {block.start} announced with {block.num_tokens} tokens"
        if block.ref.epoch != sender.epoch:
            return f"block at {block.start} is of epoch {block.ref.epoch}, not {sender.epoch}"
        expected = leg.hashes.value_at(end, prompt)
        if block.block_hash != expected:
            return (
                f"block at {block.start} has chain hash {block.block_hash.hex()}, "
                f"this worker computes {expected.hex()}"
            )
        return ""

    def _ended(
        self,
        leg: DecodeLeg,
        block: AnnouncedBlock,
        peer: Peer,
        result: BlockResult,
        now: float,
    ) -> None:
        pull, count = leg.pull, self._counts[peer.connector]
        if result.status is not ReadStatus.OK:
            count.failures[result.status.value] += 1
        if result.status is ReadStatus.FAILED:
            self._worker.lose_connection(peer)
        read = pull.reading.get(result.read_id)
        if read is None or leg.table is None:
            return
        read.progress_at = now
        read.starts.discard(block.start)
        if not read.starts:
            del pull.reading[result.read_id]
        if result.status is ReadStatus.OK:
            pull.mark_verified(block.start, block.num_tokens)
            size = self._worker.engine.block_size
            firsts = [run.first for run in result.move.runs] or [0]
            for index in dict.fromkeys((block.start + first) // size for first in firsts):
                self._seal_if_whole(leg, index)
            pull.announced.pop(block.start, None)
            pull.bytes_moved += result.num_bytes
            pull.last_verified_at = now
            pull.unacknowledged = True
            count.num_moved += 1
            count.bytes_moved += result.num_bytes
            self._arrivals.end(block_hash(block), leg)
            return
        self._arrivals.end(block_hash(block), leg)
        self._failed(leg, block.start, result.status)

    def _move(self, leg: DecodeLeg, block: AnnouncedBlock, source_size: int) -> Move:
        """How an announced block is read: whole, or what is missing of it slot by slot."""
        assert leg.table is not None
        size = self._worker.engine.block_size
        table, end = leg.table.block_ids, block.start + block.num_tokens
        missing = leg.pull.here.missing(block.start, end)
        if source_size == size and missing == [(block.start, end)]:
            target = table[block.start // size]
            return Move(block.ref, target, block.num_tokens, block.digest)
        runs = tuple(
            SlotRun(
                at - block.start, table[at // size], at % size, min(size - at % size, last - at)
            )
            for first, last in missing
            for at in (first, *range(first - first % size + size, last, size))
        )
        return Move(block.ref, runs[0].target, block.num_tokens, block.digest, runs=runs)

    def _seal_if_whole(self, leg: DecodeLeg, index: int) -> None:
        """Seal the own block at ``index`` of the table if all its positions are here.

        Each came in a block of the source whose chain value was compared with this worker's chain,
        so that the value at the own block's end is that of what it holds.
        """
        assert leg.table is not None
        size = self._worker.engine.block_size
        prompt = leg.request.spec.kv_prompt()
        start, end = index * size, min((index + 1) * size, len(prompt))
        if leg.pull.here.missing(start, end):
            return
        marks = leg.hashes.marks(index, end, prompt)
        # Decode appends to a partial block: nobody may find it.
        whole = end - start == size
        block_id = leg.table.block_ids[index]
        self._pool.seal(block_id, end - start, marks[-1].value, marks if whole else (), moved=True)

    def _failed(self, leg: DecodeLeg, start: int, status: ReadStatus) -> bool:
        """Count a read that gave nothing; True to read again, False if the leg is given up."""
        pull = leg.pull
        pull.reads_failed += 1
        pull.failures[start] += 1
        if pull.failures[start] >= MAX_READS or status is ReadStatus.STALE:
            self._listener.pull_failed(
                leg,
                FailureCause.TRANSFER,
                f"block at position {start}: read {status.value} {pull.failures[start]} times",
            )
            return False
        pull.unacknowledged = True
        return True


def block_hash(block: AnnouncedBlock) -> BlockHash:
    """The chain value at the end of an announced block."""
    return BlockHash(block.block_hash)


def acknowledgement(leg: DecodeLeg) -> m.Acknowledge:
    """What the leg's source should know: verified positions and whether the hand-off is here."""
    return m.Acknowledge(
        leg.request.spec.request_id,
        leg.request.attempt,
        leg.pull.verified_until,
        leg.hand_off is not None,
    )
