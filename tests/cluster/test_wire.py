"""The translation to protobuf: every field of the contract is filled, and with the right thing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvferry.cluster import wire
from kvferry.cluster.intake import ServedModel
from kvferry.cluster.registry import WorkerRecord, role_name
from kvferry.cluster.routed_request import RequestEnd, RoutedRequest
from kvferry.cluster.session import SessionEnd, TextDelta
from kvferry.cluster.token_run import TokenRun
from kvferry.engine.batch import TokenLogprobs
from kvferry.engine.models.config import ModelConfig
from kvferry.engine.request import Attempt, FinishReason
from kvferry.engine.stopping import Finish
from kvferry.protos import kvferry_pb2 as pb
from kvferry.worker import messages as m
from kvferry.worker.description import WorkerDescription
from kvferry.worker.messages import NodeRef, Role
from tests.cluster.routing import Bench, member
from tests.fakes import RecordingListener, stub_layout, stub_spec
from tests.stack import SIZE

TRANSFER = m.TransferStats("local", 3, 96, 1, 2, 1, 0.5, 0.25, 0.125)
PREFILL = m.PrefillStats(0.25, 1.0, 4, recomputed_prompt_tokens=5, num_preemptions=1)
DECODE = m.DecodeStats(0.125, 0.0625, 2, 7, TRANSFER)
# Counts that are truly nothing in this version.
ALWAYS_ZERO = {"branch", "usage.cached_tokens"}


def filled(message: Any, prefix: str = "") -> set[str]:
    """Paths of all fields that say something."""
    found = set()
    for field, value in message.ListFields():
        path = prefix + field.name
        found.add(path)
        if field.message_type is not None and not field.is_repeated:
            found |= filled(value, path + ".")
    return found


def declared(message: Any, prefix: str = "") -> set[str]:
    """Paths of all fields that the contract has."""
    found = set()
    for field in message.DESCRIPTOR.fields:
        path = prefix + field.name
        found.add(path)
        if field.message_type is not None and not field.is_repeated:
            found |= declared(field.message_type._concrete_class, path + ".")
    return found


def ended(
    finish: Finish, decode: m.DecodeStats | None, prefill: m.PrefillStats | None
) -> SessionEnd:
    """A request that has ended after four tokens, in its second attempt."""
    request = RoutedRequest(
        stub_spec("r", range(9), 9),
        RecordingListener(),
        10.0,
        1,
        Attempt(1, 2),
        10.0,
        num_attempts=2,
        dispatched_at=10.5,
        prefill_ref=NodeRef("prefill-0", 2),
        decode_ref=NodeRef("decode-0", 3),
        prefill_stats=prefill,
        decode_stats=decode,
        gap_stats=decode,
    )
    request.branches[0].delivered = [5, 6, 7, 8]
    request.branches[0].token_times = [12.0, 13.0, 13.5, 14.0]
    return SessionEnd(request, RequestEnd(finish), 15.0)


STOPPED = Finish(FinishReason.STOP, "END")


def test_every_field_of_the_terminal_event_is_filled_for_a_disaggregated_request() -> None:
    response = wire.finished(ended(STOPPED, DECODE, PREFILL))
    assert response.request_id == "r"
    body = response.finished
    assert filled(body) == declared(pb.Finished) - ALWAYS_ZERO
    assert (body.finish_reason, body.stop_reason, body.attempt) == ("stop", "END", 2)
    assert body.is_last
    assert body.usage == pb.Usage(prompt_tokens=9, completion_tokens=4)
    assert (body.prefill_worker, body.decode_worker) == ("prefill-0", "decode-0")
    assert body.num_prefill_chunks == 4
    assert body.num_preemptions == 2 + 1, "of both legs"
    assert body.recomputed_prompt_tokens == 7 + 5
    assert body.timing.queue_s == 0.75 and body.timing.prefill_s == 1.0
    assert body.timing.delivery_s == 0.25 and body.timing.ttft_s == 2.0
    assert body.timing.decode_wait_s == 0.125 and body.timing.first_step_s == 0.0625
    assert body.timing.ttst_s == 3.0 and body.timing.e2e_s == 5.0
    assert list(body.timing.itl_s) == [1.0, 0.5, 0.5]
    expected = {name: getattr(TRANSFER, name) for name in TRANSFER.__slots__}
    assert {f.name: getattr(body.transfer, f.name) for f in pb.Transfer.DESCRIPTOR.fields} == (
        expected
    )


def test_every_field_is_filled_for_a_colocated_request_too_and_nothing_counts_twice() -> None:
    decode = replace(DECODE, transfer=None, prefill=PREFILL)
    body = wire.finished(ended(STOPPED, decode, PREFILL)).finished
    moved = {path for path in declared(pb.Finished) if path.startswith("transfer.")}
    assert filled(body) == declared(pb.Finished) - ALWAYS_ZERO - moved
    assert body.transfer == pb.Transfer(), "nothing was to be moved"
    assert body.num_prefill_chunks == 4
    assert body.num_preemptions == 2, "the one worker counts both legs"
    assert body.recomputed_prompt_tokens == 7


def test_what_is_unknown_is_unset_and_not_zero() -> None:
    item = ended(Finish(FinishReason.ABORT), None, None)
    item.request.branches[0].token_times = []
    item.request.prefill_ref = item.request.decode_ref = None
    body = wire.finished(item).finished
    assert filled(body.timing) == {"e2e_s"}
    assert not body.HasField("stop_reason")
    assert not body.HasField("prefill_worker") and not body.HasField("decode_worker")
    assert not body.transfer.HasField("connector")
    assert body.is_last and body.finish_reason == "abort"


@pytest.mark.parametrize(
    ("finish", "reason", "stop"),
    [
        (Finish(FinishReason.STOP), "stop", None),
        (Finish(FinishReason.STOP, 17), "stop", "17"),
        (Finish(FinishReason.STOP, 0), "stop", "0"),
        (Finish(FinishReason.STOP, "x"), "stop", "x"),
        (Finish(FinishReason.LENGTH), "length", None),
    ],
)
def test_a_stop_id_is_told_in_decimal_and_a_stop_string_as_itself(
    finish: Finish, reason: str, stop: str | None
) -> None:
    body = wire.finished(ended(finish, DECODE, PREFILL)).finished
    assert body.finish_reason == reason
    assert (body.stop_reason if body.HasField("stop_reason") else None) == stop


def test_a_prefill_without_decode_still_counts() -> None:
    """Token 1 ended the request."""
    body = wire.finished(ended(Finish(FinishReason.LENGTH), None, PREFILL)).finished
    assert (body.num_prefill_chunks, body.num_preemptions) == (4, 1)
    assert body.recomputed_prompt_tokens == 5


@pytest.mark.parametrize("echo", [False, True])
def test_the_first_event_counts_the_prompt_and_echoes_it_only_when_asked(echo: bool) -> None:
    request = ended(STOPPED, None, None).request
    response = wire.accepted(request, echo)
    assert response.request_id == "r"
    assert response.accepted.prompt_tokens == 9
    assert list(response.accepted.prompt_token_ids) == (list(range(9)) if echo else [])


def test_a_delta_carries_index_ids_and_text() -> None:
    response = wire.delta("r", TextDelta(TokenRun(3, (5, 6)), "xy"))
    assert response.request_id == "r"
    assert response.delta == pb.Delta(branch=0, index=3, token_ids=[5, 6], text="xy")


def test_a_delta_carries_log_probabilities_where_there_are_some() -> None:
    own = (TokenLogprobs(5, -0.5, (5, 7), (-0.5, -1.5)), TokenLogprobs(6, -2.0))
    delta = wire.delta("r", TextDelta(TokenRun(0, (5, 6), own, (own[1],)), "")).delta
    assert [entry.token_id for entry in delta.logprobs] == [5, 6]
    assert dict(delta.logprobs[0].top) == {5: -0.5, 7: -1.5}
    assert delta.logprobs[1] == pb.TokenLogprobs(token_id=6, logprob=-2.0)
    assert list(delta.prompt_logprobs) == [delta.logprobs[1]]


def test_the_served_model_is_described_whole() -> None:
    served = ServedModel("tiny", "1", "llama", "float32", SIZE, stub_layout(4), 32, 300, (2,))
    message = wire.model(served)
    assert filled(message) == declared(pb.Model)
    assert (message.block_size, message.block_bytes, message.kv_dtype) == (4, 32, "int64")


# --- the cluster -------------------------------------------------------------------------------

REF, PEER = NodeRef("decode-0", 3), NodeRef("prefill-0", 2)
LOAD = m.LoadReport(
    membership_version=1,
    num_running=1,
    num_waiting=2,
    num_swapped=4,
    queued_tokens=30,
    num_blocks=8,
    num_free_blocks=6,
    num_reserved=1,
    num_full=3,
    stale_refused=5,
    prefill_tokens_per_s=100.0,
    decode_step_s=0.5,
    cache=m.CacheCounters(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0.5, 0.25),
    peers=(
        m.PeerState(PEER, "local", True, reason="same host"),
        m.PeerState(PEER, "local", False, "why"),
    ),
)


def description(*roles: Role) -> WorkerDescription:
    config = ModelConfig.__new__(ModelConfig)  # not looked at
    return WorkerDescription(
        member(REF, roles or (Role.DECODE,)), 77, "host", 2, "reference", "avx2", ("local",),
        config, SIZE,
        stub_layout(4), "float32", 32, "arithmetic", "node", num_restarts=3,
        placement="node: why", cores=(4, 5),
    )  # fmt: skip


def test_a_live_worker_s_status_is_whole() -> None:
    record = WorkerRecord(member(REF, (Role.DECODE,)), 4, 10.0, LOAD)
    status = wire.worker_status(record, description(), 10.5)
    later = {"kv.num_cached"}
    assert filled(status) == declared(pb.WorkerStatus) - later
    assert status.heartbeat_age_s == 0.5
    assert status.num_waiting == 2 + 3, "those that wait for blocks wait too"
    assert status.num_swapped == 4
    assert (status.kv.num_total, status.kv.num_free, status.kv.usage) == (8, 6, 0.25)
    assert status.kv.block_size == 4
    assert (status.cache.hit_tokens_moved, status.cache.mean_block_idle_s) == (3, 0.25)
    assert [peer.state for peer in status.peers] == ["connected", "failed: why"]
    assert (status.worker.role, status.worker.state) == ("decode", "ready")


def test_a_worker_whose_load_is_unknown_is_starting_and_reports_no_figures() -> None:
    record = WorkerRecord(member(REF, (Role.DECODE,)), 4, 10.0)
    status = wire.worker_status(record, description(), 10.0)
    assert status.worker.state == "starting"
    assert not status.HasField("kv") and not status.HasField("decode_step_s")


def test_a_worker_that_is_gone_is_lost_and_nothing_else() -> None:
    status = wire.lost_worker(REF, description())
    assert status.worker.state == "lost"
    assert filled(status) - {"worker"} == {
        path for path in filled(status) if path.startswith("worker.")
    }


@pytest.mark.parametrize(
    ("roles", "name"),
    [
        ((Role.PREFILL,), "prefill"),
        ((Role.DECODE,), "decode"),
        ((Role.PREFILL, Role.DECODE), "colocated"),
    ],
)
def test_a_worker_with_both_roles_is_called_colocated(roles: tuple[Role, ...], name: str) -> None:
    assert role_name(roles) == name


def test_counters_add_up_what_router_and_workers_refused() -> None:
    bench = Bench()
    router = bench.router
    for name, value in {
        "accepted": 21,
        "finished_stop": 1,
        "finished_length": 2,
        "finished_abort": 3,
        "finished_error": 4,
        "rejected": 5,
        "preempted": 6,
        "recovered": 7,
        "stale_refused": 8,
    }.items():
        router.counters[name] = value
    router.channels.refused["sender"] = 100
    record = router.workers.get(bench.ref("decode-0"))
    assert record is not None
    record.load = LOAD
    message = wire.counters(router)
    assert filled(message) == declared(pb.Counters)
    assert message == pb.Counters(
        accepted=21,
        finished_stop=1,
        finished_length=2,
        aborted=3,
        failed=4,
        rejected=5,
        preempted=6,
        recovered=7,
        stale_refused=8 + 100 + 5,
    )


def test_a_decision_says_where_and_how_long_it_took() -> None:
    bench = Bench()
    bench.now = 2.0
    request, _ = bench.submit()
    (entry,) = bench.router.decisions
    assert not wire.decision(entry).HasField("actual_ttft_s")
    bench.now = 5.0
    bench.grant(request)
    bench.first_token(request)
    message = wire.decision(entry)
    assert filled(message) == declared(pb.Decision) - {"predicted_ttft_s", "cached_tokens"}
    assert message.actual_ttft_s == 3.0
    assert (message.prefill_worker, message.decode_worker) == ("prefill-0", "decode-0")


CLASSES = ("free", "cached", "pinned", "in_transfer", "referenced", "quarantined")


def report(problems: tuple[str, ...] = ()) -> m.AuditReport:
    owner = m.OwnerReport("reader", "r", 2, "decode-0", 1.5)
    nobody = m.OwnerReport("index", "", 0, "", None)
    block = m.BlockReport(3, 9, "pinned", 1, 4, b"\x01\xab", (owner, nobody))
    counts = tuple((name, number) for number, name in enumerate(CLASSES, 1))
    return m.AuditReport(1, 4, 32, counts, problems, (block,))


@pytest.mark.parametrize("with_blocks", [False, True])
def test_an_audit_is_told_whole_with_its_blocks_only_when_asked(with_blocks: bool) -> None:
    message = wire.pool(REF, (Role.DECODE,), report(("a problem",)), with_blocks)
    unset = {"consistent"} if with_blocks else {"consistent", "blocks"}
    assert filled(message) == declared(pb.Pool) - unset
    assert [getattr(message, f"num_{name}") for name in CLASSES] == [1, 2, 3, 4, 5, 6]
    assert message.num_total == 21
    assert not message.consistent and list(message.problems) == ["a problem"]
    assert wire.pool(REF, (Role.DECODE,), report(), with_blocks).consistent


def test_a_block_is_told_with_its_owners_and_what_they_lack_is_unset() -> None:
    (block,) = wire.pool(REF, (Role.DECODE,), report(), True).blocks
    assert filled(block) == declared(pb.Block)
    assert block.hash == "01ab" and block.block_class == "pinned"
    first, second = block.owners
    assert filled(first) == declared(pb.Owner)
    assert (first.peer, first.lease_remaining_s) == ("decode-0", 1.5)
    for name in ("request_id", "peer", "lease_remaining_s"):
        assert not second.HasField(name)
