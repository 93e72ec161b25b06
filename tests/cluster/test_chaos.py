"""What the chaos command counts, and how it judges: a fault that it misses would be no finding."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest

from kvferry.cluster.chaos.cells import CELLS, FAULTS, STATES, TARGETS, Cell, UnknownCells, select
from kvferry.cluster.chaos.experiment import longest_wait
from kvferry.cluster.chaos.load import judge
from kvferry.cluster.chaos.results import CellResult, Soak, Trial, verdict
from kvferry.cluster.chaos.streams import NO_FAULTS, Faults, StreamRecord
from kvferry.cluster.chaos.workload import (
    BACKGROUND,
    BLOCKERS,
    DECODE_BLOCKS,
    ENDLESS,
    LONG_TOKENS,
    TARGET,
    settings,
)
from kvferry.cluster.cli import app
from kvferry.cluster.cli.chaos import COMMAND, Findings, document_fields
from kvferry.cluster.cli.command import Result, RunFailed
from kvferry.cluster.config import load_config
from kvferry.cluster.deaths import Death
from kvferry.cluster.errors import Internal, WorkerLost
from kvferry.protos import kvferry_pb2 as pb
from kvferry.worker.messages import NodeRef
from tests.cluster import documents

REFERENCE = [10, 11, 12, 13]
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def delta(index: int, *ids: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id="r", delta=pb.Delta(index=index, token_ids=ids))


FINISHED = pb.GenerateResponse(request_id="r", finished=pb.Finished(is_last=True))


def recorded(*responses: pb.GenerateResponse) -> StreamRecord:
    record = StreamRecord()
    for now, response in enumerate(responses):
        record.add(response, float(now))
    return record


# --- cells --------------------------------------------------------------------------------------


def test_every_target_meets_every_fault_in_every_state_once() -> None:
    assert len(CELLS) == len(set(CELLS)) == len(TARGETS) * len(FAULTS) * len(STATES) == 40
    assert select([]) == CELLS


def test_no_target_is_met_twice_in_a_row() -> None:
    targets = [cell.target for cell in CELLS]
    assert all(one != other for one, other in pairwise(targets))


def test_a_tables_rows_stand_by_target_then_fault_then_state() -> None:
    ordered = sorted(CELLS, key=lambda cell: cell.place)
    assert [cell.target for cell in ordered] == [t for t in TARGETS for _ in range(10)]
    assert [cell.state for cell in ordered] == list(STATES) * 8


def test_patterns_choose_cells_by_name_and_keep_their_order() -> None:
    chosen = select(["decode/kill/*", "*/kill/decoding"])
    assert {cell.name for cell in chosen} == {
        *(f"decode/kill/{state}" for state in STATES),
        *(f"{target}/kill/decoding" for target in TARGETS),
    }
    assert [CELLS.index(cell) for cell in chosen] == sorted(CELLS.index(cell) for cell in chosen)


def test_a_pattern_that_names_no_cell_is_refused_by_name() -> None:
    with pytest.raises(UnknownCells, match=r"'decode/burn/'.*prefill, decode, router, client"):
        select(["decode/kill/*", "decode/burn/"])


# --- streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("responses", "faults"),
    [
        ((delta(0, 10, 11), delta(2, 12, 13), FINISHED), NO_FAULTS),
        ((delta(0, 10, 11),), NO_FAULTS),  # a right prefix of a stream that broke
        ((), NO_FAULTS),
        ((delta(0, 10, 11), FINISHED), Faults(lost=2)),
        ((FINISHED,), Faults(lost=4)),
        ((delta(0, 10), delta(2, 12, 13), FINISHED), Faults(lost=1)),
        ((delta(0, 10), delta(2, 12)), Faults(lost=1)),
        ((delta(0, 10, 11), delta(1, 11, 12), delta(3, 13), FINISHED), Faults(repeated=1)),
        ((delta(0, 10, 99, 12, 13), FINISHED), Faults(wrong=1)),
        ((delta(0, 10, 11, 12, 13, 14), FINISHED), Faults(wrong=1)),
    ],
)
def test_every_fault_of_a_stream_is_counted(
    responses: tuple[pb.GenerateResponse, ...], faults: Faults
) -> None:
    assert recorded(*responses).faults(REFERENCE) == faults


def test_the_longest_gap_is_between_two_tokens() -> None:
    record = recorded(delta(0, 10), FINISHED, FINISHED, delta(1, 11, 12))
    assert record.longest_gap_s == 3.0
    assert recorded(delta(0, 10)).longest_gap_s is None


def test_a_stream_served_anew_waits_since_the_last_token_or_the_signal() -> None:
    broken, served = recorded(delta(0, 10)), StreamRecord(times=[7.0, 7.5])
    assert longest_wait([broken, served], signalled_at=0.0) == 7.0
    assert longest_wait([broken, served], signalled_at=3.0) == 4.0
    assert longest_wait([StreamRecord(), served], signalled_at=3.0) == 4.0
    assert longest_wait([broken, StreamRecord()], signalled_at=0.0) is None
    assert longest_wait([served], signalled_at=0.0) == 0.5


# --- judgement ----------------------------------------------------------------------------------


def judged(*records: StreamRecord, router_ended: bool = False) -> tuple[Faults, list[str]]:
    return judge([(TARGET, list(records))], {TARGET: REFERENCE}, router_ended)


WHOLE = (delta(0, *REFERENCE), FINISHED)


def test_a_whole_stream_is_no_finding() -> None:
    assert judged(recorded(*WHOLE)) == (NO_FAULTS, [])


def test_a_stream_may_break_only_with_its_router() -> None:
    broken = recorded(delta(0, 10))
    broken.error = WorkerLost("gone")
    assert judged(broken, recorded(*WHOLE), router_ended=True) == (NO_FAULTS, [])
    assert judged(broken, recorded(*WHOLE)) == (NO_FAULTS, ["a stream ended with WorkerLost: gone"])


def test_a_stream_that_is_never_served_is_a_finding() -> None:
    broken, failed = recorded(delta(0, 10)), recorded()
    broken.error, failed.error = WorkerLost("gone"), Internal("oops")
    assert judged(broken, failed, router_ended=True)[1] == ["a stream ended with Internal: oops"]
    assert judged(broken, router_ended=True)[1] == ["a stream at last ended with WorkerLost: gone"]


def test_wrong_tokens_before_the_break_are_a_finding_too() -> None:
    broken = recorded(delta(0, 99))
    broken.error = WorkerLost("gone")
    faults, notes = judged(broken, recorded(*WHOLE), router_ended=True)
    assert faults == Faults(wrong=1)
    assert len(notes) == 1


CELL = Cell("decode", "kill", "decoding")
GOOD = Trial(True, (), NO_FAULTS, 0, 1.5, 2.5, 7)


def result(*trials: Trial, missed: tuple[str, ...] = ()) -> CellResult:
    return CellResult(CELL, list(trials), missed=list(missed))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda: result(), "tokens or blocks"),
        (lambda: result(missed=("not seen decoding",)), "not seen decoding"),
        (lambda: result(GOOD, replace(GOOD, survived=False, notes=("oops",))), "oops"),
        (lambda: result(replace(GOOD, faults=Faults(lost=1))), "tokens or blocks"),
        (lambda: result(replace(GOOD, faults=Faults(repeated=1))), "tokens or blocks"),
        (lambda: result(replace(GOOD, faults=Faults(wrong=1))), "tokens or blocks"),
        (lambda: result(replace(GOOD, blocks_leaked=1)), "tokens or blocks"),
    ],
)
def test_whatever_is_not_as_it_must_be_fails_the_run(
    spoil: Callable[[], CellResult], why: str
) -> None:
    found = verdict([result(GOOD), spoil()], None, [])
    assert found is not None
    assert found.startswith(f"{CELL.name}: ") and why in found


def test_deaths_for_nothing_and_failures_under_load_fail_the_run() -> None:
    death = Death(NodeRef("prefill-1", 4), "silent for 1.6 s", 12.0)
    assert verdict([result(GOOD)], Soak(300.0, 500, 0, 0.97), []) is None
    assert "prefill-1" in str(verdict([], None, [death]))
    assert "3 of 500" in str(verdict([], Soak(300.0, 500, 3, 0.97), []))


# --- the document -------------------------------------------------------------------------------


def document(findings: Findings) -> dict[str, Any]:
    fields = document_fields(findings, load_config(None, settings(slow_transfers=True)))
    assert COMMAND.document is not None
    return documents.parse(COMMAND.document.render(Result(fields), ["chaos", "--json"], NOW))


def test_the_document_keeps_its_schema_and_adds_up() -> None:
    model = pb.Model(name="m", revision="r", architecture="a", dtype="float32", kv_dtype="float32")
    spoilt = replace(GOOD, survived=False, notes=("oops",), faults=Faults(1, 2, 3), blocks_leaked=4)
    client = CellResult(Cell("client", "kill", "queued"), [replace(GOOD, detection_s=0.01)])
    found = document(Findings(model, [result(GOOD), result(spoilt), client], None, []))
    assert found["topology"] == {"prefill": 2, "decode": 2, "routers": 1}
    good, bad, _ = found["cells"]
    assert (good["tried"], good["survived"], good["why"]) == (1, 1, None)
    assert (bad["tried"], bad["survived"], bad["why"]) == (1, 0, "oops")
    totals = found["totals"]
    assert (totals["tried"], totals["survived"]) == (3, 2)
    names = ("tokens_lost", "tokens_repeated", "tokens_wrong", "blocks_leaked")
    assert [totals[name] for name in names] == [bad[name] for name in names] == [1, 2, 3, 4]
    assert totals["detection_s"]["n"] == 2  # a client's end is not a declared death
    assert (
        document(Findings(model, [], Soak(300.0, 500, 0, 0.97), []))["soak"]["num_requests"] == 500
    )


def test_what_a_library_prints_does_not_spoil_the_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> Result:
        print("(raylet) A worker died or was killed")
        return Result(error=RunFailed("why"))

    def configure(parser: argparse.ArgumentParser) -> None:
        COMMAND.configure(parser)
        parser.set_defaults(run=run)

    noisy = replace(COMMAND, configure=configure)
    monkeypatch.setattr(app, "_load", lambda name: noisy)
    assert app.main(["chaos", "--json"]) == 1
    printed = capsys.readouterr()
    assert documents.parse(printed.out)["ok"] is False
    assert "raylet" in printed.err


# --- the workload -------------------------------------------------------------------------------


def test_two_blockers_leave_too_little_for_the_target_and_enough_for_the_background() -> None:
    def blocks(tokens: int) -> int:
        return -(-tokens // 16)

    long = blocks(LONG_TOKENS)
    grown = blocks(LONG_TOKENS + max(prompt.max_tokens for prompt in BLOCKERS))
    background = sum(blocks(len(p.text.split()) + p.max_tokens) for p in BACKGROUND)
    assert 3 * long > DECODE_BLOCKS
    assert 2 * grown + background <= DECODE_BLOCKS
    assert blocks(LONG_TOKENS + ENDLESS.max_tokens) <= DECODE_BLOCKS
    assert LONG_TOKENS + ENDLESS.max_tokens <= settings(slow_transfers=True)["model.max_model_len"]


def test_no_two_prompts_begin_alike() -> None:
    prompts = (TARGET, *BLOCKERS, *BACKGROUND)
    assert len({prompt.text[0] for prompt in prompts}) == len(prompts)
