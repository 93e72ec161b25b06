"""Every exported metric: its name, type, labels, buckets and meaning, each written once.

``docs/metrics.md`` repeats the meanings and a test holds it to this page. Knows no values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvferry.engine.histogram import STEP_SECONDS, STEP_TOKENS, TRANSFER_SECONDS

COMMON_LABELS = ("model_name", "worker_id", "role")
"""Of every metric: the served model, and which worker or router has counted, in which role."""

LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_GAP = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)


class Kind(StrEnum):
    """Prometheus's types, as an exposition names them."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: as exported; a counter's ends in ``_total``.
        help: one sentence.
        labels: beside ``COMMON_LABELS``.
        bounds: upper ends of a histogram's buckets, but for infinity.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """All of its labels."""
        return (*COMMON_LABELS, *self.labels)

    @property
    def series_names(self) -> tuple[str, ...]:
        """The names that its samples have."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))
        return (self.name,)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"kvferry_{name}", Kind.GAUGE, text, labels)


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"kvferry_{name}_total", Kind.COUNTER, text, labels)


def _histogram(name: str, text: str, bounds: tuple[float, ...], *labels: str) -> Metric:
    return Metric(f"kvferry_{name}", Kind.HISTOGRAM, text, labels, bounds)


# --- what there is now, by worker ---------------------------------------------------------------

INFO = _gauge(
    "info",
    "Always 1; the labels say what a worker runs.",
    *("version", "kernels", "isa", "connector"),
)
WORKER_READY = _gauge(
    "worker_ready", "1 if the worker lives, has told its load and is not draining, else 0."
)
HEARTBEAT_AGE = _gauge(
    "heartbeat_age_seconds", "Seconds since anything was heard of the worker, while it lives."
)
RUNNING = _gauge("num_requests_running", "Sequences in the running batch.")
WAITING = _gauge(
    "num_requests_waiting",
    "Sequences that wait for a place or for blocks; with role router, requests not placed yet.",
)
SWAPPED = _gauge("num_requests_swapped", "Preempted sequences whose KV waits in the host tier.")
KV_USAGE = _gauge("kv_cache_usage_perc", "Share of the pool's blocks that cannot be taken, 0 to 1.")
KV_BLOCKS = _gauge(
    "kv_blocks", "Blocks of the pool, each under its strongest owner; they sum up to it.", "class"
)
LEASES_ACTIVE = _gauge("leases_active", "Leases that keep blocks for readers.")

# --- requests, at the router --------------------------------------------------------------------

ACCEPTED = _counter("requests_accepted", "Requests that were taken in.")
FINISHED = _counter(
    "requests_finished",
    "Accepted requests that have ended, each counted once; at rest they are all accepted ones.",
    "finished_reason",
)
ERRORS = _counter(
    "request_errors", "Accepted requests that ended with an error, by its class.", "type"
)
REJECTED = _counter(
    "requests_rejected",
    "Requests refused before they were accepted, by the error's class.",
    "reason",
)
CONNECTIONS_REFUSED = _counter(
    "connections_refused",
    "Connections refused before anything was asked over them, by port and by why.",
    *("port", "reason"),
)
PROMPT_TOKENS = _counter("prompt_tokens", "Prompt tokens of accepted requests.")
GENERATION_TOKENS = _counter("generation_tokens", "Output tokens delivered, of all branches.")
RECOMPUTED_PROMPT = _counter(
    "recomputed_prompt_tokens",
    "Prompt positions of ended requests that were computed more than once.",
)
REUSED = _counter(
    "reused_tokens", "Positions that a later attempt of an ended request found cached."
)
RECOVERED = _counter(
    "recovered_requests", "New attempts of requests, by what ended the one before.", "cause"
)
DECISIONS = _counter(
    "router_decisions", "Placements, by policy and the reason that it gave.", "policy", "reason"
)
TTFT = _histogram(
    "time_to_first_token_seconds",
    "From receipt at the front door to the first output token there.",
    LATENCY,
)
ITL = _histogram(
    "inter_token_latency_seconds",
    "Between two tokens of one branch at the front door; 0 between tokens that came together.",
    TOKEN_GAP,
)
TPOT = _histogram(
    "request_time_per_output_token_seconds",
    "Mean time between tokens of a request that ended well, first token excluded.",
    TOKEN_GAP,
)
E2E = _histogram(
    "e2e_request_latency_seconds",
    "From receipt to the end of a request that ended well (stop or length).",
    LATENCY,
)
QUEUE_TIME = _histogram(
    "request_queue_time_seconds",
    "Wait at front door and router and then at the prefill worker, of a request that ended well.",
    LATENCY,
)
PREFILL_TIME = _histogram(
    "request_prefill_time_seconds",
    "Prefill as the worker measures it, of a request that ended well.",
    LATENCY,
)
DECODE_TIME = _histogram(
    "request_decode_time_seconds",
    "From the first to the last token at the front door, of a request that ended well.",
    LATENCY,
)
HANDOFF_TIME = _histogram(
    "request_handoff_time_seconds",
    "Gap between tokens 1 and 2 less decode's own wait and first step: transfer and messages.",
    LATENCY,
)
RECOVERY_GAP = _histogram(
    "recovery_gap_seconds",
    "From the loss of an attempt, as the router learns of it, to the next token delivered.",
    LATENCY,
)
DEATHS = _counter(
    "worker_deaths", "Workers taken for dead, by role and by how that was found out.", "cause"
)

# --- engines ------------------------------------------------------------------------------------

STEPS = _histogram(
    "engine_step_seconds", "Time that the model took for one engine step.", STEP_SECONDS
)
ITERATION_TOKENS = _histogram(
    "iteration_tokens", "Positions computed in one engine step.", STEP_TOKENS
)
CACHE_QUERIES = _counter(
    "prefix_cache_queries", "Tokens whose KV was looked for by requests that began on the worker."
)
CACHE_HITS = _counter(
    "prefix_cache_hits",
    "Tokens of these whose KV was there: computed here, moved here, or in the host tier.",
    "source",
)
RECOMPUTED = _counter(
    "recomputed_tokens",
    "Positions computed again, after a preemption here or a loss elsewhere.",
    "reason",
)
PREEMPTIONS = _counter(
    "num_preemptions", "Preemptions, by what became of the sequence's KV.", "kind"
)
EVICTIONS = _counter("kv_evictions", "Cached blocks taken for something else.")
COW_COPIES = _counter("cow_copies", "Blocks copied because a sequence wrote where others read.")

# --- transfers and the protocol -----------------------------------------------------------------

TRANSFER_BLOCKS = _counter(
    "transfer_blocks", "Blocks read from peers and verified, as the source cuts them.", "connector"
)
TRANSFER_BYTES = _counter("transfer_bytes", "Bytes of these.", "connector")
TRANSFER_TIME = _histogram(
    "transfer_seconds",
    "From the first read of a request's blocks to the last one verified, of those that arrived.",
    TRANSFER_SECONDS,
    "connector",
)
TRANSFER_FAILURES = _counter(
    "transfer_failures", "Reads of blocks that gave nothing, by reason.", "connector", "reason"
)
LEASES_EXPIRED = _counter(
    "leases_expired", "Leases ended because their reader made no progress for the stall limit."
)
STALE = _counter(
    "stale_messages_refused",
    "Messages refused because they are of another life, attempt or lease, or impossible.",
    "kind",
)

# fmt: off
CATALOG = (
    INFO, WORKER_READY, HEARTBEAT_AGE, RUNNING, WAITING, SWAPPED, KV_USAGE, KV_BLOCKS,
    LEASES_ACTIVE, ACCEPTED, FINISHED, ERRORS, REJECTED, CONNECTIONS_REFUSED, PROMPT_TOKENS,
    GENERATION_TOKENS,
    RECOMPUTED_PROMPT, REUSED, RECOVERED, DECISIONS, TTFT, ITL, TPOT, E2E, QUEUE_TIME,
    PREFILL_TIME, DECODE_TIME, HANDOFF_TIME, RECOVERY_GAP, DEATHS, STEPS, ITERATION_TOKENS,
    CACHE_QUERIES, CACHE_HITS, RECOMPUTED, PREEMPTIONS, EVICTIONS, COW_COPIES, TRANSFER_BLOCKS,
    TRANSFER_BYTES, TRANSFER_TIME, TRANSFER_FAILURES, LEASES_EXPIRED, STALE,
)
# fmt: on
