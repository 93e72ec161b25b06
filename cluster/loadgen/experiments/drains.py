"""How soon a cluster is itself again after a burst: blocks free, queue empty. Pure.

A *burst* is all requests between two moments at which the client had nothing in flight. After its
end, *reclaim* is the time from the last request's end at the client (it was answered, or given up)
to the first look at the cluster that shows no worker with a request or with a block that one holds;
cached blocks are free. *Recovery* of the queue is the time from the burst's last sending until no
request of it waited for its first token any more.

Looks are some time apart and show what the last heartbeats said, so a reclaim time is too long by
up to a look and a heartbeat, never too short by more than a heartbeat. A burst after which no
look shows the cluster empty before the next burst begins has none, and is counted. Neither has the
last burst of a repeat, after which there is but one look, a second later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kvferry.cluster.loadgen.goodput import CANCELLED
from kvferry.cluster.reports.common import Json, dist

_HELD = ("num_running", "num_waiting", "num_swapped")


@dataclass(slots=True)
class _Burst:
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    ended_s: float = 0.0
    is_cancelled: bool = False

    def add(self, row: Mapping[str, Any]) -> None:
        end = row["ended_s"]
        self.rows.append(row)
        if end >= self.ended_s:
            self.ended_s, self.is_cancelled = end, row["outcome"] == CANCELLED


def drains_json(repeats: Sequence[Mapping[str, Any]]) -> Json | None:
    """Over all bursts of some repeats; None where no server told how it was."""
    told = [repeat for repeat in repeats if repeat["server"] is not None]
    if not told:
        return None
    reclaims: dict[bool, list[float]] = {True: [], False: []}
    recoveries: list[float] = []
    num_bursts = num_unseen = 0
    for repeat in told:
        bursts = _bursts(repeat["requests"])
        looks = repeat["server"]["series"]
        num_bursts += len(bursts)
        recoveries += [_recovery(burst) for burst in bursts]
        for burst, following in pairwise(bursts):
            next_begin = following.rows[0]["sent_s"]
            seen = _emptied(looks, burst.ended_s, next_begin)
            if seen is None:
                num_unseen += 1
            else:
                reclaims[burst.is_cancelled].append(seen - burst.ended_s)
    return {
        "num_bursts": num_bursts,
        "num_not_seen_empty": num_unseen,
        "reclaim_after_cancel_s": dist(reclaims[True]),
        "reclaim_after_answer_s": dist(reclaims[False]),
        "queue_recovery_s": dist(recoveries),
    }


def _bursts(requests: Sequence[Mapping[str, Any]]) -> list[_Burst]:
    sent = [row for row in requests if row["sent_s"] is not None and row["ended_s"] is not None]
    bursts: list[_Burst] = []
    for row in sorted(sent, key=lambda row: float(row["sent_s"])):
        if not bursts or row["sent_s"] > bursts[-1].ended_s:
            bursts.append(_Burst())
        bursts[-1].add(row)
    return bursts


def _recovery(burst: _Burst) -> float:
    """One that never got a first token waited until its end."""
    last_sent = max(row["sent_s"] for row in burst.rows)
    served = max(
        row["ended_s"] if row["ttft_s"] is None else row["sent_s"] + row["ttft_s"]
        for row in burst.rows
    )
    return max(0.0, float(served - last_sent))


def _emptied(looks: Sequence[Mapping[str, Any]], after_s: float, until_s: float) -> float | None:
    """When the first look after ``after_s`` saw nothing held.

    A look that lacks a worker, which has died, knows nothing of its blocks.
    """
    workers = {worker for look in looks for worker in look["kv_usage"]}
    for look in looks:
        if look["t_s"] < after_s:
            continue
        if look["t_s"] >= until_s:
            return None
        is_whole = workers == look["kv_usage"].keys()
        is_idle = not any(look[name] for name in _HELD)
        if is_whole and is_idle and not any(look["kv_usage"].values()):
            return float(look["t_s"])
    return None
