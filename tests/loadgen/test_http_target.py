"""OpenAI-compatible servers get the same load; their tokens are counted as well as they tell."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.cli import main
from kvferry.cluster.client_security import PLAIN, ClientSecurity, TokenInTheClear
from kvferry.cluster.errors import Internal, NotReady, Overloaded, StreamError, UnknownModel
from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.http_target import HttpTarget, request_body
from kvferry.cluster.loadgen.measures import BY_CHUNKS, BY_IDS, BY_USAGE, Receipt
from kvferry.cluster.loadgen.plan import make_plan
from kvferry.cluster.loadgen.sessions import Prompt
from kvferry.cluster.loadgen.settings import Settings
from kvferry.cluster.loadgen.sse_answer import AnswerReader, error_of
from kvferry.cluster.loadgen.targets import Request
from kvferry.engine.request import InvalidRequest
from tests.cluster import documents
from tests.loadgen.http_peer import HttpPeer

DATA = Path(__file__).parent / "data"
SMALL = ["--input-tokens", "5", "--output-tokens", "4", "--num-requests", "6"]


def event(value: object) -> bytes:
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()


def tokens(*ids: int, text: str = " x") -> bytes:
    return event({"choices": [{"text": text, "token_ids": list(ids)}]})


def texts(text: str) -> bytes:
    return event({"choices": [{"text": text}]})


def usage(count: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": count}})


DONE = event("[DONE]")


def read(*pieces: bytes) -> Receipt:
    """An answer whose pieces come one second after the other, from 1 on."""
    receipt = Receipt(sent_at=0.0)
    reader = AnswerReader(receipt)
    for number, piece in enumerate(pieces, start=1):
        reader.feed(piece, float(number))
    reader.end()
    return receipt


def test_token_ids_are_counted_first_of_all() -> None:
    receipt = read(tokens(5), tokens(6, 7), tokens(8, text=""), usage(4), DONE)
    assert receipt.token_ids == [5, 6, 7, 8]
    assert receipt.token_times == [1, 2, 2, 3]
    assert receipt.counted_by == BY_IDS
    assert receipt.ended_at == 5
    assert receipt.prompt_tokens == 9


def test_without_ids_the_usage_counts_and_chunks_give_the_moments() -> None:
    receipt = read(texts(" a"), texts(" b c"), usage(3), DONE)
    assert receipt.counted_by == BY_USAGE
    assert receipt.completion_tokens == 3
    assert receipt.token_times == [1, 2]


def test_without_both_there_are_only_chunks() -> None:
    receipt = read(texts(" a"), texts(" b c"), DONE)
    assert receipt.counted_by == BY_CHUNKS
    assert receipt.completion_tokens is None
    assert len(receipt.token_times) == 2


def test_a_role_and_the_reason_of_the_end_are_no_tokens() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    end = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    said = event({"choices": [{"delta": {"content": "yes"}}]})
    receipt = read(role, said, end, DONE)
    assert receipt.token_times == [2]
    assert receipt.finish_reason == "stop"


@given(st.lists(st.integers(0, 200), max_size=12))
def test_it_does_not_matter_where_the_bytes_are_cut(cuts: list[int]) -> None:
    whole = (
        b": hello\n\n" + tokens(5, text="\u00fc") + tokens(6, 7) + b"event: x\n" + usage(3) + DONE
    )
    places = sorted({0, *(cut % len(whole) for cut in cuts), len(whole)})
    pieces = [whole[a:b] for a, b in pairwise(places)]
    receipt = read(*pieces)
    assert receipt.token_ids == [5, 6, 7]
    assert "".join(receipt.text) == "\u00fc x"


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([tokens(5)], "ended early, after 1 chunks"),
        ([tokens(5), usage(2), DONE], "got 1 token ids, but usage says 2"),
        ([tokens(5), DONE, tokens(6)], "an event came after the last one"),
        ([b"data: {oops\n"], "no JSON"),
        ([b"data: 3\n"], "no object"),
        ([event({"choices": ["x"]})], "another shape"),
        ([event({"choices": 3})], "another shape"),
        ([event({"choices": [{"text": 5}]})], "another shape"),
        ([event({"choices": [{"delta": "x"}]})], "another shape"),
        ([event({"choices": [{"text": "a", "token_ids": ["1"]}]})], "another shape"),
        ([event({"choices": [{"text": "a", "token_ids": 7}]})], "another shape"),
        ([event({"usage": [1]})], "another shape"),
        ([event({"usage": {"completion_tokens": "many"}})], "another shape"),
    ],
)
def test_an_answer_that_is_not_whole_is_none(pieces: list[bytes], said: str) -> None:
    with pytest.raises(StreamError, match=said):
        read(*pieces)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequest),
        (404, UnknownModel),
        (418, InvalidRequest),
        (429, Overloaded),
        (500, Internal),
        (503, NotReady),
        (599, Internal),
    ],
)
def test_a_refusal_is_typed_by_its_status_in_the_server_s_words(status: int, kind: type) -> None:
    error = error_of({"error": {"message": "so it is", "code": "x"}}, status, "3")
    assert type(error) is kind
    assert str(error) == f"status {status}: so it is"
    if isinstance(error, Overloaded):
        assert error.retry_after_s == 3


def test_what_is_sent_can_be_added_to_and_taken_from() -> None:
    path, content = request_body(Request(Prompt(token_ids=(1, 2)), 3), "m", {})
    assert path == "/v1/completions"
    assert json.loads(content) == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 3,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "ignore_eos": True,
    }
    more = {"return_token_ids": None, "ignore_eos": None, "top_k": 5}
    chat = Prompt(messages=({"role": "user", "content": "hi"},), tools=({"type": "function"},))
    path, content = request_body(Request(chat, 3), "m", more)
    assert path == "/v1/chat/completions"
    fields = json.loads(content)
    assert "return_token_ids" not in fields
    assert "ignore_eos" not in fields
    assert fields["top_k"] == 5
    assert fields["messages"] == [{"role": "user", "content": "hi"}]
    assert fields["tools"] == [{"type": "function"}]


def run(peer: HttpPeer, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    main(["loadgen", "run", "--json", "--url", peer.url, *flags])
    return documents.parse(capsys.readouterr().out)


def test_a_peer_gets_the_requests_that_a_cluster_gets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with HttpPeer() as peer:
        document = run(peer, capsys, *SMALL, "--vocab-size", "100")
    assert document["ok"]
    assert document["target"]["kind"] == "openai"
    assert document["target"]["model_name"] == "peer"
    assert document["arrangement"] is None
    assert document["server"] is None
    results = document["results"]
    assert (results["completed"], results["cached_tokens"]) == (6, 18)
    assert results["tokens_counted_by"] == {"ids": 6}
    assert results["itl_s"]["n"] == 18
    plan = make_plan(Settings.from_json(document["config"]), 0, 100)
    sent = [body["prompt"] for _, body in peer.requests[1:]]
    assert sorted(sent) == sorted(list(s.turns[0].token_ids) for s in plan.sessions)


@pytest.mark.parametrize(
    ("per_chunk", "gives_usage", "counted", "gaps"),
    [(1, True, "usage", 18), (2, True, "usage", 6), (2, False, "chunks", 6)],
)
def test_a_peer_without_token_ids_is_counted_as_it_tells(
    per_chunk: int,
    gives_usage: bool,
    counted: str,
    gaps: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with HttpPeer(gives_ids=False, gives_usage=gives_usage, per_chunk=per_chunk) as peer:
        results = run(peer, capsys, *SMALL)["results"]
        assert results["tokens_counted_by"] == {counted: 6}
        assert results["output_tokens"] == (24 if gives_usage else 12)
        assert results["itl_s"]["n"] == gaps
        assert main(["loadgen", "run", "--url", peer.url, *SMALL]) == 0
    assert f"tokens counted: 6 by {counted}" in capsys.readouterr().out


def test_conversations_hold_the_peer_s_answers(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompts", str(DATA / "prompts.jsonl"), "--send", "chat", "--output-tokens", "2"]
    with HttpPeer() as peer:
        document = run(peer, capsys, *flags, "--warm-up", "0", "--concurrency", "1")
    assert document["results"]["completed"] == 14
    assert {path for path, _ in peer.requests} == {"/v1/chat/completions"}
    third = peer.requests[7][1]["messages"]
    assert [message["content"] for message in third] == [
        "Hello.",
        " w0 w1",
        "How are you?",
        " w0 w1",
        "Goodbye.",
    ]


def test_sessions_of_ids_need_a_peer_that_gives_ids(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workload", "sessions", "--turns", "2", "--input-tokens", "3", "--warm-up", "0"]
    flags += ["--output-tokens", "2", "--num-requests", "3"]
    with HttpPeer() as peer:
        assert run(peer, capsys, *flags)["results"]["completed"] == 6
        second = [body["prompt"] for _, body in peer.requests if len(body["prompt"]) > 3]
        assert [prompt[3:5] for prompt in second] == [[0, 1]] * 3
    with HttpPeer(gives_ids=False) as peer:
        document = run(peer, capsys, *flags)
        assert document["results"]["failures"] == {"StreamError": 3}
        assert "send text or chat" in document["error"]["message"]
        assert run(peer, capsys, *flags, "--send", "text")["ok"]


@pytest.mark.parametrize(
    ("trouble", "kind", "said"),
    [
        (429, "Overloaded", "status 429: no room"),
        (503, "NotReady", "status 503: no room"),
        ("error", "NotReady", "status 503: lost"),
        ("break", "StreamError", "ended early"),
    ],
)
def test_what_goes_wrong_at_a_peer_is_counted_by_kind(
    trouble: int | str, kind: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with HttpPeer() as peer:
        peer.trouble["Say yes."] = trouble
        document = run(peer, capsys, "--prompts", str(DATA / "prompts.jsonl"), "--warm-up", "0")
    assert document["results"]["failures"] == {kind: 1}
    assert said in document["error"]["message"]
    assert document["results"]["completed"] == 13


def test_a_cancelled_request_is_gone_at_the_peer(capsys: pytest.CaptureFixture[str]) -> None:
    with HttpPeer() as peer:
        peer.trouble["Say yes."] = "hold"
        flags = ["--prompts", str(DATA / "prompts.jsonl"), "--num-requests", "3", "--warm-up", "0"]
        document = run(peer, capsys, *flags, "--cancel-share", "1", "--cancel-within", "0.05")
        assert document["results"]["cancelled"] >= 1
        assert peer.left.wait(30)


def test_a_key_is_sent_and_not_written_down(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEER_KEY", "s3cret")
    with HttpPeer() as peer:
        argv = ["loadgen", "run", "--json", "--url", peer.url, *SMALL, "--api-key-env", "PEER_KEY"]
        assert main(argv) == 0
        assert peer.keys == ["Bearer s3cret"]
    assert "s3cret" not in capsys.readouterr().out
    assert main([*argv[:-1], "NO_SUCH_KEY"]) == 2


def test_nothing_at_the_url_is_exit_4(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        assert main(["loadgen", "run", "--json", "--url", url]) == 4
    document = documents.parse(capsys.readouterr().out)
    assert document["error"]["type"] == "ClusterUnreachable"
    assert url in document["error"]["message"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--url", "localhost:8000"], "wanted http://"),
        (["--body", "{}"], "body: only HTTP"),
        (["--url", "http://127.0.0.1:1", "--body", "[]"], "wanted a JSON object"),
    ],
)
def test_what_makes_no_peer_is_exit_2(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["loadgen", "run", *flags]) == 2
    assert said in capsys.readouterr().err


def test_an_interrupted_run_leaves_nothing_at_the_peer() -> None:
    with HttpPeer() as peer:
        peer.trouble["Say yes."] = "hold"
        with subprocess.Popen(
            [
                *(sys.executable, "-m", "kvferry.cluster.cli", "loadgen", "run", "--json"),
                *("--url", peer.url, "--warm-up", "0", "--concurrency", "1"),
                *("--prompts", str(DATA / "prompts.jsonl"), "--output-tokens", "3"),
            ],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert peer.holding.wait(60)
            process.send_signal(signal.SIGINT)
            printed, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        assert documents.parse(printed)["results"]["unfinished"] == 1
        assert peer.left.wait(30)


# --- its key ------------------------------------------------------------------------------------


def made(url: str, key: str | None, security: ClientSecurity = PLAIN) -> None:
    async def run() -> None:
        async with HttpTarget(url, key=key, security=security):
            pass

    asyncio.run(run())


@pytest.mark.parametrize(
    "url",
    [
        *("http://192.0.2.7:8000", "http://example.org", "http://example.org/v1"),
        *("http://[2001:db8::1]:8000", "http://127.0.0.1.example.org", "http://x@192.0.2.7"),
        *("http://127.0.0.1@192.0.2.7:80", "http://"),
    ],
)
def test_a_key_does_not_go_to_another_machine_in_the_clear(url: str, tmp_path: Path) -> None:
    """Not with the files for TLS, either: it is the URL that says what is spoken."""
    for security in (PLAIN, ClientSecurity(tls_ca=str(tmp_path / "ca.pem"))):
        with pytest.raises(TokenInTheClear, match=r"without TLS.*https") as caught:
            made(url, "secret-key", security)
        assert "secret-key" not in str(caught.value)
    made(url, None)


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:8000", "http://localhost", "http://LOCALHOST/v1", "http://[::1]:1"),
        "https://example.org/v1",
    ],
)
def test_it_goes_over_tls_and_within_this_machine(url: str) -> None:
    made(url, "secret-key")


def test_a_port_that_is_none_is_a_typed_error() -> None:
    with pytest.raises(BadLoad, match=r"url: got 'http://example\.org:x'"):
        made("http://example.org:x", "secret-key")


def test_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("THE_KEY", "secret-key")
    url = ("--url", "http://192.0.2.7:8000", "--model", "m", "--api-key-env", "THE_KEY")
    assert main(["loadgen", "run", *SMALL, *url, "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["error"]["type"] == "TokenInTheClear"
    assert "secret-key" not in str(document)
