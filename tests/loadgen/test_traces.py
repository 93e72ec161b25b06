"""Every format of a trace is read as it is documented, and sharing stays exact."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.loadgen import prompt_files
from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.lengths import Fixed
from kvferry.cluster.loadgen.plan import make_plan, trace_sessions
from kvferry.cluster.loadgen.settings import Settings
from kvferry.cluster.loadgen.traces import Trace, TraceRow, parse_trace, read_trace
from kvferry.cluster.loadgen.workloads import Cancels, Source

DATA = Path(__file__).parent / "data"
FILES = {
    "mooncake": "mooncake.jsonl",
    "bailian": "bailian.jsonl",
    "azure": "azure.csv",
    "burstgpt": "burstgpt.csv",
    "jsonl": "own.jsonl",
}
SOURCE = Source(0, 0, 50_000)


@pytest.mark.parametrize(("kind", "name"), FILES.items())
def test_a_format_is_recognised_and_can_be_named(kind: str, name: str) -> None:
    found = read_trace(DATA / name)
    assert found.format == kind
    assert found == read_trace(DATA / name, kind)
    assert len(found.rows) == (9 if kind == "burstgpt" else 10)  # one answer there is empty
    assert found.rows[0].at_s == 0
    times = [row.at_s for row in found.rows]
    assert sorted(times) == times
    assert read_trace(DATA / name, first=3).rows == found.rows[:3]


def test_moments_and_lengths_are_those_of_the_rows() -> None:
    azure = read_trace(DATA / "azure.csv").rows[1]
    assert (azure.input_tokens, azure.output_tokens) == (1556, 261)
    assert azure.at_s == pytest.approx(51.1689094 - 46.6805900, abs=1e-6)
    burst = read_trace(DATA / "burstgpt.csv").rows[1]
    assert (burst.at_s, burst.input_tokens, burst.output_tokens) == (33.0, 825, 194)
    assert read_trace(DATA / "mooncake.jsonl").rows[3].at_s == 3.0
    bailian = read_trace(DATA / "bailian.jsonl").rows
    assert bailian[1].at_s == 1.75
    assert [row.group for row in bailian[:4]] == ["chat-10", "chat-10", "chat-10", "chat-13"]
    assert read_trace(DATA / "own.jsonl").rows[9].cancel_after_s == 0.25


@pytest.mark.parametrize(
    ("second", "after_s"),
    [
        ("2024-05-10 00:00:00.0165930", 0.006663),  # as in 2023, with one digit more
        ("2024-05-10 00:00:00.016593+00:00", 0.006663),  # as in 2024
        ("2024-05-10 00:00:01+00:00", 0.99007),
        ("2024-05-10 02:00:01.25+02:00", 1.24007),
        ("2024-05-09T23:00:01.25-01:00", 1.24007),
        ("2024-05-10 00:00:02Z", 1.99007),
    ],
)
def test_a_moment_of_azure_s_may_have_an_offset_and_any_number_of_digits(
    second: str, after_s: float
) -> None:
    first = "2024-05-10 00:00:00.009930+00:00"
    text = f"TIMESTAMP,ContextTokens,GeneratedTokens\n{first},2162,5\n{second},2399,6\n"
    rows = parse_trace(text, "2024.csv").rows
    assert rows[1].at_s == pytest.approx(after_s, abs=1e-6)


def shared_blocks(left: Sequence[int], right: Sequence[int], size: int) -> int:
    """Whole blocks that two prompts have in common from their beginning."""
    count = 0
    while (count + 1) * size <= min(len(left), len(right)) and left[
        count * size : (count + 1) * size
    ] == right[count * size : (count + 1) * size]:
        count += 1
    return count


def check_sharing(trace: Trace) -> None:
    """Prompts share exactly the blocks that their rows say they share."""
    prompts = [s.turns[0].token_ids for s in trace_sessions(trace, SOURCE, Cancels())]
    size = trace.block_tokens
    for row, prompt in zip(trace.rows, prompts, strict=True):
        assert len(prompt) == row.input_tokens
        for other, theirs in zip(trace.rows, prompts, strict=True):
            assert row.hash_ids is not None and other.hash_ids is not None
            whole = min(len(prompt), len(theirs)) // size
            same = 0
            while same < min(whole, len(row.hash_ids), len(other.hash_ids)) and (
                row.hash_ids[same] == other.hash_ids[same]
            ):
                same += 1
            if row is other:
                same = whole
            assert shared_blocks(prompt, theirs, size) == same


ROWS = st.lists(
    st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(0, 511)),
    min_size=1,
    max_size=8,
)


@given(ROWS)
def test_equal_hash_ids_are_equal_tokens_and_others_are_not(
    rows: list[tuple[list[int], int]],
) -> None:
    trace = Trace(
        "mooncake",
        512,
        tuple(
            TraceRow(float(at), len(ids) * 512 - short, 4, tuple(ids))
            for at, (ids, short) in enumerate(rows)
        ),
    )
    check_sharing(trace.divided(32, 16))


def test_the_tokens_of_a_block_do_not_depend_on_the_rows_before_it() -> None:
    trace = read_trace(DATA / "mooncake.jsonl").divided(32, 16)
    later = Trace(trace.format, trace.block_tokens, trace.rows[4:])
    whole, part = (trace_sessions(each, SOURCE, Cancels()) for each in (trace, later))
    assert [s.turns[0].token_ids for s in part] == [s.turns[0].token_ids for s in whole[4:]]


@pytest.mark.parametrize(("name", "by"), [("mooncake.jsonl", 32), ("bailian.jsonl", 1)])
def test_sharing_of_the_example_rows_is_exact(name: str, by: int) -> None:
    check_sharing(read_trace(DATA / name).divided(by, 16))


def test_dividing_rounds_lengths_up_and_blocks_exactly() -> None:
    trace = Trace("mooncake", 512, (TraceRow(0.0, 6758, 500, tuple(range(14))),))
    divided = trace.divided(32, 16)
    assert divided.block_tokens == 16
    assert (divided.rows[0].input_tokens, divided.rows[0].output_tokens) == (212, 32)
    with pytest.raises(BadLoad, match="got 3; blocks of 512"):
        trace.divided(3, 1)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("nothing known", "auto", "wanted azure, burstgpt, bailian, mooncake, jsonl"),
        ("", "auto", "wanted azure"),
        ('{"timestamp": 1}', "mooncake", "row 1: no 'input_length'"),
        (
            '{"at_s": 0, "input_tokens": 1, "output_tokens": 1}\n'
            '{"at_s": 1, "input_tokens": 0, "output_tokens": 1}',
            "auto",
            "row 2: 0 input and 1 output tokens",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2", "auto", "row 1: .*yesterday"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "auto", "holds no request"),
        ("x", "weekly", "trace_format: got 'weekly'"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, kind: str, said: str) -> None:
    with pytest.raises(BadLoad, match=said):
        parse_trace(text, "the file", kind)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(BadLoad, match=r"no-such\.jsonl"):
        read_trace(Path("no-such.jsonl"))


def test_a_traces_plan_has_its_times_stretched_and_its_cancels() -> None:
    settings = Settings(workload="trace", trace=str(DATA / "own.jsonl"), stretch=2.0).resolved()
    plan = make_plan(settings, 0, 1000)
    assert plan.offsets is not None
    assert list(plan.offsets) == pytest.approx([float(n) for n in range(10)])
    assert plan.sessions[9].turns[0].cancel_after_s == 0.25
    assert make_plan(settings, 0, 1000).fingerprint == plan.fingerprint
    assert make_plan(settings, 1, 1000).fingerprint != plan.fingerprint


def test_prompts_of_every_shape_become_turns() -> None:
    rows = prompt_files.read_prompts(DATA / "prompts.jsonl")
    sessions = prompt_files.sessions(rows, 12, SOURCE, Fixed(64), 1.5, Cancels())
    said = [[turn.text for turn in session.turns] for session in sessions]
    assert said[:2] == [["Name three rivers."], ["Count to ten."]]
    assert said[4] == ["Hello.", "How are you?", "Goodbye."]
    assert said[5:7] == [["Sort the words.\npear apple"], ["Is water wet?"]]
    assert said[8] == ["Be brief.\nWhat time is it?"]
    assert said[9] == ["Add 2 and 3."]
    assert said[10:] == said[:2]
    assert sessions[2].turns[0].output_tokens == 3
    assert [turn.think_s for turn in sessions[4].turns] == [0.0, 1.5, 1.5]
    assert [session.tools[0]["function"]["name"] for session in sessions[7:9]] == ["ls", "clock"]


@pytest.mark.parametrize("line", ["{}", "[]", '{"turns": []}', '{"prompt": 3}', "no json"])
def test_a_prompt_in_no_known_shape_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "hi"}\n' + line)
    with pytest.raises(BadLoad, match=r"p\.jsonl, line 2"):
        prompt_files.read_prompts(path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ('"output_tokens": "many"', "output_tokens: got 'many', wanted a number of at least 1"),
        ('"output_tokens": 0', "output_tokens: got 0"),
        ('"output_tokens": true', "output_tokens: got True"),
        ('"output_tokens": 2.5', "output_tokens: got 2.5"),
        ('"tools": ["ls"]', "tools: got \\['ls'\\], wanted a list of objects"),
        ('"tools": "ls"', "tools: got 'ls'"),
        ('"function": {"name": "ls"}', "function: got {'name'"),
    ],
)
def test_a_field_of_a_prompt_is_named_with_its_line(fields: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "hi", "output_tokens": 3}\n{"prompt": "hi", ' + fields + "}")
    with pytest.raises(BadLoad, match=rf"p\.jsonl, line 2: {said}"):
        prompt_files.read_prompts(path)


def test_texts_that_are_to_be_sent_as_ids_make_no_plan() -> None:
    settings = Settings(workload="prompts", prompts=str(DATA / "prompts.jsonl")).resolved()
    with pytest.raises(BadLoad, match="send: got ids, but the prompts are texts"):
        make_plan(settings, 0, 1000)


def workloads_folder() -> Path:
    folder = os.environ.get("KVFERRY_WORKLOADS")
    if not folder:
        pytest.skip("KVFERRY_WORKLOADS names no folder of public traces")
    return Path(folder)


def test_the_public_traces_are_read_and_fit_a_small_model() -> None:
    traces = workloads_folder() / "traces"
    mooncake = read_trace(traces / "mooncake_conversation_trace.first60s.jsonl").divided(32, 16)
    assert (mooncake.format, mooncake.block_tokens, len(mooncake.rows)) == ("mooncake", 16, 162)
    assert mooncake.rows[0].input_tokens == 212
    prompts = [s.turns[0].token_ids for s in trace_sessions(mooncake, SOURCE, Cancels())]
    assert {prompt[:16] for prompt in prompts} == {prompts[0][:16]}  # all begin with block 0
    azure = read_trace(traces / "azure2023_conv.first1200s.csv", first=300).divided(8, 8)
    assert (azure.format, len(azure.rows), azure.rows[0].input_tokens) == ("azure", 300, 47)


def test_the_public_prompts_are_read() -> None:
    folder = workloads_folder() / "prompts"
    for name, count in (
        ("mt_bench_question.jsonl", 80),
        ("vicuna_bench_question.jsonl", 80),
        ("self_instruct_user_oriented.jsonl", 252),
        ("bfcl_v4_live_simple.jsonl", 258),
        ("bfcl_v4_multi_turn_base.jsonl", 200),
    ):
        assert len(prompt_files.read_prompts(folder / name)) == count
