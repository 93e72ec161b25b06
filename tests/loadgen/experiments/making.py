"""Made-up repeats and documents, as the load generator writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.cluster.reports.common import dist

Json = dict[str, Any]

MACHINE: Json = {
    "cpu": "a processor",
    "isa": "avx2",
    "cores": 2,
    "memory_bytes": 2**34,
    "os": "Linux",
    "python": "3.11.0",
    "torch": None,
}


def series(itl_s: float, seconds: int = 4) -> list[Json]:
    return [
        {
            "t_s": float(at),
            "width_s": 1.0,
            "sent": 2,
            "completed": 2,
            "output_tokens": 20,
            "itl_s": dist([itl_s, itl_s * 2]) if at != 1 else None,
        }
        for at in range(seconds)
    ]


def server_row(t_s: float, running: int, usage: float, in_flight: int | None = None) -> Json:
    return {
        "t_s": t_s,
        "in_flight": running if in_flight is None else in_flight,
        "num_running": running,
        "num_waiting": 0,
        "num_swapped": 0,
        "queued_tokens": 0,
        "num_at_routers": 0,
        "kv_usage": {"prefill-0": usage, "decode-0": usage / 2},
        "preemptions": 0,
        "recomputed_tokens": 0,
        "blocks_moved": 0,
        "bytes_moved": 0,
        "hit_tokens_local": 0,
        "hit_tokens_moved": 0,
        "hit_tokens_host": 0,
    }


TOTALS = (
    *("queried_tokens", "hit_tokens_local", "hit_tokens_moved", "hit_tokens_host"),
    *("num_evictions", "num_cow_copies", "preemptions_recompute", "preemptions_offload"),
    *("recomputed_tokens_preemption", "recomputed_tokens_recovery", "accepted", "finished_stop"),
    *("finished_length", "aborted", "failed", "rejected", "preempted", "recovered"),
    *("stale_refused", "blocks_moved", "bytes_moved", "blocks_reused", "request_preemptions"),
    "recomputed_prompt_tokens",
)


def request(number: int, ttft_s: float, e2e_s: float, **other: Any) -> Json:
    return {
        "session": number,
        "turn": 0,
        "group": None,
        "is_counted": True,
        "outcome": "completed",
        "error": None,
        "intended_s": 0.5 * number,
        "sent_s": 0.5 * number,
        "ended_s": 0.5 * number + e2e_s,
        "prompt_tokens": 8,
        "cached_tokens": 0,
        "output_tokens": 4,
        "ttft_s": ttft_s,
        "ttst_s": ttft_s + 0.01,
        "tpot_s": 0.01,
        "e2e_s": e2e_s,
        **other,
    }


def repeat(fingerprint: int | str, goodput: float | None = 1.0, ttft_s: float = 0.1) -> Json:
    """One repeat of four requests; its figures follow from these few."""
    gap_s = 1 / goodput if goodput else 1.0
    rows = [request(n, ttft_s * (1 + n / 10), ttft_s + 0.5, intended_s=n * gap_s) for n in range(4)]
    itl = 0.01
    return {
        "completed": 4,
        "failed": 0,
        "cancelled": 0,
        "unfinished": 0,
        "skipped": 0,
        "not_counted": 0,
        "failures": {},
        "first_error": None,
        "duration_s": 4 * gap_s,
        "prompt_tokens": 32,
        "cached_tokens": 0,
        "output_tokens": 16,
        "received_tokens": 16,
        "output_tokens_per_s": 4.0,
        "requests_per_s": 1.0,
        "ttft_s": dist([row["ttft_s"] for row in rows]),
        "ttst_s": dist([row["ttst_s"] for row in rows]),
        "tpot_s": dist([row["tpot_s"] for row in rows]),
        "itl_s": dist([itl] * 12),
        "e2e_s": dist([row["e2e_s"] for row in rows]),
        "cpu_s_per_output_token": 0.01,
        "schedule_lag_s": dist([0.001] * 4),
        "goodput_per_s": goodput,
        "goodput_span_s": 4 * gap_s,
        "slo": None if goodput is None else {"ttft_s": 1.0 if goodput else 0.0, "tpot_s": None},
        "slo_fraction": None if goodput is None else 1.0 if goodput else 0.0,
        "tokens_counted_by": {"ids": 4},
        "generator_cpu_s_per_output_token": 0.001,
        "parts": {
            name: dist([0.01])
            for name in (
                *("queue_s", "prefill_s", "delivery_s", "network_s"),
                *("handoff_s", "decode_wait_s", "first_step_s", "gap_s"),
            )
        },
        "server": {
            "series": [server_row(0.5 * at, 1, 0.1 * at) for at in range(6)],
            "totals": dict.fromkeys(TOTALS, 0),
            "num_missed": 0,
        },
        "fingerprint": f"{fingerprint:0>32}",
        "is_complete": True,
        "series": series(itl),
        "itl_percentiles_s": [itl] * 101,
        "requests": rows,
    }


def run_document(repeats: Sequence[Json], **other: Any) -> Json:
    """As much of a document of ``loadgen run`` as comparisons and reports look at."""
    return {
        "schema": "kvferry.loadgen_run/1",
        "version": "0",
        "commit": "c" * 40,
        "created_at": "2026-01-02T03:04:05+00:00",
        "command": "kvferry loadgen run",
        "machine": MACHINE,
        "ok": True,
        "error": None,
        "repeats": list(repeats),
        "results": repeats[0] if repeats else None,
        "config": {},
        **other,
    }
