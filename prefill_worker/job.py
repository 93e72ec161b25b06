"""One prefill job: the prefill worker's half of an attempt.

QUEUED → COMPUTING → DONE (token 1 sampled)            any state → gone
  blocks are announced while computing; after DONE the job lives on until the router no
  longer wants it, its lease until the reader has verified everything and has the hand-off
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvferry.engine.sequence import SequenceState
from kvferry.kv_cache.block_table import SealedBlock
from kvferry.kv_transfer.leases import LeaseKey
from kvferry.worker.messages import (
    AnnouncedBlock,
    HandOff,
    NodeRef,
    PrefillDone,
    PrefillRequest,
    Received,
)
from kvferry.worker.wanted import WantedMark


@dataclass(slots=True)
class PrefillJob:
    """State of one job. ``router`` wants the token, ``request.decode`` reads the blocks.

    Attributes:
        held: blocks of the whole prompt as (id, generation), once it is computed.
        offered: sealed blocks in position order, pinned, that cannot be read yet.
        announced: those before them, pinned until verified.
        verified_until: positions that the reader has verified (cumulative).
        hand_off: set with token 1, unless that token ended the request.
        wanted: what the router's lists have said of the job.
        reader_wanted: what the reader's lists have said; None before the first announcement.
        done: the answer to the router; ``done_seq`` is its latest message number.
        reader_done: the reader has every block and the hand-off: nothing is leased any more.
    """

    request: PrefillRequest
    router: NodeRef
    sequence: SequenceState
    lease: LeaseKey
    received_at: float
    wanted: WantedMark
    held: list[tuple[int, int]] = field(default_factory=list)
    offered: deque[SealedBlock] = field(default_factory=deque)
    announced: list[AnnouncedBlock] = field(default_factory=list)
    verified_until: int = 0
    hand_off: HandOff | None = None
    hand_off_received: bool = False
    reader_wanted: WantedMark | None = None
    last_announced_at: float = 0.0
    done: PrefillDone | None = None
    done_seq: int = 0
    reader_done: bool = False

    def unheard(self, received: tuple[Received, ...], heard: int) -> PrefillDone | None:
        """The answer, if a router that has ``heard`` so far lacks a first token of it."""
        lacks = self.done_seq <= heard and self._lacks_first(received)
        return self.done if lacks else None

    def _lacks_first(self, received: tuple[Received, ...]) -> bool:
        spec = self.request.spec
        wanted = {
            number: len(suffix) + 1
            for place, (number, suffix) in enumerate(zip(spec.branches, spec.suffixes, strict=True))
            if not spec.own_suffix(place)
        }
        return any(num_tokens < wanted.get(branch, 0) for branch, num_tokens in received)

    @property
    def next_position(self) -> int:
        """First position that has not been announced."""
        if not self.announced:
            return self.request.missing_from
        last = self.announced[-1]
        return last.start + last.num_tokens

    @property
    def offered_until(self) -> int:
        """First position that has been neither announced nor offered."""
        if not self.offered:
            return self.next_position
        return self.offered[-1].start + self.offered[-1].num_tokens

    @property
    def is_read(self) -> bool:
        """Whether the reader has all that it will ever want of this job."""
        told = self.hand_off is not None and self.hand_off_received
        return told and not self.offered and not self.unverified

    @property
    def unverified(self) -> tuple[AnnouncedBlock, ...]:
        """Announced blocks that the reader has not verified yet."""
        return tuple(b for b in self.announced if b.start + b.num_tokens > self.verified_until)
