"""What a message of the right types may not say: values that no party means.

Every node checks what arrives before it believes any of it, so that a broken peer costs a refused
message and neither a crash nor a block. Pure; knows the messages, not what is done with them: what
is impossible only in a given state is the business of whoever has that state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from kvferry.engine.batch import TokenLogprobs
from kvferry.engine.histogram import STEP_SECONDS, STEP_TOKENS, TRANSFER_SECONDS
from kvferry.engine.request import (
    MAX_BEAM_STOP_TOKEN_IDS,
    MAX_BEAMS,
    MAX_BRANCHES,
    FinishReason,
    RequestSpec,
    SamplingParams,
)
from kvferry.kv_cache.audit import BlockClass
from kvferry.kv_cache.layout import DTYPE_BYTES
from kvferry.worker import messages as m
from kvferry.worker.messages import Body, LoadReport, Member

WORD = 1 << 64  # generations, digests and seeds are below it
COUNT = 1 << 31  # token ids, positions and counts are
LARGE = 1 << 53  # bytes and totals, which JSON must be able to say
NAME_LENGTH = 1024
MAX_KINDS = 64  # of connectors and of refusals: each becomes a series of its own
CLASSES = frozenset(block_class.value for block_class in BlockClass)
FINISHES = frozenset(reason.value for reason in FinishReason)

_WORDS = frozenset({"seed", "digest", "generation"})
_SIGNED = frozenset({"priority"})
_LARGE = frozenset(
    {"epoch", "router_epoch", "version", "membership_version", "query_id", "number", "attempt"}
    | {"queried_tokens", "hit_tokens_local", "hit_tokens_moved", "hit_tokens_host"}
    | {"recomputed_tokens_preemption", "recomputed_tokens_recovery"}
    | {"num_evictions", "num_cow_copies", "preemptions_recompute", "preemptions_offload"}
    | {"num_kv_events", "first", "next_event", "num_moved", "num_leases_expired"}
    | {"bucket_counts", "failures", "refused", "connections_refused"}
    | {"bytes_moved", "block_bytes", "queued_tokens", "num_preemptions", "stale_refused"}
)
_MAY_BE_NEGATIVE = frozenset(
    {"lease_remaining_s"}  # a lease that the next sweep ends
    | {"logprob", "top_logprobs", "bias", "presence_penalty", "frequency_penalty"}
    | {"length_penalty"}
)


def fault(body: Body) -> str:
    """The first impossible value of a message, with its place; empty if there is none."""
    return next(_faults(body), "")


def _faults(body: Body) -> Iterator[str]:
    yield from _numbers(body, type(body).__name__)
    match body:
        case m.PrefillRequest(spec, _, _, missing_from):
            yield from _spec(spec)
            if missing_from > len(spec.kv_prompt()):
                yield f"missing_from: {missing_from}, the prompt has {len(spec.kv_prompt())}"
        case m.Reserve(spec):
            yield from _spec(spec)
        case m.PrefillDone():
            yield from _first_tokens(body.token_ids)
            yield from _logprobs(body.token_ids, body.logprobs)
            yield from _tops(body.prompt_logprobs)
        case m.HandOffRecord(hand_off=hand_off):
            yield from _hand_off(hand_off)
        case m.Announce(blocks=blocks, hand_off=hand_off):
            if hand_off is not None:
                yield from _hand_off(hand_off)
            if any(not block.num_tokens for block in blocks):
                yield "blocks: a block of no tokens"
        case m.TokenEvents(events):
            for event in events:
                yield from _event(event)
        case m.Membership(members=members):
            for member in members:
                yield from _member(member)
        case m.WorkerHeartbeat(load):
            yield from _load(load)
        case m.AuditReport(counts=counts):
            if len(counts) != len(CLASSES) or {name for name, _ in counts} != CLASSES:
                yield f"counts: wanted each of {sorted(CLASSES)} once"


def _numbers(value: Any, name: str) -> Iterator[str]:
    """Every integer in its range, every float finite; negative only where that means something."""
    if isinstance(value, bool | bytes) or value is None:
        return
    if isinstance(value, int):
        limit = WORD if name in _WORDS else LARGE if name in _LARGE else COUNT
        least = -limit if name in _SIGNED else 0
        if not least <= value < limit:
            yield f"{name}: {value}, wanted {least} to {limit - 1}"
    elif isinstance(value, float):
        if not math.isfinite(value) or (value < 0 and name not in _MAY_BE_NEGATIVE):
            yield f"{name}: {value}, wanted a finite number that is not negative"
    elif isinstance(value, str):
        if name.endswith("_id") and not 0 < len(value) <= NAME_LENGTH:
            yield f"{name}: {len(value)} characters, wanted 1 to {NAME_LENGTH}"
    elif isinstance(value, tuple):
        yield from _tuple(value, name)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _numbers(getattr(value, field.name), field.name)


def _tuple(value: tuple[Any, ...], name: str) -> Iterator[str]:
    fields = getattr(value, "_fields", None)
    if fields is not None:
        for field_name, item in zip(fields, value, strict=True):
            yield from _numbers(item, field_name)
    elif value and type(value[0]) is int:  # token ids: the long lists
        limit = LARGE if name in _LARGE else COUNT
        if min(value) < 0 or max(value) >= limit:
            yield f"{name}: {min(value)} to {max(value)}, wanted 0 to {limit - 1}"
    elif value and type(value[0]) is float:  # log-probabilities
        if not all(map(math.isfinite, value)) or (min(value) < 0 and name not in _MAY_BE_NEGATIVE):
            yield f"{name}: {min(value)} to {max(value)}, wanted finite numbers, not negative"
    else:
        for item in value:
            yield from _numbers(item, name)


def _spec(spec: RequestSpec) -> Iterator[str]:
    num_prompt = len(spec.prompt_token_ids)
    if not num_prompt:
        yield "prompt_token_ids: empty"
    branches = spec.branches
    if not 0 < len(branches) == len(spec.suffixes) <= MAX_BRANCHES:
        yield f"branches: {len(branches)} with {len(spec.suffixes)} suffixes, 1 to {MAX_BRANCHES}"
        return
    if max(branches) >= MAX_BRANCHES or list(branches) != sorted(set(branches)):
        yield f"branches: {branches}, wanted ascending numbers below {MAX_BRANCHES}"
    num_output = max(map(len, spec.suffixes))
    if num_output >= spec.sampling.max_tokens:
        yield f"suffixes: {num_output} tokens, max_tokens is {spec.sampling.max_tokens}"
    if num_prompt + num_output >= spec.max_model_len:
        yield f"{num_prompt} + {num_output} tokens, max_model_len is {spec.max_model_len}"
    if spec.sampling.num_beams > 1:
        yield from _search(spec)
    yield from _sampling(spec.sampling)


def _search(spec: RequestSpec) -> Iterator[str]:
    sampling, num_beams = spec.sampling, spec.sampling.num_beams
    if spec.num_branches > 1 or spec.suffixes[0]:
        yield f"num_beams: {num_beams} of several or of begun branches"
    if sampling.constrains or sampling.temperature:
        yield f"num_beams: {num_beams} with what only sampling keeps to"
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        yield f"num_beams: {num_beams} with log-probabilities"
    if len(sampling.stop_token_ids) > MAX_BEAM_STOP_TOKEN_IDS:
        yield f"stop_token_ids: {len(sampling.stop_token_ids)} with num_beams {num_beams}"


def _sampling(sampling: SamplingParams) -> Iterator[str]:
    if not 0 < sampling.top_p <= 1:
        yield f"top_p: {sampling.top_p}, wanted above 0 to 1"
    if sampling.min_p > 1:
        yield f"min_p: {sampling.min_p}, wanted 0 to 1"
    if not sampling.repetition_penalty:
        yield "repetition_penalty: 0"
    if sampling.min_tokens > sampling.max_tokens:
        yield f"min_tokens: {sampling.min_tokens}, max_tokens is {sampling.max_tokens}"
    if not all(sampling.bad_words):
        yield "bad_words: one of no tokens"
    if not 0 < sampling.num_beams <= MAX_BEAMS:
        yield f"num_beams: {sampling.num_beams}, wanted 1 to {MAX_BEAMS}"
    if abs(sampling.length_penalty) > 10:
        yield f"length_penalty: {sampling.length_penalty}, wanted -10 to 10"
    if len({entry.token_id for entry in sampling.logit_bias}) < len(sampling.logit_bias):
        yield "logit_bias: an id stands twice"


def _hand_off(hand_off: m.HandOff) -> Iterator[str]:
    yield from _first_tokens(hand_off.token_ids)
    yield from _logprobs(hand_off.token_ids, hand_off.logprobs)
    yield from _tops(hand_off.prompt_logprobs)
    if not hand_off.num_computed_tokens:
        yield "num_computed_tokens: 0"


def _first_tokens(token_ids: tuple[int, ...]) -> Iterator[str]:
    if not 0 < len(token_ids) <= MAX_BRANCHES:
        yield f"token_ids: {len(token_ids)} tokens, wanted 1 to {MAX_BRANCHES}, one per branch"


def _logprobs(token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> Iterator[str]:
    if logprobs and tuple(entry.token_id for entry in logprobs) != token_ids:
        yield f"logprobs: {len(logprobs)} of other tokens, wanted one per token, or none"
    yield from _tops(logprobs)


def _tops(logprobs: tuple[TokenLogprobs, ...]) -> Iterator[str]:
    if any(len(entry.top_ids) != len(entry.top_logprobs) for entry in logprobs):
        yield "logprobs: as many top_logprobs as top_ids wanted"


def _event(event: m.TokenEvent) -> Iterator[str]:
    yield from _logprobs(event.token_ids, event.logprobs)
    yield from _tops(event.prompt_logprobs)
    if event.branch >= MAX_BRANCHES:
        yield f"branch: {event.branch}, wanted 0 to {MAX_BRANCHES - 1}"
    if event.finish_reason is not None and event.finish_reason not in FINISHES:
        yield f"finish_reason: {event.finish_reason[:20]!r}, wanted one of {sorted(FINISHES)}"


def _member(member: Member) -> Iterator[str]:
    info = member.peer_info
    if (info.worker_id, info.epoch) != (member.ref.node_id, member.ref.epoch):
        yield f"peer_info: of {info.worker_id!r} epoch {info.epoch}, the member is {member.ref}"
    if not member.roles or len(set(member.roles)) < len(member.roles):
        yield f"roles: {member.roles}"
    layout = info.layout
    if not layout.block_size or not layout.groups:
        yield "layout: a pool without positions"
    if any(group.dtype not in DTYPE_BYTES for group in layout.groups):
        yield f"layout: dtypes {[group.dtype for group in layout.groups]}"
    if any(group.scales not in ("", *DTYPE_BYTES) for group in layout.groups):
        yield f"layout: scales {[group.scales for group in layout.groups]}"


def _load(load: LoadReport) -> Iterator[str]:
    if load.num_free_blocks > load.num_blocks:
        yield f"num_free_blocks: {load.num_free_blocks} of {load.num_blocks}"
    if any(name not in CLASSES for name, _ in load.block_classes):
        yield f"block_classes: wanted some of {sorted(CLASSES)}"
    tallies = load.tallies
    for bounds, found in (
        (STEP_SECONDS, tallies.step_seconds),
        (STEP_TOKENS, tallies.step_tokens),
        *((TRANSFER_SECONDS, transfer.seconds) for transfer in tallies.transfers),
    ):
        if len(found.bucket_counts) not in (0, len(bounds) + 1):
            yield f"bucket_counts: {len(found.bucket_counts)}, wanted {len(bounds) + 1}"
    kinds = (tallies.refused, tallies.transfers, *(t.failures for t in tallies.transfers))
    if max(map(len, (*kinds, tallies.connections_refused))) > MAX_KINDS:
        yield f"tallies: more than {MAX_KINDS} kinds"
