"""``kvferry loadgen run`` against a small gRPC server: documents, exit codes, interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cluster.cli import main
from kvferry.cluster.cli.loadgen_flags import again
from kvferry.cluster.errors import Overloaded
from kvferry.cluster.loadgen.grpc_target import GrpcTarget
from kvferry.cluster.loadgen.measures import Receipt
from kvferry.cluster.loadgen.settings import Settings
from kvferry.cluster.loadgen.targets import Request
from tests.cluster import documents
from tests.cluster.fake_server import HOLD, FakeServer, accepted
from tests.loadgen.http_peer import HttpPeer

DATA = Path(__file__).parent / "data"
SMALL = ["--input-tokens", "5", "--output-tokens", "4", "--num-requests", "6"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    with FakeServer() as running:
        monkeypatch.setenv("KVFERRY_ENDPOINT", running.endpoint)
        yield running


def test_a_run_prints_a_table_or_a_document(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["loadgen", "run", *SMALL, "--repeats", "2", "--slo", "ttft=9,tpot=9"]
    assert main(argv) == 0
    printed = capsys.readouterr()
    assert "random: 6 requests, concurrency 8, 5 new in, 4 out" in printed.out
    assert "100% within ttft 9 s, tpot 9 s" in printed.out
    assert "student-t over repeats" in printed.out
    assert "repeat 2 of 2" in printed.err
    assert main([*argv, "--json"]) == 0
    printed = capsys.readouterr()
    document = documents.parse(printed.out)
    assert printed.err == ""
    assert document["target"]["model_name"] == "tiny"
    assert document["arrangement"]["prefill"] == 1
    assert document["workload"]["input_tokens"] == 5
    assert document["workload"]["concurrency"] == 8
    assert document["results"]["itl_s"]["n"] == 18
    assert document["results"]["goodput_per_s"] == document["results"]["requests_per_s"]
    assert document["parts"]["prefill_s"]["mean"] == pytest.approx(0.2)
    assert document["server"]["totals"]["blocks_moved"] == 12
    assert document["intervals"]["ttft_s"]["p50"]["n"] == 2
    assert [len(repeat["requests"]) for repeat in document["repeats"]] == [6, 6]


def test_a_document_holds_all_that_is_needed_to_repeat_the_run(
    server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = ["loadgen", "run", "--json", "--workload", "shared", "--opening-tokens", "8"]
    assert main([*argv, *SMALL, "--rate", "100", "--seed", "5"]) == 0
    first = capsys.readouterr().out
    sent = [list(request.token_ids.ids) for request in server.requests]
    path = tmp_path / "run.json"
    path.write_text(first)
    server.requests.clear()
    assert main(["loadgen", "run", "--json", "--again", str(path)]) == 0
    again = documents.parse(capsys.readouterr().out)
    assert [list(request.token_ids.ids) for request in server.requests] == sent
    earlier = json.loads(first)
    assert again["config"] == earlier["config"]
    assert again["workload"] == earlier["workload"]
    assert main(["loadgen", "run", "--json", "--again", str(path), "--seed", "6"]) == 0
    other = documents.parse(capsys.readouterr().out)
    assert other["workload"]["fingerprint"] != earlier["workload"]["fingerprint"]


def test_a_peer_s_run_is_sent_again_to_a_cluster_and_back(
    server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The pair of commands in docs/loadgen.md."""
    path = tmp_path / "peer.json"
    with HttpPeer() as peer:
        argv = ["loadgen", "run", "--json", *SMALL, "--vocab-size", "90"]
        more = ["--url", peer.url, "--rate", "100", "--body", '{"x": 1}', "--model", "peer"]
        assert main([*argv, *more]) == 0
        earlier = documents.parse(capsys.readouterr().out)
        path.write_text(json.dumps(earlier))
        assert earlier["target"]["kind"] == "openai"
        num_sent = len(peer.requests)
        command = ["loadgen", "run", "--json", "--again", str(path)]
        assert main([*command, "--endpoint", server.endpoint]) == 0
        again = documents.parse(capsys.readouterr().out)
        assert len(peer.requests) == num_sent
        assert again["target"]["kind"] == "kvferry"
        assert again["workload"]["fingerprint"] == earlier["workload"]["fingerprint"]
        sent = sorted(tuple(request.token_ids.ids) for request in server.requests)
        assert sent == sorted(tuple(body["prompt"]) for _, body in peer.requests)
        path.write_text(json.dumps(again))
        assert main([*command, "--url", peer.url]) == 0
        back = documents.parse(capsys.readouterr().out)
        assert back["target"]["kind"] == "openai"
        assert back["workload"]["fingerprint"] == earlier["workload"]["fingerprint"]


def test_the_vocabulary_that_was_drawn_from_is_written_down(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["loadgen", "run", "--json", *SMALL]) == 0
    assert documents.parse(capsys.readouterr().out)["config"]["vocab_size"] == 100


OPEN = {"rate": 3.0, "arrival": "gamma", "burstiness": 0.5, "on": 1.0, "off": 2.0}
TRACE = {"workload": "trace", "trace": "x.csv"}


@pytest.mark.parametrize(
    ("earlier", "given", "changed"),
    [
        (OPEN, {"concurrency": 4}, {"rate": None, "arrival": None, "burstiness": None}),
        ({"concurrency": 4}, {"rate": 2.0}, {"concurrency": None, "arrival": "poisson"}),
        (OPEN, {"rate": 2.0}, {"rate": 2.0, "burstiness": 0.5, "on": 1.0}),
        (OPEN, {"arrival": "poisson"}, {"rate": 3.0, "burstiness": None}),
        ({**TRACE, "stretch": 4.0, "grid": 3.0}, {"rate": 2.0}, {"stretch": 1.0, "grid": 0.0}),
        ({**TRACE, "rate": 2.0}, {"stretch": 4.0}, {"rate": None, "stretch": 4.0}),
        ({"input_tokens": "9"}, {"workload": "sessions"}, {"input_tokens": "64"}),
        ({}, {"trace": "x.csv"}, {"workload": "trace", "input_tokens": None}),
        ({"url": "http://x", "body": {"a": 1}}, {"endpoint": "h:1"}, {"url": None, "body": None}),
        ({"url": "http://x", "body": {"a": 1}}, {"url": "http://y"}, {"body": {"a": 1}}),
        ({"endpoint": "h:1", "model": "m"}, {"url": "http://y"}, {"model": None}),
        ({"endpoint": "h:1", "model": "m"}, {"endpoint": "h:2"}, {"model": "m"}),
    ],
)
def test_what_is_given_again_takes_the_place_of_what_it_excludes(
    earlier: dict[str, object], given: dict[str, object], changed: dict[str, object]
) -> None:
    before = Settings(**earlier).resolved()  # type: ignore[arg-type]
    found = again(before, given).resolved().to_json()
    assert changed.items() <= found.items()
    assert given.items() <= found.items()


def test_a_trace_is_replayed_at_its_times(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["loadgen", "run", "--json", "--trace", str(DATA / "own.jsonl"), "--stretch", "0.02"]
    server.status.model.max_model_len = 200  # type: ignore[union-attr]
    assert main(argv) == 0
    document = documents.parse(capsys.readouterr().out)
    assert document["config"]["trace_format"] == "auto"
    assert document["workload"]["planned_s"] == pytest.approx(0.09)
    assert document["workload"]["reused_fraction"] == pytest.approx(4 * 32 / 482, rel=0.2)
    rows = document["repeats"][0]["requests"]
    assert [row["intended_s"] for row in rows] == pytest.approx([0.01 * n for n in range(10)])
    assert main([*argv, "--stretch", "0.02", "--divide-output", "64", "--num-requests", "2"]) == 0
    assert documents.parse(capsys.readouterr().out)["workload"]["output_tokens"] == 1


@pytest.mark.parametrize("form", ["text", "chat"])
def test_prompts_are_sent_as_texts_or_as_conversations(
    form: str, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["loadgen", "run", "--json", "--prompts", str(DATA / "prompts.jsonl"), "--send", form]
    assert main([*argv, "--concurrency", "1", "--warm-up", "0", "--output-tokens", "2"]) == 0
    document = documents.parse(capsys.readouterr().out)
    assert document["results"]["completed"] == 14
    assert document["workload"]["num_sessions"] == 10
    kinds = {request.WhichOneof("input") for request in server.requests}
    assert kinds == {form}
    assert len({request.cache_salt for request in server.requests}) == 1
    last = server.requests[7]  # the third turn of "Hello."
    if form == "text":
        # the fake answers with the prompt's words
        assert last.text.startswith("Hello. Hello. Hello.\nHow are you?")
    else:
        said = [(message.role, message.content) for message in last.chat.messages]
        assert said[0] == ("user", "Hello.")
        assert [role for role, _ in said] == ["user", "assistant"] * 2 + ["user"]
        with_tools = server.requests[10]
        assert json.loads(with_tools.chat.tools[0])["function"]["name"] == "ls"


def test_failures_are_reported_with_their_document(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.scripts["Say yes."] = [accepted(), Overloaded("full")]
    argv = ["loadgen", "run", "--prompts", str(DATA / "prompts.jsonl"), "--warm-up", "0"]
    assert main([*argv, "--json"]) == 1
    document = documents.parse(capsys.readouterr().out)
    assert document["ok"] is False
    assert "1 of 14 requests failed; the first: Overloaded: full" in document["error"]["message"]
    assert document["results"]["failures"] == {"Overloaded": 1}
    assert main(argv) == 1
    assert "failed: 1 Overloaded; the first: full" in capsys.readouterr().out


def test_words_of_a_server_that_look_like_markup_are_shown_as_they_are(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.scripts["Say yes."] = [accepted(), Overloaded("full of [/INST] and [bold]")]
    argv = ["loadgen", "run", "--prompts", str(DATA / "prompts.jsonl"), "--warm-up", "0"]
    assert main(argv) == 1
    assert "the first: full of [/INST] and [bold]" in capsys.readouterr().out


def test_a_fault_of_our_own_shows_what_was_measured(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    send = GrpcTarget.send
    sent = []

    async def odd(self: GrpcTarget, request: Request, receipt: Receipt) -> None:
        sent.append(request)
        if len(sent) == 9:
            raise ZeroDivisionError("odd")
        await send(self, request, receipt)

    monkeypatch.setattr(GrpcTarget, "send", odd)
    argv = ["loadgen", "run", "--json", *SMALL, "--repeats", "2", "--concurrency", "1"]
    assert main([*argv, "--warm-up", "0"]) == 1
    document = documents.parse(capsys.readouterr().out)
    assert document["error"]["message"] == "odd"
    assert [repeat["completed"] for repeat in document["repeats"]] == [6, 2]
    assert [repeat["is_complete"] for repeat in document["repeats"]] == [True, False]
    assert document["results"]["completed"] == 6
    assert document["intervals"] is None


def test_a_faster_event_loop_is_used_where_there_is_one(
    server: FakeServer,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "uvloop.py").write_text(
        "import asyncio\n"
        "class Loop(asyncio.SelectorEventLoop): pass\n"
        "made = []\n"
        "def new_event_loop():\n"
        "    made.append(Loop())\n"
        "    return made[-1]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "uvloop", raising=False)
    assert main(["loadgen", "run", "--json", *SMALL]) == 0
    document = documents.parse(capsys.readouterr().out)
    assert document["generator"] == {"event_loop": "uvloop"}
    assert len(sys.modules["uvloop"].made) == 1
    monkeypatch.delitem(sys.modules, "uvloop")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--turns", "3"], "turns: the workload random does not look at it"),
        (["--input-tokens", "some"], "length 'some'"),
        (["--trace", "no-such-file"], "no-such-file"),
        (["--slo", "speed=1"], "wanted ttft=S,tpot=S"),
        (["--rate", "0"], "rate: got 0"),
        (["--again", "no-such-file"], "no document of loadgen run"),
        (["--url", "http://127.0.0.1:1", "--endpoint", "127.0.0.1:1"], "got endpoint and url"),
        (["--prompts", str(DATA / "prompts.jsonl"), "--send", "ids"], "send: got ids"),
        (["--vocab-size", "101"], "vocab_size: got 101, and tiny knows 100 tokens"),
        (["--input-tokens", "900"], "the model takes 64 together"),
    ],
)
def test_what_makes_no_load_is_exit_2(
    flags: list[str], said: str, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["loadgen", "run", *flags]) == 2
    assert said in capsys.readouterr().err
    assert main(["loadgen", "run", *flags, "--json"]) == 2
    document = documents.parse(capsys.readouterr().out)
    assert document["error"]["code"] == "INVALID_ARGUMENT"


def test_an_interrupted_run_says_what_it_has_measured(server: FakeServer) -> None:
    server.scripts["Say yes."] = [accepted(), HOLD]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvferry.cluster.cli", "loadgen", "run", "--json"),
            *("--endpoint", server.endpoint, "--warm-up", "0", "--concurrency", "1"),
            *("--prompts", str(DATA / "prompts.jsonl"), "--output-tokens", "3"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert server.holding.wait(60)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    document = documents.parse(printed)
    assert document["ok"] is False
    assert document["error"]["type"] == "Cancelled"
    assert document["results"]["completed"] == 2
    assert document["results"]["unfinished"] == 1
    assert [repeat["is_complete"] for repeat in document["repeats"]] == [False]
    assert server.left.wait(30)  # the request that was on its way is cancelled at the server
