"""From the router's objects to protobuf messages: the gRPC edge's translation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvferry.cluster.decisions import Decision
from kvferry.cluster.intake import ServedModel
from kvferry.cluster.registry import WorkerRecord, role_name
from kvferry.cluster.routed_request import RoutedRequest
from kvferry.cluster.router import Router
from kvferry.cluster.session import BranchEnd, SessionEnd, TextDelta
from kvferry.cluster.timing import RequestTiming, request_timing
from kvferry.engine.batch import TokenLogprobs
from kvferry.engine.stopping import Finish
from kvferry.protos import kvferry_pb2 as pb
from kvferry.worker import messages as m
from kvferry.worker.description import WorkerDescription
from kvferry.worker.messages import NodeRef, Role


def accepted(request: RoutedRequest, echo: bool) -> pb.GenerateResponse:
    """The stream's first event."""
    prompt = request.spec.prompt_token_ids
    return pb.GenerateResponse(
        request_id=request.request_id,
        accepted=pb.Accepted(prompt_tokens=len(prompt), prompt_token_ids=prompt if echo else ()),
    )


def delta(request_id: str, item: TextDelta) -> pb.GenerateResponse:
    """New tokens, their text, and their log-probabilities where wanted."""
    run = item.run
    return pb.GenerateResponse(
        request_id=request_id,
        delta=pb.Delta(
            branch=run.branch,
            index=run.first_index,
            token_ids=run.token_ids,
            text=item.text,
            logprobs=[_logprobs(entry) for entry in run.logprobs],
            prompt_logprobs=[_logprobs(entry) for entry in run.prompt_logprobs],
        ),
    )


def _logprobs(entry: TokenLogprobs) -> pb.TokenLogprobs:
    top = dict(zip(entry.top_ids, entry.top_logprobs, strict=True))
    return pb.TokenLogprobs(token_id=entry.token_id, logprob=entry.logprob, top=top)


def finished(item: SessionEnd) -> pb.GenerateResponse:
    """The terminal event of a request that did not fail."""
    request, finish = item.request, item.end.finish
    decode = request.decode_stats
    body = pb.Finished(
        branch=item.end.branch,
        finish_reason=finish.reason.value,
        usage=pb.Usage(
            prompt_tokens=len(request.spec.prompt_token_ids),
            cached_tokens=request.num_cached_tokens,
            completion_tokens=request.num_delivered,
        ),
        timing=_timing(request_timing(request, item.ended_at)),
        transfer=_transfer(decode.transfer if decode is not None else None),
        attempt=request.num_attempts,
        is_last=True,
        prefill_worker=request.prefill_worker,
        decode_worker=request.decode_worker,
        num_prefill_chunks=request.num_prefill_chunks,
        num_preemptions=request.num_preemptions,
        recomputed_prompt_tokens=request.recomputed_prompt_tokens,
    )
    _set_stop_reason(body, finish)
    return pb.GenerateResponse(request_id=request.request_id, finished=body)


def branch_end(request_id: str, item: BranchEnd) -> pb.GenerateResponse:
    """The last event of a branch while others go on."""
    body = pb.Finished(branch=item.branch, finish_reason=item.finish.reason.value)
    _set_stop_reason(body, item.finish)
    return pb.GenerateResponse(request_id=request_id, finished=body)


def _set_stop_reason(body: pb.Finished, finish: Finish) -> None:
    if finish.stop_reason is not None:
        body.stop_reason = str(finish.stop_reason)


def _timing(timing: RequestTiming) -> pb.Timing:
    return pb.Timing(
        queue_s=timing.queue_s,
        prefill_s=timing.prefill_s,
        delivery_s=timing.delivery_s,
        ttft_s=timing.ttft_s,
        handoff_s=timing.handoff_s,
        decode_wait_s=timing.decode_wait_s,
        first_step_s=timing.first_step_s,
        ttst_s=timing.ttst_s,
        tpot_s=timing.tpot_s,
        e2e_s=timing.e2e_s,
        itl_s=timing.itl_s,
    )


def _transfer(stats: m.TransferStats | None) -> pb.Transfer:
    if stats is None:
        return pb.Transfer()
    return pb.Transfer(
        connector=stats.connector or None,
        blocks_moved=stats.blocks_moved,
        bytes_moved=stats.bytes_moved,
        blocks_reused=stats.blocks_reused,
        reads_failed=stats.reads_failed,
        blocks_before_last_chunk=stats.blocks_before_last_chunk,
        transfer_s=stats.transfer_s,
        transfer_exposed_s=stats.transfer_exposed_s,
        first_use_setup_s=stats.first_use_setup_s,
    )


def model(served: ServedModel) -> pb.Model:
    """The served model."""
    group = served.layout.groups[0]
    return pb.Model(
        name=served.name,
        revision=served.revision,
        architecture=served.architecture,
        dtype=served.dtype,
        kv_dtype=group.dtype,
        block_size=served.layout.block_size,
        block_bytes=served.layout.block_bytes(),
        max_model_len=served.max_model_len,
        num_layers=group.num_layers,
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        vocab_size=served.vocab_size,
        weight_bytes=served.size.weight_bytes,
        num_layer_parameters=served.size.num_layer_parameters,
        num_head_parameters=served.size.num_head_parameters,
    )


def worker_status(
    record: WorkerRecord, description: WorkerDescription, now: float
) -> pb.WorkerStatus:
    """One live worker."""
    load = record.load
    status = pb.WorkerStatus(
        num_restarts=description.num_restarts,
        worker=_worker(record.ref, description, _state(record)),
        heartbeat_age_s=now - record.last_heard,
    )
    if load is None:
        return status
    status.num_running = load.num_running
    status.num_waiting = load.num_waiting + load.num_full
    status.num_swapped = load.num_swapped
    status.queued_tokens = load.queued_tokens
    status.kv.CopyFrom(
        pb.KVUsage(
            num_total=load.num_blocks,
            num_free=load.num_free_blocks - load.num_cached_blocks,
            num_cached=load.num_cached_blocks,
            usage=1.0 - load.num_free_blocks / load.num_blocks,
            block_size=record.block_size,
        )
    )
    status.cache.CopyFrom(pb.CacheCounters(**dataclasses.asdict(load.cache)))
    if load.prefill_tokens_per_s is not None:
        status.prefill_tokens_per_s = load.prefill_tokens_per_s
    if load.decode_step_s is not None:
        status.decode_step_s = load.decode_step_s
    status.peers.extend(
        pb.Peer(
            worker_id=peer.ref.node_id,
            epoch=peer.ref.epoch,
            connector=peer.connector,
            state="connected" if peer.connected else f"failed: {peer.error}",
            reason=peer.reason,
        )
        for peer in load.peers
    )
    return status


def _state(record: WorkerRecord) -> str:
    if record.draining:
        return "draining"
    return "ready" if record.load is not None else "starting"


def lost_worker(ref: NodeRef, description: WorkerDescription) -> pb.WorkerStatus:
    """A worker that is no longer alive."""
    return pb.WorkerStatus(worker=_worker(ref, description, "lost"))


def _worker(ref: NodeRef, description: WorkerDescription, state: str) -> pb.Worker:
    return pb.Worker(
        worker_id=ref.node_id,
        role=role_name(description.member.roles),
        state=state,
        epoch=ref.epoch,
        pid=description.pid,
        host=description.host,
        node_id=description.node_id,
        address=description.member.address,
        threads=description.threads,
        kernels=pb.Kernels(implementation=description.kernels, isa=description.isa),
        connectors=description.connectors,
        placement=description.placement or None,
        cores=description.cores,
    )


def counters(router: Router) -> pb.Counters:
    """The router's totals since it began."""
    count = router.counters
    refused = count["stale_refused"] + router.channels.refused.total()
    refused += sum(r.load.stale_refused for r in router.workers if r.load is not None)
    return pb.Counters(
        accepted=count["accepted"],
        finished_stop=count["finished_stop"],
        finished_length=count["finished_length"],
        aborted=count["finished_abort"],
        failed=count["finished_error"],
        rejected=count["rejected"],
        preempted=count["preempted"],
        recovered=count["recovered"],
        stale_refused=refused,
    )


def decision(entry: Decision) -> pb.Decision:
    """One placement."""
    return pb.Decision(
        request_id=entry.request_id,
        policy=entry.policy,
        prefill_worker=entry.prefill_worker,
        decode_worker=entry.decode_worker,
        actual_ttft_s=entry.actual_ttft_s,
        cached_tokens=entry.cached_tokens,
        reason=entry.reason,
    )


def pool(ref: NodeRef, roles: Sequence[Role], report: m.AuditReport, with_blocks: bool) -> pb.Pool:
    """One worker's audit."""
    counts = dict(report.counts)
    return pb.Pool(
        worker_id=ref.node_id,
        role=role_name(roles),
        epoch=ref.epoch,
        block_size=report.block_size,
        block_bytes=report.block_bytes,
        num_total=sum(counts.values()),
        num_free=counts["free"],
        num_cached=counts["cached"],
        num_pinned=counts["pinned"],
        num_in_transfer=counts["in_transfer"],
        num_referenced=counts["referenced"],
        num_quarantined=counts["quarantined"],
        consistent=not report.problems,
        problems=report.problems,
        blocks=[_block(block) for block in report.blocks] if with_blocks else (),
    )


def _block(block: m.BlockReport) -> pb.Block:
    return pb.Block(
        block_id=block.block_id,
        generation=block.generation,
        block_class=block.block_class,
        ref_count=block.ref_count,
        num_tokens=block.num_tokens,
        hash=block.block_hash.hex() if block.block_hash is not None else None,
        owners=[
            pb.Owner(
                kind=owner.kind,
                request_id=owner.request_id or None,
                attempt=owner.attempt,
                peer=owner.peer or None,
                lease_remaining_s=owner.lease_remaining_s,
            )
            for owner in block.owners
        ],
    )
