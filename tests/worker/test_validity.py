"""What no party means is refused before it is believed: counted, without state or answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvferry.engine.request import Attempt, RequestId, SamplingParams
from kvferry.kv_cache.audit import BlockClass
from kvferry.kv_transfer.connector import BlockRef
from kvferry.kv_transfer.local import LocalFabric
from kvferry.worker import messages as m
from kvferry.worker.messages import Body, NodeRef, Role
from kvferry.worker.validity import COUNT, LARGE, WORD, fault
from tests.fakes import ATTEMPT, stub_spec
from tests.worker.making import ROUTER, Sender, make_worker, member, membership

R = RequestId("r")
DECODE = NodeRef("decode-0", 3)
SPEC = stub_spec("r", range(9), 4, suffix=(1,))
RESERVE = m.Reserve(SPEC, ATTEMPT)
PREFILL = m.PrefillRequest(SPEC, ATTEMPT, DECODE, 10)
STATS = m.PrefillStats(0.0, 0.5, 1)
DONE = m.PrefillDone(R, ATTEMPT, (5,), STATS)
BLOCK = m.AnnouncedBlock(0, 4, BlockRef(1, 0, WORD - 1), b"x" * 16, WORD - 1)
ANNOUNCE = m.Announce(R, ATTEMPT, (BLOCK,), m.HandOff((5,), 9))
EVENT = m.TokenEvent(R, ATTEMPT, 0, 0, (5,), "length", 5)
LOAD = m.LoadReport(num_blocks=4, num_free_blocks=4)
OWNER = m.OwnerReport("reader", "r", 1, "decode-0", -0.5)
OWNED = m.BlockReport(0, 1, "pinned", 0, 4, None, (OWNER,))
COUNTS = tuple((name.value, 1) for name in BlockClass)
AUDIT = m.AuditReport(1, 4, 32, COUNTS, (), (OWNED,))
MEMBER = member(NodeRef("prefill-0", 2), (Role.PREFILL,))


def sampling(**changes: Any) -> Body:
    return replace(RESERVE, spec=replace(SPEC, sampling=replace(SPEC.sampling, **changes)))


def spec(**changes: Any) -> Body:
    return replace(RESERVE, spec=replace(SPEC, **changes))


def peer(**changes: Any) -> Body:
    return membership(replace(MEMBER, peer_info=replace(MEMBER.peer_info, **changes)))


MOVED = m.TransferTally("shm", COUNT, LARGE - 1, (("stale", COUNT),), m.HistogramReport())


def beating(**changes: Any) -> Body:
    return m.WorkerHeartbeat(replace(LOAD, **changes))


SOUND: list[Body] = [
    beating(
        tallies=m.WorkerTallies(
            1,
            m.HistogramReport((COUNT,) * 14, 1e9),
            refused=(("sender", COUNT),),
            transfers=(MOVED,),
        )
    ),
    RESERVE,
    PREFILL,
    DONE,
    ANNOUNCE,
    m.TokenEvents((EVENT,)),
    m.WorkerHeartbeat(LOAD, 0.0),
    m.WorkerHeartbeat(m.LoadReport()),
    AUDIT,
    membership(MEMBER),
    membership(),
    sampling(top_p=1.0, seed=WORD - 1),
]

IMPOSSIBLE: dict[str, Body] = {
    "prompt_token_ids: empty": spec(prompt_token_ids=()),
    "prompt_token_ids: -1": spec(prompt_token_ids=(5, -1)),
    f"prompt_token_ids: 5 to {COUNT}": spec(prompt_token_ids=(5, COUNT)),
    "branches: 1 with 0 suffixes": spec(suffixes=()),
    "branches: 1 with 2 suffixes": spec(suffixes=((), ())),
    "branches: 0 with 0 suffixes": spec(branches=(), suffixes=()),
    "branches: 65 with 65 suffixes": spec(branches=tuple(range(65)), suffixes=((),) * 65),
    "branches: (1, 0), wanted ascending": spec(branches=(1, 0), suffixes=((), ())),
    "branches: (0, 0), wanted ascending": spec(branches=(0, 0), suffixes=((), ())),
    "branches: (64,), wanted ascending": spec(branches=(64,)),
    "suffixes: 4 tokens": spec(suffixes=((1, 2, 3, 4),)),
    "9 + 1 tokens, max_model_len is 10": spec(max_model_len=10),
    "request_id: 0": spec(request_id=RequestId("")),
    "request_id: 9999": spec(request_id=RequestId("x" * 9999)),
    "suffixes: 0 tokens, max_tokens is 0": replace(RESERVE, spec=stub_spec("r", (1,), 0)),
    "max_tokens: -1": sampling(max_tokens=-1),
    "temperature: nan": sampling(temperature=float("nan")),
    "temperature: -1": sampling(temperature=-1.0),
    "temperature: inf": sampling(temperature=float("inf")),
    "top_p: 0": sampling(top_p=0.0),
    "top_p: 1.5": sampling(top_p=1.5),
    "top_k: -1": sampling(top_k=-1),
    f"seed: {WORD}": sampling(seed=WORD),
    "number: -1": replace(RESERVE, attempt=Attempt(1, -1)),
    f"router_epoch: {LARGE}": replace(RESERVE, attempt=Attempt(LARGE, 1)),
    "missing_from: 11": replace(PREFILL, missing_from=11),
    "missing_from: -1": replace(PREFILL, missing_from=-1),
    "token_ids: 0 tokens": replace(DONE, token_ids=()),
    "queue_s: nan": replace(DONE, stats=replace(STATS, queue_s=float("nan"))),
    "num_chunks: -1": replace(DONE, stats=replace(STATS, num_chunks=-1)),
    "token_ids: 65 tokens": replace(ANNOUNCE, hand_off=m.HandOff((1,) * 65, 9)),
    "num_computed_tokens: 0": m.HandOffRecord(R, ATTEMPT, m.HandOff((1,), 0)),
    "blocks: a block of no tokens": replace(ANNOUNCE, blocks=(replace(BLOCK, num_tokens=0),)),
    "start: -4": replace(ANNOUNCE, blocks=(replace(BLOCK, start=-4),)),
    "block_id: -1": replace(ANNOUNCE, blocks=(replace(BLOCK, ref=BlockRef(1, -1, 0)),)),
    f"generation: {WORD}": replace(ANNOUNCE, blocks=(replace(BLOCK, ref=BlockRef(1, 0, WORD)),)),
    "verified_until: -1": m.Acknowledge(R, ATTEMPT, -1, False),
    "first_index: -1": m.TokenEvents((replace(EVENT, first_index=-1),)),
    "branch: 64": m.TokenEvents((replace(EVENT, branch=64),)),
    "finish_reason: 'tired'": m.TokenEvents((replace(EVENT, finish_reason="tired"),)),
    "from_index: -1": m.Replay(R, ATTEMPT, -1),
    "num_tokens: -1": m.WantedList((m.WantedItem(R, ATTEMPT, m.Leg.DECODE, (m.Received(0, -1),)),)),
    "num_free_blocks: 5 of 4": m.WorkerHeartbeat(replace(LOAD, num_free_blocks=5)),
    "block_classes: wanted": beating(block_classes=(("lost", 1),)),
    "num_moved: -1": beating(tallies=m.WorkerTallies(transfers=(replace(MOVED, num_moved=-1),))),
    "bucket_counts: 3, wanted 14": beating(
        tallies=m.WorkerTallies(step_seconds=m.HistogramReport((1, 2, 3), 0.5))
    ),
    "bucket_counts: 2, wanted 14": beating(
        tallies=m.WorkerTallies(transfers=(replace(MOVED, seconds=m.HistogramReport((1, 2), 0.5)),))
    ),
    "total: -1": beating(tallies=m.WorkerTallies(step_seconds=m.HistogramReport((), -1.0))),
    "tallies: more than 64 kinds": beating(
        tallies=m.WorkerTallies(refused=tuple((f"kind {i}", 1) for i in range(65)))
    ),
    "num_running: -1": m.WorkerHeartbeat(replace(LOAD, num_running=-1)),
    "decode_step_s: inf": m.WorkerHeartbeat(replace(LOAD, decode_step_s=float("inf"))),
    "step_age_s: -1": m.WorkerHeartbeat(LOAD, -1.0),
    "counts: wanted each": replace(AUDIT, counts=COUNTS[1:]),
    "peer_info: of 'other'": peer(worker_id="other"),
    "peer_info: of 'prefill-0' epoch 9": peer(epoch=9),
    "layout: dtypes ['int3']": peer(
        layout=replace(
            MEMBER.peer_info.layout,
            groups=(replace(MEMBER.peer_info.layout.groups[0], dtype="int3"),),
        )
    ),
    "layout: scales ['int3']": peer(
        layout=replace(
            MEMBER.peer_info.layout,
            groups=(replace(MEMBER.peer_info.layout.groups[0], scales="int3"),),
        )
    ),
    "layout: a pool without positions": peer(layout=replace(MEMBER.peer_info.layout, block_size=0)),
    "roles: ()": membership(replace(MEMBER, roles=())),
}


@pytest.mark.parametrize("body", SOUND, ids=lambda body: type(body).__name__)
def test_what_parties_say_is_possible(body: Body) -> None:
    assert fault(body) == ""


@pytest.mark.parametrize("named", IMPOSSIBLE)
def test_an_impossible_value_is_named(named: str) -> None:
    assert fault(IMPOSSIBLE[named]).startswith(named)


@pytest.mark.parametrize("named", IMPOSSIBLE)
def test_an_impossible_message_is_counted_and_changes_nothing(named: str) -> None:
    worker = make_worker(LocalFabric(), DECODE).worker
    sender = Sender(worker)
    sender.send(membership(MEMBER, version=7))
    worker.outbox.clear()
    before = (worker.load(), dict(worker.members), worker.channels.stamp(ROUTER, RESERVE).heard)
    sender.send(IMPOSSIBLE[named])
    assert worker.channels.refused == {"impossible": 1}
    assert worker.load().tallies == replace(before[0].tallies, refused=(("impossible", 1),))
    assert not worker.outbox
    now = (
        replace(worker.load(), stale_refused=0, tallies=before[0].tallies),
        dict(worker.members),
        worker.channels.stamp(ROUTER, RESERVE).heard,
    )
    assert now == before


def test_default_parameters_are_possible() -> None:
    assert fault(m.Reserve(replace(SPEC, sampling=SamplingParams()), ATTEMPT)) == ""
