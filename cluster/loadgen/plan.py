"""From settings to a plan: every session of one repeat, and when each begins. Pure but for files.

A plan is a function of settings, repeat and vocabulary: nothing else is drawn while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvferry.cluster.loadgen import prompt_files
from kvferry.cluster.loadgen.arrivals import OpenLoop, TraceTimes, closed_starts
from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.lengths import parse_lengths
from kvferry.cluster.loadgen.sessions import Session, Turn, check_form, fingerprint
from kvferry.cluster.loadgen.settings import AGENTS, PROMPTS, TRACE, Settings
from kvferry.cluster.loadgen.traces import Trace, TraceRow, read_trace
from kvferry.cluster.loadgen.workloads import Cancels, Source, Synthetic
from kvferry.cluster.reports.common import Json, dist

T = TypeVar("T")

WARM_UP = -1  # the "repeat" whose sessions warm up


@dataclass(frozen=True, slots=True)
class Plan:
    """What one repeat sends.

    Attributes:
        offsets: when each session begins, in an open loop; None: a closed one.
        client_starts: when each client of a closed loop begins; empty in an open one.
    """

    sessions: tuple[Session, ...]
    offsets: tuple[float, ...] | None
    client_starts: tuple[float, ...] = ()

    @property
    def num_requests(self) -> int:
        """Turns of all sessions."""
        return sum(len(session.turns) for session in self.sessions)

    @property
    def fingerprint(self) -> str:
        """Equal for equal plans."""
        return fingerprint(self.sessions, self.offsets)


def make_plan(settings: Settings, repeat: int, vocab_size: int) -> Plan:
    """The plan of one repeat; ``settings`` are resolved. Raises BadLoad."""
    source = Source(settings.seed, repeat, vocab_size)
    sessions, times = _sessions(settings, source)
    for session in sessions:
        check_form(session, settings.send)
    if not settings.is_open:
        starts = closed_starts(settings.clients, settings.ramp)
        return Plan(tuple(sessions), None, tuple(starts))
    rng = source.rng("arrivals")
    if settings.rate is not None:
        loop = OpenLoop(
            settings.rate,
            _known(settings.arrival),
            settings.burstiness or 1.0,
            settings.ramp,
            settings.on or 0.0,
            settings.off or 0.0,
        )
        offsets = loop.offsets(len(sessions), rng)
    else:
        trace_times = TraceTimes(_known(settings.stretch), _known(settings.grid))
        offsets = trace_times.offsets(times, rng)
    return Plan(tuple(sessions), tuple(offsets))


def warm_up_plan(settings: Settings, vocab_size: int) -> Plan:
    """The first ``warm_up`` sessions of a repeat that no other has tokens in common with."""
    plan = make_plan(settings, WARM_UP, vocab_size)
    sessions = plan.sessions[: settings.warm_up]
    return Plan(sessions, None, tuple(closed_starts(settings.clients, 0.0)))


def _sessions(settings: Settings, source: Source) -> tuple[list[Session], list[float]]:
    """The sessions, and a trace's own times."""
    cancels = Cancels(_known(settings.cancel_share), _known(settings.cancel_within))
    if settings.workload == TRACE:
        trace = _trace(settings)
        sessions = trace_sessions(trace, source, cancels)
        return sessions, [row.at_s for row in trace.rows]
    output_tokens = parse_lengths(_known(settings.output_tokens))
    if settings.workload == PROMPTS:
        rows = prompt_files.read_prompts(Path(_known(settings.prompts)))
        count = settings.num_requests or len(rows)
        think_s = _known(settings.think)
        return (
            prompt_files.sessions(rows, count, source, output_tokens, think_s, cancels),
            [],
        )
    opening = settings.opening_tokens
    synthetic = Synthetic(
        input_tokens=parse_lengths(_known(settings.input_tokens)),
        output_tokens=output_tokens,
        opening_tokens=parse_lengths(opening) if opening is not None else None,
        shared_ratio=1.0 if settings.shared_ratio is None else settings.shared_ratio,
        groups=settings.groups or 1,
        turns=parse_lengths(settings.turns or "1"),
        think_s=settings.think or 0.0,
        has_tools=settings.workload == AGENTS,
        cancels=cancels,
    )
    return synthetic.sessions(_known(settings.num_requests), source), []


def _known(value: T | None) -> T:
    assert value is not None, "settings are not resolved"
    return value


def _trace(settings: Settings) -> Trace:
    trace = read_trace(
        Path(_known(settings.trace)), _known(settings.trace_format), settings.num_requests
    )
    return trace.divided(_known(settings.divide_input), _known(settings.divide_output))


def trace_sessions(trace: Trace, source: Source, cancels: Cancels) -> list[Session]:
    """One request per row, of made-up tokens: a block's are a function of its hash id alone."""
    blocks: dict[int, tuple[int, ...]] = {}
    sessions = []
    for number, row in enumerate(trace.rows):
        after = row.cancel_after_s
        if after is None:
            after = cancels.draw(source.rng("session", number))
        turn = Turn(
            token_ids=_prompt(row, number, trace.block_tokens, source, blocks),
            output_tokens=row.output_tokens,
            cancel_after_s=after,
        )
        sessions.append(Session(number, (turn,), group=row.group))
    return sessions


def _prompt(
    row: TraceRow,
    number: int,
    block_tokens: int,
    source: Source,
    blocks: dict[int, tuple[int, ...]],
) -> tuple[int, ...]:
    ids: list[int] = []
    for block in row.hash_ids or ():
        if block not in blocks:
            blocks[block] = source.tokens(block_tokens, "block", block)
        ids.extend(blocks[block])
    missing = row.input_tokens - len(ids)
    if missing > 0:  # positions of which the trace does not say whose they are
        ids.extend(source.tokens(missing, "row", number))
    return tuple(ids[: row.input_tokens])


def check_fits(plan: Plan, max_model_len: int) -> None:
    """Raises BadLoad if a session can become longer than the model takes."""
    for session in plan.sessions:
        tokens = session.most_tokens()
        if tokens is not None and tokens > max_model_len:
            raise BadLoad(
                f"session {session.number}: {tokens} tokens of prompt and output; the model takes "
                f"{max_model_len} together: ask for fewer, or divide the trace's lengths"
            )


def workload_json(plan: Plan, settings: Settings) -> Json:
    """``workload`` of the document: what ``bench serve`` says, and what a plan has beside."""
    turns = [turn for session in plan.sessions for turn in session.turns]
    inputs = [len(turn.token_ids) for turn in turns if not turn.text]
    outputs = [turn.output_tokens for turn in turns]
    openings = [len(session.opening) for session in plan.sessions if session.opening]
    shared = [session for session in plan.sessions if session.group is not None]
    return {
        "kind": settings.workload,
        "input_tokens": _same(inputs) if len(inputs) == len(turns) and not openings else None,
        "output_tokens": _same(outputs),
        "concurrency": None if settings.is_open else settings.clients,
        "rate": settings.rate,
        "num_requests": len(turns),
        "num_sessions": len(plan.sessions),
        "num_grouped": len(shared),
        "num_cancels": sum(turn.cancel_after_s is not None for turn in turns),
        "seed": settings.seed,
        "planned_s": plan.offsets[-1] if plan.offsets else None,
        "new_tokens": dist([float(count) for count in inputs]),
        "wanted_tokens": dist([float(count) for count in outputs]),
        "opening_tokens": dist([float(count) for count in openings]),
        "reused_fraction": reused_fraction(plan.sessions),
        "fingerprint": plan.fingerprint,
    }


def _same(counts: Sequence[int]) -> int | None:
    return counts[0] if counts and min(counts) == max(counts) else None


def reused_fraction(sessions: Sequence[Session], unit: int = 16) -> float | None:
    """The share of prompt tokens in blocks of ``unit`` that an earlier session began with, too.

    Only of first turns: what later ones repeat depends on the answers. None of texts.
    """
    seen: set[tuple[int, tuple[int, ...]]] = set()
    total = again = 0
    for session in sessions:
        if session.is_text:
            return None
        ids = (*session.opening, *session.turns[0].token_ids)
        total += len(ids)
        chain = 0
        for start in range(0, len(ids) - unit + 1, unit):
            key = (chain, ids[start : start + unit])
            again += unit * (key in seen)
            seen.add(key)
            chain = hash(key)
    return again / total if total else None
