"""Protobuf messages, and requests as the client saw them, as the JSON of the documents.

The messages carry the documents' names, so one walk over the fields does for all: what is
optional and unset is null, and ``Block.block_class`` is ``class``. Does not know how messages
were got or how documents are printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from kvferry.cluster.client_stream import BranchOutput, Transcript
from kvferry.cluster.errors import Cancelled, status_of
from kvferry.cluster.reports.common import Json
from kvferry.kv_cache.errors import KVFerryError
from kvferry.protos import kvferry_pb2 as pb


def to_json(message: Message, *, without: Iterable[str] = ()) -> Json:
    """Every field of ``message`` under its name in the documents, except those ``without``."""
    skipped = set(without)
    return {
        _json_name(field): _value(message, field)
        for field in message.DESCRIPTOR.fields
        if field.name not in skipped
    }


def _json_name(field: Any) -> str:
    # Without a name of its own a field's json_name is the camel case of its name.
    return "class" if field.json_name == "class" else field.name


def _value(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.is_repeated:
        return [to_json(v) if isinstance(v, Message) else v for v in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return to_json(value) if isinstance(value, Message) else value


def error_json(exc: BaseException | None) -> Json | None:
    """``{code, type, message}``, code being the gRPC status name.

    What ends a command with 2 is its user's argument or file.
    """
    if exc is None:
        return None
    is_usage = getattr(exc, "exit_code", 1) == 2
    code = "INVALID_ARGUMENT" if is_usage else status_of(exc).grpc
    return {"code": code, "type": type(exc).__name__, "message": str(exc)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request and how it ended: ``transcript`` is all that came, ``error`` why no more did."""

    prompt: str
    request_id: str
    transcript: Transcript
    error: KVFerryError | None = None


def request_json(outcome: Outcome) -> Json:
    """REQUEST. What only the terminal event tells is null if none came."""
    seen, error = outcome.transcript, outcome.error
    finished = seen.finished if error is None else None
    broken = "abort" if isinstance(error, Cancelled) else "error"
    branches = [_branch_json(branch, broken) for _, branch in sorted(seen.branches.items())]
    output = {name: value for name, value in branches[0].items() if name != "branch"}
    return {
        "request_id": outcome.request_id or None,
        "prompt": outcome.prompt,
        "prompt_token_ids": list(seen.prompt_token_ids),
        **output,
        "error": error_json(error),
        **_terminal_fields(finished),
        "branches": branches,
        "logprobs": _logprobs_json(seen.logprobs),
        "prompt_logprobs": _logprobs_json(seen.prompt_logprobs),
    }


def _branch_json(branch: BranchOutput, broken: str) -> Json:
    """One branch; ``broken`` is the reason of one that did not come to its end."""
    return {
        "branch": branch.branch,
        "output_token_ids": list(branch.output_token_ids),
        "text": branch.text,
        "finish_reason": branch.finish_reason or broken,
        "stop_reason": branch.stop_reason,
    }


def _logprobs_json(entries: Sequence[pb.TokenLogprobs]) -> list[Json] | None:
    """Likeliest first; null where none were asked for."""
    if not entries:
        return None
    return [
        {
            "token_id": entry.token_id,
            "logprob": entry.logprob,
            "top": [
                {"token_id": token_id, "logprob": logprob} for token_id, logprob in likeliest(entry)
            ],
        }
        for entry in entries
    ]


def likeliest(entry: pb.TokenLogprobs) -> list[tuple[int, float]]:
    """The likeliest tokens of a position, in descending order, ties by id."""
    return sorted(entry.top.items(), key=lambda item: (-item[1], item[0]))


def _terminal_fields(finished: pb.Finished | None) -> Json:
    names = (
        "attempt",
        "prefill_worker",
        "decode_worker",
        "usage",
        "timing",
        "transfer",
        "num_prefill_chunks",
        "num_preemptions",
        "recomputed_prompt_tokens",
    )
    fields = to_json(finished) if finished is not None else {}
    return {name: fields.get(name) for name in names}


def pools_json(audit: pb.AuditResponse, *, with_blocks: bool) -> list[Json]:
    """POOLs of an audit."""
    return [to_json(pool, without=() if with_blocks else ("blocks",)) for pool in audit.pools]


def worker_json(status: pb.WorkerStatus) -> Json:
    """WORKER with the figures that a status adds."""
    return {**to_json(status.worker), **to_json(status, without=("worker",))}


def status_json(status: pb.StatusResponse, decisions: bool = False) -> Json:
    """The fields of ``kvferry status``; ``decisions`` null unless they were asked for."""
    fields = to_json(
        status, without=("workers", "decisions", "version", "machine", "counters", "endpoints")
    )
    return {
        **fields,
        "endpoints": to_json(status.endpoints),
        "workers": [worker_json(worker) for worker in status.workers],
        "counters": to_json(status.counters),
        "decisions": [to_json(entry) for entry in status.decisions] if decisions else None,
    }


def totals_json(requests: Sequence[Json], duration_s: float) -> Json:
    """``totals`` of some REQUESTs that were served together in ``duration_s`` seconds."""

    def total(section: str, name: str) -> int:
        return sum(r[section][name] for r in requests if r[section] is not None)

    def count(name: str) -> int:
        return sum(r[name] or 0 for r in requests)

    completion_tokens = sum(len(r["output_token_ids"]) for r in requests)
    return {
        "num_requests": len(requests),
        "num_failed": sum(r["finish_reason"] not in ("stop", "length") for r in requests),
        "prompt_tokens": total("usage", "prompt_tokens"),
        "completion_tokens": completion_tokens,
        "blocks_moved": total("transfer", "blocks_moved"),
        "bytes_moved": total("transfer", "bytes_moved"),
        "blocks_reused": total("transfer", "blocks_reused"),
        "preemptions": count("num_preemptions"),
        "recomputed_prompt_tokens": count("recomputed_prompt_tokens"),
        "output_tokens_per_s": completion_tokens / duration_s if duration_s > 0 else None,
    }
