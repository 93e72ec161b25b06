"""What the client measured of each request, and the figures made of many. Pure.

Times are readings of one monotonic clock, in seconds. A request is *completed*, *failed* (a typed
error says how), *cancelled* (the client went away on purpose) or *unfinished* (the run was
interrupted). Only completed ones have latencies; only counted ones, those after ramp and warm-up,
go into figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvferry.cluster.closed_loop import latencies_json
from kvferry.cluster.loadgen.goodput import (
    CANCELLED,
    COMPLETED,
    FAILED,
    UNFINISHED,
    Slo,
    goodput_json,
)
from kvferry.cluster.reports.common import Json, dist
from kvferry.cluster.reports.documents import error_json
from kvferry.kv_cache.errors import KVFerryError

BY_IDS, BY_USAGE, BY_CHUNKS = "ids", "usage", "chunks"

TTFT_PARTS = ("queue_s", "prefill_s", "delivery_s", "network_s")
GAP_PARTS = ("handoff_s", "decode_wait_s", "first_step_s")
PARTS = (*TTFT_PARTS, *GAP_PARTS, "gap_s")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the server's last event said of a request; None where it does not know."""

    parts: Mapping[str, float | None] = field(default_factory=dict)
    ttft_s: float | None = None
    blocks_moved: int = 0
    bytes_moved: int = 0
    blocks_reused: int = 0
    num_preemptions: int = 0
    recomputed_prompt_tokens: int = 0
    prefill_worker: str | None = None
    decode_worker: str | None = None


@dataclass(slots=True)
class Receipt:
    """What a target notes while an answer comes.

    Attributes:
        sent_at: when the request was handed to the transport; negative: never.
        token_times: of each token, or of each chunk where the server does not say how many
            tokens a chunk holds.
        token_ids, text: the answer.
        ended_at: when the last event came.
        prompt_tokens, cached_tokens, completion_tokens: by the server's count; None: not told.
        counted_by: ``ids`` (the server named every token), ``usage`` (it gave a total, and
            ``token_times`` may be those of chunks), or ``chunks`` (nothing but chunks).
        finish_reason: why the answer ended, in the server's word; None: it did not say.
    """

    sent_at: float = -1.0
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    ended_at: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    counted_by: str = BY_IDS
    finish_reason: str | None = None
    server: ServerFacts | None = None

    @property
    def was_sent(self) -> bool:
        """Whether it came as far as the transport."""
        return self.sent_at >= 0


@dataclass(slots=True)
class Sample:
    """One request that was sent, and what became of it.

    Attributes:
        session, turn: its place in the plan.
        intended_at: when it should have been sent.
        is_counted: it was sent after ramp and warm-up.
        prompt_tokens: as planned; 0 of texts, whose tokens only the server knows.
    """

    session: int
    turn: int
    group: str | None
    intended_at: float
    wanted_tokens: int
    prompt_tokens: int
    is_counted: bool = True
    outcome: str = UNFINISHED
    error: KVFerryError | None = None
    receipt: Receipt = field(default_factory=Receipt)

    @property
    def lag_s(self) -> float:
        """How much later than intended it was sent."""
        return self.receipt.sent_at - self.intended_at

    @property
    def num_output_tokens(self) -> int:
        """Tokens received; where only chunks came, their number."""
        told = self.receipt.completion_tokens
        return len(self.receipt.token_times) if told is None else told

    @property
    def output_token_ids(self) -> Sequence[int]:
        """What came, as far as ids came."""
        return self.receipt.token_ids

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first token; None without tokens."""
        times = self.receipt.token_times
        return times[0] - self.receipt.sent_at if times else None

    @property
    def itl_s(self) -> Sequence[float]:
        """Gaps between tokens, or between chunks."""
        return [later - earlier for earlier, later in pairwise(self.receipt.token_times)]

    @property
    def ttst_s(self) -> float | None:
        """From sending to the second token."""
        times = self.receipt.token_times
        return times[1] - self.receipt.sent_at if len(times) > 1 else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None of fewer than two."""
        times, count = self.receipt.token_times, self.num_output_tokens
        if len(times) < 2 or count < 2:
            return None
        return (times[-1] - times[0]) / (count - 1)

    @property
    def e2e_s(self) -> float:
        """From sending to the last event."""
        return self.receipt.ended_at - self.receipt.sent_at

    def parts(self) -> dict[str, float | None]:
        """Parts of the time to the first token and of the gap to the second, by the server.

        ``network_s`` is what the client's time to the first token has more than the server's;
        ``gap_s`` is the client's gap.
        """
        server, times = self.receipt.server, self.receipt.token_times
        parts: dict[str, float | None] = dict.fromkeys(PARTS)
        if server is not None:
            parts.update({name: server.parts.get(name) for name in (*TTFT_PARTS, *GAP_PARTS)})
            if self.ttft_s is not None and server.ttft_s is not None:
                parts["network_s"] = self.ttft_s - server.ttft_s
        if len(times) > 1:
            parts["gap_s"] = times[1] - times[0]
        return parts


@dataclass(slots=True)
class Pass:
    """One repeat: its samples in the order in which they were sent.

    ``started_at``: the clock's reading at offset 0; ``cpu_s``: of the servers, if known;
    ``generator_cpu_s``: of this process; ``is_complete``: the whole plan was sent, and measured to
    its end.
    """

    samples: list[Sample] = field(default_factory=list)
    started_at: float = 0.0
    cpu_s: float | None = None
    generator_cpu_s: float = 0.0
    num_skipped: int = 0
    is_complete: bool = False

    @property
    def counted(self) -> list[Sample]:
        """Those that go into figures."""
        return [sample for sample in self.samples if sample.is_counted]

    def of(self, outcome: str) -> list[Sample]:
        """Counted ones that ended so."""
        return [sample for sample in self.counted if sample.outcome == outcome]

    @property
    def failures(self) -> list[KVFerryError]:
        """Why requests failed, those before the counted ones too."""
        return [sample.error for sample in self.samples if sample.error is not None]

    @property
    def duration_s(self) -> float:
        """From the first counted request's intended moment to the last end."""
        counted = [sample for sample in self.counted if sample.receipt.was_sent]
        if not counted:
            return 0.0
        ends = [max(s.receipt.ended_at, s.receipt.sent_at) for s in counted]
        return max(0.0, max(ends) - min(s.intended_at for s in counted))

    @property
    def output_tokens(self) -> int:
        """Received by counted requests that completed."""
        return sum(sample.num_output_tokens for sample in self.of(COMPLETED))

    @property
    def received_tokens(self) -> int:
        """Received by all requests, whatever became of them: what the CPU time was spent on."""
        return sum(sample.num_output_tokens for sample in self.samples)

    @property
    def output_tokens_per_s(self) -> float:
        """Over the duration."""
        return self.output_tokens / self.duration_s if self.duration_s > 0 else 0.0


def results_json(measured: Pass, slo: Slo | None, is_open: bool = False) -> Json:
    """The figures of one repeat, those of ``bench serve`` and more; ``is_open``: see goodput."""
    done, duration = measured.of(COMPLETED), measured.duration_s
    failed, tokens = measured.of(FAILED), measured.output_tokens
    received = measured.received_tokens
    rows = [request_row(sample, measured.started_at) for sample in measured.samples]

    return {
        "completed": len(done),
        "failed": len(failed),
        "cancelled": len(measured.of(CANCELLED)),
        "unfinished": len(measured.of(UNFINISHED)),
        "skipped": measured.num_skipped,
        "not_counted": len(measured.samples) - len(measured.counted),
        "failures": dict(Counter(type(s.error).__name__ for s in failed)),
        "first_error": error_json(measured.failures[0]) if measured.failures else None,
        "duration_s": duration,
        "prompt_tokens": sum(s.receipt.prompt_tokens or s.prompt_tokens for s in done),
        "cached_tokens": _sum([s.receipt.cached_tokens for s in done]),
        "output_tokens": tokens,
        "received_tokens": received,
        "output_tokens_per_s": measured.output_tokens_per_s,
        "requests_per_s": len(done) / duration if duration > 0 else None,
        **latencies_json(done),
        "tpot_s": dist([s.tpot_s for s in done if s.tpot_s is not None]),
        "cpu_s_per_output_token": (
            measured.cpu_s / received if measured.cpu_s is not None and received else None
        ),
        "schedule_lag_s": dist([s.lag_s for s in measured.counted if s.receipt.was_sent]),
        "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s} if slo is not None else None,
        **goodput_json(rows, slo, is_open, duration),
        "tokens_counted_by": dict(Counter(s.receipt.counted_by for s in done)),
        "generator_cpu_s_per_output_token": (
            measured.generator_cpu_s / received if received else None
        ),
    }


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def parts_json(measured: Pass) -> Json:
    """DIST of each part; null where the server does not tell."""
    done = [sample.parts() for sample in measured.of(COMPLETED)]
    return {
        name: dist([value for parts in done if (value := parts[name]) is not None])
        for name in PARTS
    }


def request_row(sample: Sample, started_at: float) -> Json:
    """One request, for plots; moments count from the start of its repeat."""
    receipt = sample.receipt
    is_done = sample.outcome == COMPLETED
    return {
        "session": sample.session,
        "turn": sample.turn,
        "group": sample.group,
        "is_counted": sample.is_counted,
        "outcome": sample.outcome,
        "error": type(sample.error).__name__ if sample.error is not None else None,
        "intended_s": sample.intended_at - started_at,
        "sent_s": receipt.sent_at - started_at if receipt.was_sent else None,
        "ended_s": receipt.ended_at - started_at if receipt.was_sent else None,
        "prompt_tokens": receipt.prompt_tokens or sample.prompt_tokens or None,
        "cached_tokens": receipt.cached_tokens,
        "output_tokens": sample.num_output_tokens,
        "ttft_s": sample.ttft_s,
        "ttst_s": sample.ttst_s,
        "tpot_s": sample.tpot_s,
        "e2e_s": sample.e2e_s if is_done else None,
    }
