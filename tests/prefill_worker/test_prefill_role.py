"""The prefill role: what is announced is pinned and right, and goes when nobody wants it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from kvferry.engine.batch import RunnerOutput, SchedulerOutput
from kvferry.engine.request import Attempt, RequestId, RequestSpec, SamplingParams
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kv_cache.audit import BlockClass, OwnerKind
from kvferry.kv_transfer.local import LocalFabric
from kvferry.prefill_worker.job import PrefillJob
from kvferry.prefill_worker.role import PrefillRole
from kvferry.worker import messages as m
from kvferry.worker.messages import AnnouncedBlock, Body, FailureCause, Leg, LegState, NodeRef, Role
from kvferry.worker.publishing import DirectPublisher
from kvferry.worker.worker import WorkerTimes
from tests.fakes import ATTEMPT, FakeClock, stub_output, stub_spec, stub_value
from tests.worker.making import (
    ROUTER,
    MadeWorker,
    Sender,
    attach,
    make_worker,
    member,
    membership,
)

R = RequestId("r")
LATER = Attempt(1, 2)
OWN, READER, OTHER = NodeRef("prefill-0", 5), NodeRef("decode-0", 6), NodeRef("decode-1", 7)
TIMES = WorkerTimes(list_period=1.0, heartbeat_timeout=1e9, stall_limit=5.0)


@dataclass
class PrefillBench:
    """A prefill worker whose router and reader a test plays. Blocks hold four positions, chunks
    eight tokens.
    """

    num_blocks: int = 16
    seen: list[SamplingParams] = field(default_factory=list)
    step_s: float = 0.0

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.made: MadeWorker = make_worker(
            LocalFabric(),
            OWN,
            (Role.PREFILL,),
            clock=self.clock,
            num_blocks=self.num_blocks,
            times=TIMES,
            scheduler=SchedulerConfig(8, 32, 8, 0.0),
        )
        self.role = PrefillRole(self.made.worker)
        attach(self.made, self.role)
        self.made.worker.engine._runner = self
        self.router = Sender(self.made.worker, ROUTER)
        self.reader = Sender(self.made.worker, READER)
        decode = [member(ref, (Role.DECODE,)) for ref in (READER, OTHER)]
        self.router.send(membership(self.made.member, *decode))
        self.made.sent()

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """The stub model, which takes its time and notes what it is asked to sample with."""
        self.clock.now += self.step_s
        self.seen += [share.sampling for share in output.sequences]
        return self.made.runner.execute(output)

    def ask(
        self,
        name: str = "r",
        length: int = 10,
        max_tokens: int = 5,
        *,
        attempt: Attempt = ATTEMPT,
        missing_from: int = 0,
        spec: RequestSpec | None = None,
        reader: NodeRef = READER,
    ) -> RequestSpec:
        """The router asks for a prefill."""
        spec = spec or stub_spec(name, range(length), max_tokens)
        self.router.send(m.PrefillRequest(spec, attempt, reader, missing_from), self.clock.now)
        return spec

    def read(self, body: Body, heard: int | None = None) -> None:
        """The reader says something."""
        self.reader.send(body, self.clock.now, heard)

    def acknowledge(self, until: int, hand_off: bool = False, name: str = "r") -> None:
        """The reader has verified positions before ``until``."""
        self.read(m.Acknowledge(RequestId(name), ATTEMPT, until, hand_off))

    def step(self, times: int = 1) -> None:
        """Some engine steps."""
        for _ in range(times):
            self.made.worker.tick(self.clock.now)
            self.made.worker.step()
            self.check()

    def wait(self, seconds: float) -> None:
        """Time passes, then a tick."""
        self.clock.now += seconds
        self.made.worker.tick(self.clock.now)
        self.check()

    def check(self) -> dict[BlockClass, int]:
        """The pool agrees with its owners; the counts by class."""
        found = self.made.worker.audit(self.clock.now)
        assert found.problems == ()
        return found.counts

    def job(self, name: str = "r") -> PrefillJob:
        """The one job of a request."""
        (job,) = [job for (r, _), job in self.role.jobs.items() if r == name]
        return job

    def sent(self, kind: type[Body] | None = None) -> list[tuple[NodeRef, Body]]:
        """What has been sent since the last call, with its receiver."""
        return [(e.receiver, e.body) for e in self.made.sent(kind)]

    def announced(self) -> list[m.Announce]:
        """Announcements since the last call."""
        return [b for _, b in self.sent(m.Announce) if isinstance(b, m.Announce)]

    def failures(self) -> list[tuple[str, int, FailureCause]]:
        """Failures told to the router since the last call."""
        return [
            (b.request_id, b.attempt.number, b.cause)
            for _, b in self.sent(m.LegFailed)
            if isinstance(b, m.LegFailed) and b.leg is Leg.PREFILL
        ]

    def is_empty(self) -> bool:
        """Nothing is held for anybody."""
        return (
            not self.role.jobs
            and not len(self.role.leases)
            and not self.made.worker.engine.scheduler.sequences
            and self.check()[BlockClass.FREE] == self.num_blocks
        )


def blocks_of(announcements: Sequence[m.Announce]) -> list[AnnouncedBlock]:
    return [block for announcement in announcements for block in announcement.blocks]


# --- computing and announcing ------------------------------------------------------------------


def test_each_chunk_s_blocks_are_announced_with_the_step_that_filled_them() -> None:
    bench = PrefillBench()
    spec = bench.ask(length=19, max_tokens=5)
    seen = []
    for _ in range(3):
        bench.step()
        (announcement,) = bench.announced()
        seen.append([(b.start, b.num_tokens) for b in announcement.blocks])
        last = announcement.hand_off
    assert seen == [[(0, 4), (4, 4)], [(8, 4), (12, 4)], [(16, 3)]]
    assert last == m.HandOff(tuple(stub_output(range(19), 1)), 19)
    assert spec.request_id == R


def test_a_block_that_is_not_full_is_announced_only_when_the_prompt_ends_in_it() -> None:
    bench = PrefillBench()
    bench.ask(length=11)
    bench.step()
    assert [(b.start, b.num_tokens) for b in blocks_of(bench.announced())] == [(0, 4), (4, 4)]
    bench.step()
    assert [(b.start, b.num_tokens) for b in blocks_of(bench.announced())] == [(8, 3)]


def test_an_announcement_says_where_a_block_is_what_it_holds_and_what_it_must_read_as() -> None:
    bench = PrefillBench()
    spec = bench.ask(length=10)
    bench.step(2)
    chain = bench.made.worker.engine.hash_chain(spec)
    blocks = blocks_of(bench.announced())
    assert len(blocks) == 3
    for index, block in enumerate(blocks):
        held = bench.made.pool.blocks[block.ref.block_id]
        assert block.ref.epoch == OWN.epoch
        assert (
            block.ref.generation
            == held.generation
            == int(bench.made.memory.generations[block.ref.block_id])
        )
        assert block.block_hash == chain.at(index, range(10))
        assert block.digest == bench.made.connector.digest(block.ref.block_id)
        slots = bench.made.memory.blocks[block.ref.block_id].view("<i8")
        expected = [stub_value(p, p) for p in range(block.start, block.start + block.num_tokens)]
        assert list(slots[: block.num_tokens]) == expected


def test_without_checksums_no_digest_is_given() -> None:
    bench = PrefillBench()
    made = bench.made
    made.worker.publisher = DirectPublisher(OWN.epoch, made.pool, made.connector, checksum=False)
    bench.ask(length=4)
    bench.step()
    assert [block.digest for block in blocks_of(bench.announced())] == [None]


def test_token_one_goes_to_the_router_with_how_its_prefill_went() -> None:
    bench = PrefillBench(step_s=0.5)
    bench.clock.now = 10.0
    bench.ask(length=19)
    bench.clock.now = 10.25
    bench.step(3)
    ((receiver, done),) = bench.sent(m.PrefillDone)
    assert receiver == ROUTER
    stats = m.PrefillStats(0.25, 1.5, 3)
    assert done == m.PrefillDone(R, ATTEMPT, tuple(stub_output(range(19), 1)), stats)
    assert bench.made.worker.load().prefill_tokens_per_s == pytest.approx(19 / 1.5)


@pytest.mark.parametrize("how", ["limit", "eos"])
def test_a_token_one_that_ends_the_request_is_not_handed_off(how: str) -> None:
    bench = PrefillBench()
    (first,) = stub_output(range(10), 1)
    spec = stub_spec("r", range(10), 1 if how == "limit" else 9)
    if how == "eos":
        sampling = replace(spec.sampling, ignore_eos=False)
        spec = replace(spec, eos_token_ids=(first,), sampling=sampling)
    bench.ask(spec=spec)
    bench.step(2)
    sent = [body for _, body in bench.sent()]
    assert any(isinstance(b, m.PrefillDone) and b.token_ids == (first,) for b in sent)
    assert not any(isinstance(b, m.Announce) and b.hand_off for b in sent)
    bench.router.send(m.CancelLeg(R, ATTEMPT, Leg.PREFILL))
    assert bench.is_empty()


def test_the_user_s_sampling_parameters_reach_the_model_as_they_were_given() -> None:
    bench = PrefillBench()
    sampling = SamplingParams(
        max_tokens=77,
        min_tokens=3,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        repetition_penalty=1.5,
        seed=123,
        stop=("x",),
        stop_token_ids=(9,),
        skip_special_tokens=False,
    )
    bench.ask(spec=replace(stub_spec("r", range(10), 77), sampling=sampling))
    bench.step(2)
    assert bench.seen == [sampling, sampling]


@pytest.mark.parametrize("missing_from", [0, 4, 8])
def test_what_the_reader_has_is_not_announced_by_position(missing_from: int) -> None:
    bench = PrefillBench()
    bench.ask(length=10, missing_from=missing_from)
    bench.step(2)
    announcements = bench.announced()
    assert [b.start for b in blocks_of(announcements)] == [
        start for start in (0, 4, 8) if start >= missing_from
    ]
    assert announcements[-1].hand_off is not None
    assert bench.check()[BlockClass.PINNED] == len(blocks_of(announcements))


def test_a_reader_that_lacks_nothing_is_told_so_by_the_hand_off_alone() -> None:
    bench = PrefillBench()
    bench.ask(length=8, missing_from=8)
    bench.step()
    (announcement,) = bench.announced()
    assert announcement.blocks == () and announcement.hand_off is not None
    bench.wait(1.0)
    assert len(bench.announced()) == 1, "and again until it is heard"
    bench.acknowledge(8, hand_off=True)
    bench.wait(1.0)
    assert bench.announced() == []
    assert bench.job().reader_done


# --- pins and leases ---------------------------------------------------------------------------


def test_announced_blocks_outlive_their_request_and_the_hunger_of_others() -> None:
    bench = PrefillBench(num_blocks=4)
    bench.ask(length=10)
    bench.step(2)
    refs = [block.ref for block in blocks_of(bench.announced())]
    assert bench.check()[BlockClass.PINNED] == 3
    bench.ask("s", length=8)
    bench.step(5)
    for ref in refs:
        assert bench.made.pool.blocks[ref.block_id].generation == ref.generation
    assert bench.sent(m.Announce) == [], "the other waits"
    bench.acknowledge(8)
    bench.step(2)
    assert len(blocks_of(bench.announced())) == 2


def test_acknowledgements_are_cumulative_and_may_come_twice_or_late() -> None:
    bench = PrefillBench()
    bench.ask(length=19)
    bench.step(3)
    pinned = []
    for until in (4, 12, 8, 0, 12, 19, 19):
        bench.acknowledge(until)
        pinned.append(bench.check()[BlockClass.PINNED])
    assert pinned == [4, 2, 2, 2, 2, 0, 0]
    assert not bench.job().reader_done, "it lacks the hand-off"
    bench.acknowledge(4, hand_off=True)
    assert bench.job().reader_done


def test_a_lease_is_named_to_the_audit_with_its_reader_and_its_time() -> None:
    bench = PrefillBench()
    bench.ask(length=4)
    bench.step()
    bench.clock.now += 2.0
    (owner,) = bench.role.owners(bench.clock.now)
    assert (owner.kind, owner.request_id, owner.attempt) == (OwnerKind.READER, "r", 1)
    assert (owner.peer, owner.lease_remaining_s) == ("decode-0", 3.0)


@pytest.mark.parametrize("who", ["another reader", "another life", "unknown request"])
def test_words_of_who_is_not_the_reader_change_nothing(who: str) -> None:
    bench = PrefillBench()
    bench.ask(length=10)
    bench.step(2)
    bench.sent()
    ref = {"another reader": OTHER, "another life": NodeRef("decode-0", 4)}.get(who, READER)
    name = RequestId("nobody") if who == "unknown request" else R
    stranger = Sender(bench.made.worker, ref)
    stranger.send(m.Acknowledge(name, ATTEMPT, 10, True))
    stranger.send(m.PullRefused(name, ATTEMPT))
    if ref != READER:
        for _ in range(3):
            stranger.send(m.PullList(()))
    assert bench.check()[BlockClass.PINNED] == 3
    assert bench.failures() == []


def test_a_reader_that_stands_still_loses_its_lease_within_the_limit() -> None:
    bench = PrefillBench()
    bench.ask(length=10)
    bench.step(2)
    bench.wait(4.9)
    assert len(bench.role.jobs) == 1
    bench.sent()
    bench.wait(0.2)
    sent = bench.sent()
    assert (READER, m.LeaseEnded(R, ATTEMPT)) in sent
    assert [b.cause for _, b in sent if isinstance(b, m.LegFailed)] == [FailureCause.STALLED]
    assert bench.is_empty()


def test_progress_of_another_request_of_the_same_reader_keeps_a_lease() -> None:
    bench = PrefillBench()
    bench.ask("a", length=8)
    bench.ask("b", length=8)
    bench.step(2)
    for until in (4, 8):
        bench.wait(4.0)
        bench.acknowledge(until, name="a")
    bench.wait(4.0)
    assert {r for r, _ in bench.role.jobs} == {"a", "b"}
    bench.wait(1.5)
    assert {r for r, _ in bench.role.jobs} == {"a"}, "all of it is read; the router lets go"


def test_unread_blocks_are_announced_again_every_period_from_the_first_unread_on() -> None:
    bench = PrefillBench()
    bench.ask(length=19)
    bench.step(3)
    bench.announced()
    bench.acknowledge(8)
    bench.wait(0.9)
    assert bench.announced() == []
    bench.wait(0.1)
    (again,) = bench.announced()
    assert [b.start for b in again.blocks] == [8, 12, 16]
    assert again.hand_off is not None
    bench.acknowledge(19, hand_off=True)
    bench.wait(1.0)
    assert bench.announced() == []


# --- who lets go -------------------------------------------------------------------------------


def test_a_reader_that_refuses_ends_the_job_and_the_router_hears_why() -> None:
    bench = PrefillBench()
    bench.ask(length=19)
    bench.step()
    bench.read(m.PullRefused(R, ATTEMPT))
    assert bench.failures() == [("r", 1, FailureCause.READER_GONE)]
    assert bench.is_empty()
    bench.read(m.PullRefused(R, ATTEMPT))
    assert bench.sent() == []


def test_a_reader_s_lists_release_what_two_in_a_row_omit() -> None:
    bench = PrefillBench()
    bench.ask(length=10)
    bench.step(2)
    bench.made.sent()
    named = m.PullList((m.Acknowledge(R, ATTEMPT, 4, False),))
    for body, kept in ((m.PullList(()), 1), (named, 1), (m.PullList(()), 1), (m.PullList(()), 0)):
        bench.read(body)
        assert len(bench.role.jobs) == kept
    assert bench.failures() == [("r", 1, FailureCause.READER_GONE)]
    assert bench.is_empty()


def test_an_acknowledgement_between_two_lists_shows_that_the_reader_wants_it() -> None:
    bench = PrefillBench()
    bench.ask(length=10)
    bench.step(2)
    bench.read(m.PullList(()))
    bench.acknowledge(4)
    bench.read(m.PullList(()))
    assert len(bench.role.jobs) == 1
    bench.read(m.PullList(()))
    assert bench.is_empty()


def test_a_reader_s_list_carries_its_progress() -> None:
    bench = PrefillBench()
    bench.ask(length=10)
    bench.step(2)
    bench.read(m.PullList((m.Acknowledge(R, ATTEMPT, 8, False),)))
    assert bench.check()[BlockClass.PINNED] == 1


def test_a_reader_s_list_does_not_judge_what_it_has_not_heard_of() -> None:
    bench = PrefillBench()
    bench.ask(length=19)
    for _ in range(4):
        bench.read(m.PullList(()))
    assert len(bench.role.jobs) == 1, "nothing was announced yet"
    bench.step()
    first = bench.job().reader_wanted
    assert first is not None
    for _ in range(4):
        bench.read(m.PullList(()), heard=first.since - 1)
    assert len(bench.role.jobs) == 1
    for _ in range(2):
        bench.read(m.PullList(()), heard=first.since)
    assert bench.is_empty()


def test_a_reader_that_has_everything_may_forget_it() -> None:
    bench = PrefillBench()
    bench.ask(length=10)
    bench.step(2)
    bench.acknowledge(10, hand_off=True)
    for _ in range(3):
        bench.read(m.PullList(()))
    bench.router.send(membership(bench.made.member, version=2))  # it may even die
    assert bench.failures() == []
    assert len(bench.role.jobs) == 1, "the router still wants token 1"


def test_a_dead_reader_ends_the_jobs_that_it_has_not_read() -> None:
    bench = PrefillBench()
    bench.ask("a", length=10)
    bench.ask("b", length=10, reader=OTHER)
    bench.step()
    bench.router.send(membership(bench.made.member, member(OTHER, (Role.DECODE,)), version=2))
    assert bench.failures() == [("a", 1, FailureCause.READER_GONE)]
    assert {r for r, _ in bench.role.jobs} == {"b"}


def wanted(received: int = 0, attempt: Attempt = ATTEMPT, leg: Leg = Leg.PREFILL) -> m.WantedList:
    return m.WantedList((m.WantedItem(R, attempt, leg, (m.Received(0, received),)),))


@pytest.mark.parametrize(
    "other",
    [m.WantedList(()), wanted(attempt=LATER), wanted(leg=Leg.DECODE)],
    ids=["empty", "other attempt", "other leg"],
)
def test_a_router_s_lists_release_what_two_in_a_row_omit(other: m.WantedList) -> None:
    bench = PrefillBench()
    bench.ask(length=10)
    bench.step(2)
    bench.made.sent()
    for body, kept in ((other, 1), (wanted(), 1), (other, 1), (other, 0)):
        bench.router.send(body)
        assert len(bench.role.jobs) == kept
    assert (READER, m.LeaseEnded(R, ATTEMPT)) in bench.sent()
    assert bench.is_empty()


def test_a_lost_token_one_is_sent_again_when_the_router_s_list_shows_it() -> None:
    bench = PrefillBench()
    bench.ask(length=4)
    bench.step()
    seq = bench.job().done_seq
    bench.sent()
    bench.router.send(wanted(received=0), heard=seq - 1)
    assert bench.sent(m.PrefillDone) == [], "the list is older than the token"
    bench.router.send(wanted(received=0))
    assert len(bench.sent(m.PrefillDone)) == 1
    bench.router.send(wanted(received=1))
    assert bench.sent(m.PrefillDone) == []


def test_a_retry_s_token_counts_behind_the_delivered_ones() -> None:
    bench = PrefillBench()
    whole = stub_output(range(6), 4)
    bench.ask(spec=stub_spec("r", range(6), 9, whole[:3]))
    bench.step(2)
    ((_, done),) = bench.sent(m.PrefillDone)
    assert isinstance(done, m.PrefillDone) and list(done.token_ids) == whole[3:]
    bench.router.send(wanted(received=3))
    assert len(bench.sent(m.PrefillDone)) == 1
    bench.router.send(wanted(received=4))
    assert bench.sent(m.PrefillDone) == []


STAGES = {"queued": 0, "mid-chunk": 1, "announced": 2, "done": 3}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["cancel", "router dies", "two lists", "newer attempt"])
def test_a_job_that_ends_at_any_stage_leaves_nothing(stage: str, how: str) -> None:
    bench = PrefillBench()
    bench.ask(length=19)
    bench.step(STAGES[stage])
    bench.made.sent()
    if how == "cancel":
        bench.router.send(m.CancelLeg(R, ATTEMPT, Leg.PREFILL))
    elif how == "router dies":
        bench.clock.now += 2e9
        bench.made.worker.tick(bench.clock.now)
    elif how == "two lists":
        for _ in range(2):
            bench.router.send(m.WantedList(()))
    else:
        bench.ask(attempt=LATER)
        bench.router.send(m.CancelLeg(R, LATER, Leg.PREFILL))
    assert bench.is_empty()
    ended = [body for _, body in bench.sent(m.LeaseEnded)]
    assert ended == ([] if stage == "queued" else [m.LeaseEnded(R, ATTEMPT)])
    bench.step(2)
    assert bench.made.runner.num_steps == STAGES[stage], "nothing more is computed"


# --- attempts ----------------------------------------------------------------------------------


def test_the_same_request_twice_is_one_job() -> None:
    bench = PrefillBench()
    for _ in range(2):
        bench.ask(length=10)
    bench.step(3)
    assert len(bench.sent(m.PrefillDone)) == 1
    assert len(bench.role.jobs) == 1


def test_a_newer_attempt_replaces_the_older_one_and_not_the_reverse() -> None:
    bench = PrefillBench()
    bench.ask(attempt=LATER)
    bench.ask(attempt=ATTEMPT)
    assert bench.failures() == [("r", 1, FailureCause.ENDED)]
    assert [key[1] for key in bench.role.jobs] == [LATER]


def test_an_attempt_that_has_ended_does_not_begin_again() -> None:
    bench = PrefillBench()
    bench.router.send(m.CancelLeg(R, ATTEMPT, Leg.PREFILL))
    bench.ask()
    assert bench.failures() == [("r", 1, FailureCause.ENDED)]
    assert bench.is_empty()
    bench.ask(attempt=LATER)
    assert len(bench.role.jobs) == 1


def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers() -> None:
    bench = PrefillBench(num_blocks=4)
    bench.ask(length=17)
    ((_, body),) = bench.sent()
    assert isinstance(body, m.LegFailed) and body.cause is FailureCause.SHAPE
    assert "17 tokens need 5 blocks, this worker has 4" in body.message
    assert bench.is_empty()


def test_a_cancel_of_the_decode_leg_is_nothing_to_prefill() -> None:
    bench = PrefillBench()
    bench.ask()
    bench.router.send(m.CancelLeg(R, ATTEMPT, Leg.DECODE))
    assert len(bench.role.jobs) == 1


def test_a_step_that_fails_fails_the_job_and_the_worker_serves_on() -> None:
    bench = PrefillBench()
    bench.ask(length=19)
    bench.step()
    bench.made.runner.fail_next = True
    bench.made.sent()
    bench.step()
    sent = bench.sent()
    assert (READER, m.LeaseEnded(R, ATTEMPT)) in sent
    assert [b.cause for _, b in sent if isinstance(b, m.LegFailed)] == [FailureCause.STEP]
    assert bench.is_empty()
    bench.ask("s", length=5)
    bench.step()
    assert len(bench.sent(m.PrefillDone)) == 1


def test_what_is_held_is_told_with_its_state() -> None:
    bench = PrefillBench()
    bench.ask("a", length=4)
    bench.step()
    bench.ask("b", length=4)
    items = {item.request_id: item for item in bench.role.held(ROUTER)}
    a, b = RequestId("a"), RequestId("b")
    assert items[a] == m.HeldItem(a, ATTEMPT, Leg.PREFILL, LegState.FINISHED, tokens_produced=1)
    assert items[b] == m.HeldItem(b, ATTEMPT, Leg.PREFILL, LegState.RUNNING)
    assert bench.role.held(NodeRef("router-1", 9)) == []


def test_blocks_whose_lease_ends_unread_are_withdrawn_before_they_are_unpinned() -> None:
    bench = PrefillBench()
    bench.ask(length=9)
    bench.step(3)
    pool = bench.made.pool
    seen: list[tuple[list[int], list[int]]] = []

    def withdraw(block_ids: Sequence[int]) -> None:
        seen.append((list(block_ids), [pool.blocks[b].num_pins for b in block_ids]))

    bench.made.connector.withdraw = withdraw  # type: ignore[method-assign]
    bench.router.send(m.CancelLeg(R, ATTEMPT, Leg.PREFILL))
    ((block_ids, pins),) = seen
    assert len(block_ids) == 3 and pins == [1, 1, 1]
    assert all(pool.is_free(block_id) for block_id in block_ids)
