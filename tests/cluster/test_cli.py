"""The commands that talk to a running cluster: documents, exit codes, signals, broken pipes."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvferry.cluster.cli import main
from kvferry.cluster.cli.app import COMMANDS
from kvferry.cluster.cli.bench_local import DOCUMENTS
from kvferry.cluster.errors import Internal, WorkerLost
from kvferry.engine.request import InvalidRequest
from tests.cluster import documents
from tests.cluster.fake_server import (
    HOLD,
    REQUEST_ID,
    FakeServer,
    accepted,
    delta,
    finished,
)

KVFERRY = [sys.executable, "-m", "kvferry.cluster.cli"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    with FakeServer() as running:
        monkeypatch.setenv("KVFERRY_ENDPOINT", running.endpoint)
        yield running


@pytest.fixture
def nowhere() -> Iterator[str]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # taken, but nobody listens
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["loadgen", "run"],
        *([name] for name in COMMANDS),
        *(["bench", kind] for kind in ("serve", *DOCUMENTS)),
    ],
)
def test_help_loads_neither_torch_nor_ray_and_is_quick(command: list[str]) -> None:
    code = (
        "import sys, atexit\n"
        "from kvferry.cluster.cli import main\n"
        "heavy = ('torch', 'ray', 'transformers', 'huggingface_hub')\n"
        "atexit.register(lambda: print('LOADED', [m for m in heavy if m in sys.modules]))\n"
        "main(sys.argv[1:])"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code, *command, "--help"], capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.startswith("usage: ")
    assert done.stdout.endswith("LOADED []\n")
    # Processor time, because other tests may share the machine.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


@pytest.mark.parametrize(
    "argv",
    [
        ["status"],
        ["blocks"],
        ["generate", "hi"],
        ["bench", "serve"],
        ["loadgen", "run"],
    ],
)
def test_unreachable_cluster_is_exit_4(
    argv: list[str], nowhere: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "--endpoint", nowhere]) == 4
    printed = capsys.readouterr()
    assert printed.out == ""
    assert nowhere in printed.err
    assert main([*argv, "--endpoint", nowhere, "--json"]) == 4
    document = documents.parse(capsys.readouterr().out)
    assert document["ok"] is False
    assert document["error"]["type"] == "ClusterUnreachable"


@pytest.mark.parametrize(
    "argv",
    [
        ["generate"],
        ["generate", "hi", "--max-tokens", "0"],
        ["generate", "hi", "--max-tokens", "some"],
        ["generate", "hi", "--logprobs"],
        ["generate", "hi", "--n", "0"],
        ["status", "--jsn"],
        ["bench", "serve", "--repeats", "-1"],
        ["bench", "engine", "--threads", "0"],
        ["bench", "kernels", "--dtype", "float32"],
        ["loadgen", "run", "--rate", "fast"],
        ["loadgen", "walk"],
    ],
)
def test_wrong_arguments_are_exit_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "usage: kvferry" in printed.err
    assert main([*argv, "--json"]) == 2
    assert documents.parse(capsys.readouterr().out)["error"]["type"] == "UsageError"


@pytest.mark.parametrize("argv", [[], ["no-such-command"]])
def test_without_a_command_there_is_a_usage_error(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert "usage: kvferry" in capsys.readouterr().err


def test_endpoint_flag_stands_before_the_environment(server: FakeServer, nowhere: str) -> None:
    assert main(["status"]) == 0
    assert main(["status", "--endpoint", nowhere]) == 4


def test_generate_streams_text_and_nothing_else_to_stdout(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "one two", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out == " one two one\n"


def test_generate_sends_what_was_asked_and_no_more(server: FakeServer) -> None:
    main(["generate", "hi", "--temperature", "0", "--stop", "a", "--stop", "b", "--ignore-eos"])
    sampling = server.requests[-1].sampling
    assert sampling.temperature == 0.0
    assert list(sampling.stop) == ["a", "b"]
    assert sampling.ignore_eos
    for name in ("max_tokens", "top_p", "top_k", "seed", "n", "min_tokens"):
        assert not sampling.HasField(name)
    main(["generate", "hi", "--top-p", "0.5", "--top-k", "4", "--seed", "9", "--max-tokens", "1"])
    sampling = server.requests[-1].sampling
    assert (sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 4, 9)
    assert not sampling.HasField("ignore_eos")


def test_generate_chat_sends_one_user_message(server: FakeServer) -> None:
    assert main(["generate", "hi", "--chat", "--max-tokens", "1"]) == 0
    (message,) = server.requests[-1].chat.messages
    assert (message.role, message.content) == ("user", "hi")


def test_generate_sends_a_conversation_with_system_prefix_and_tools(
    server: FakeServer, tmp_path: Path
) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "é"}}, {}]', encoding="utf-8")
    main(["generate", "hi", "--system", "Be brief.", "--max-tokens", "1"])
    chat = server.requests[-1].chat
    assert [(m.role, m.content) for m in chat.messages] == [("system", "Be brief."), ("user", "hi")]
    assert not chat.continue_final_message and not chat.tools
    main(["generate", "hi", "--assistant-prefix", "Well, ", "--tools", str(tools)])
    chat = server.requests[-1].chat
    assert [(m.role, m.content) for m in chat.messages] == [("user", "hi"), ("assistant", "Well, ")]
    assert chat.continue_final_message
    assert not chat.HasField("add_generation_prompt")
    assert [json.loads(tool) for tool in chat.tools] == json.loads(tools.read_text("utf-8"))


@pytest.mark.parametrize(
    "content", [None, b"{}", b"[1]", b"[{]", b"\xff", b"[" * 100_000], ids=lambda c: str(c)[:8]
)
def test_tools_that_are_no_list_of_objects_are_a_usage_error(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tools.json"
    if content is not None:
        file.write_bytes(content)
    assert main(["generate", "hi", "--tools", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and str(file) in printed.err and "--tools" in printed.err
    assert main(["generate", "hi", "--tools", str(file), "--json"]) == 2
    assert documents.parse(capsys.readouterr().out)["error"]["type"] == "UsageError"


def test_generate_json_is_one_request_document(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "one two", "--max-tokens", "2", "--json"]) == 0
    document = documents.parse(capsys.readouterr().out)
    (request,) = document["requests"]
    assert document["command"] == "kvferry generate 'one two' --max-tokens 2 --json"
    assert request["request_id"] == REQUEST_ID
    assert request["prompt_token_ids"] == [0, 1]
    assert request["text"] == " one two"
    assert request["finish_reason"] == "length"
    assert request["timing"]["ttft_s"] == 0.35


def test_failed_generate_keeps_what_came(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.scripts["dies"] = [accepted(), delta(0, 7, text="so far"), WorkerLost("decode-0 died")]
    assert main(["generate", "dies"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "so far\n"
    assert printed.err == "kvferry: decode-0 died\n"
    assert main(["generate", "dies", "--json"]) == 1
    document = documents.parse(capsys.readouterr().out)
    assert document["error"]["type"] == "WorkerLost"
    (request,) = document["requests"]
    assert request["text"] == "so far"
    assert request["error"]["code"] == "UNAVAILABLE"
    assert request["timing"] is None


@pytest.mark.parametrize(
    "events", [[delta(0, 7), delta(0, 7)], [delta(0, 7), delta(5, 7)], [delta(0, 7)]]
)
def test_broken_stream_fails_generate(
    events: Sequence[object], server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.scripts["broken"] = [accepted(), *events]  # type: ignore[list-item]
    assert main(["generate", "broken", "--json"]) == 1
    assert documents.parse(capsys.readouterr().out)["error"]["type"] == "StreamError"


def test_refused_request_is_a_usage_error_and_named(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.scripts["bad"] = [InvalidRequest("top_p: got 7.0, wanted at most 1")]
    assert main(["generate", "bad"]) == 2
    assert "top_p: got 7.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--endpoint", "nonsense"],
        ["--endpoint", ":"],
        ["--endpoint", "127.0.0.1:99999"],
        ["--endpoint", "127.0.0.1:0"],
        ["--seed", "-1"],
        ["--seed", str(2**64)],
    ],
)
def test_values_that_cannot_be_are_refused_before_anybody_is_asked(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x", *arguments]) == 2
    err = capsys.readouterr().err
    assert arguments[0] in err and repr(arguments[1]).strip("'") in err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("kvferry ")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_interrupted_generate_cancels_its_request_and_is_exit_130(
    flags: list[str], server: FakeServer
) -> None:
    server.scripts["slow"] = [accepted(), delta(0, 7, text="so far"), HOLD]
    process = subprocess.Popen(
        [*KVFERRY, "generate", "slow", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert server.holding.wait(30)
        if not flags:
            assert process.stdout is not None
            assert process.stdout.read(6) == "so far"  # it has come to the stream
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert server.left.wait(10)
    if flags:
        document = documents.parse(out)
        assert document["error"]["type"] == "Cancelled"
        assert document["requests"][0]["finish_reason"] == "abort"


def test_reader_that_goes_away_ends_generate_quietly(server: FakeServer) -> None:
    # More than a pipe holds, so that a write fails whatever the timing.
    long = "x" * 70_000
    server.scripts["long"] = [accepted(), *(delta(at, at, text=long) for at in range(4)), HOLD]
    process = subprocess.Popen(
        [*KVFERRY, "generate", "long"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
    assert (process.returncode, err) == (1, "")
    assert server.left.wait(10)


def test_reader_that_never_was_ends_a_document_quietly(server: FakeServer) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*KVFERRY, "status", "--json"], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_status_shows_workers(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert "tiny (float32), ready" in shown
    assert "KV int8, blocks of 16 positions, 195,840 bytes" in shown
    assert "decode-0" in shown
    assert main(["status", "--json"]) == 0
    document = documents.parse(capsys.readouterr().out)
    assert [worker["worker_id"] for worker in document["workers"]] == ["prefill-0", "decode-0"]
    assert document["counters"]["finished_stop"] == 1


def test_status_shows_placements_when_asked(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--decisions"]) == 0
    assert "least loaded pair" in capsys.readouterr().out
    assert main(["status", "--decisions", "--json"]) == 0
    (decision,) = json.loads(capsys.readouterr().out)["decisions"]
    assert decision["prefill_worker"] == "prefill-0"
    assert decision["actual_ttft_s"] is None
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["decisions"] is None


def test_status_of_a_cluster_that_is_not_ready_is_an_answer(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not isinstance(server.status, Exception)
    server.status.ready = False
    server.status.not_ready_reasons.append("no decode worker")
    assert main(["status"]) == 0
    assert "no decode worker" in capsys.readouterr().out


def test_blocks_shows_pools_and_one_worker(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["blocks"]) == 0
    assert capsys.readouterr().out.count(" ok\n") == 2
    assert main(["blocks", "--worker", "decode-0", "--json"]) == 0
    (pool,) = documents.parse(capsys.readouterr().out)["pools"]
    assert pool["worker_id"] == "decode-0"
    assert pool["blocks"][0]["class"] == "cached"


def test_unknown_worker_is_exit_1(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["blocks", "--worker", "nobody"]) == 1
    assert "nobody" in capsys.readouterr().err


def test_inconsistent_audit_is_exit_1_and_shown(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not isinstance(server.audit, Exception)
    server.audit.pools[1].consistent = False
    server.audit.pools[1].problems.append("block 3 has no owner and is not free")
    assert main(["blocks"]) == 1
    printed = capsys.readouterr()
    assert "WRONG" in printed.out
    assert "decode-0: block 3 has no owner" in printed.err
    assert main(["blocks", "--json"]) == 1
    document = documents.parse(capsys.readouterr().out)
    assert document["ok"] is False
    assert document["pools"][1]["problems"]


def test_bench_serve_prints_a_table_or_a_document(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", "serve", "--input-tokens", "4", "--output-tokens", "3", "--num-requests", "4"]
    assert main([*argv, "--concurrency", "2"]) == 0
    assert "output tokens/s" in capsys.readouterr().out
    assert main([*argv, "--concurrency", "2", "--repeats", "2", "--json"]) == 0
    document = documents.parse(capsys.readouterr().out)
    assert document["workload"]["concurrency"] == 2
    assert document["results"]["completed"] == 4
    assert len(document["repeats"]) == 2
    assert document["target"]["server_version"] == "1.2.3"
    assert document["arrangement"] == {
        "prefill": 1,
        "decode": 1,
        "colocated": 0,
        "threads": 2,
        "dtype": "float32",
    }


def test_models_lists_what_is_not_fetched_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path))
    assert main(["models", "list"]) == 0
    assert "not fetched" in capsys.readouterr().out
    assert main(["models", "list", "--json"]) == 0
    first = documents.parse(capsys.readouterr().out)["models"][0]
    assert first["path"] is first["size_bytes"] is None


def test_unknown_model_is_exit_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path))
    assert main(["models", "pull", "no-such-model", "--json"]) == 3
    document = documents.parse(capsys.readouterr().out)
    assert document["error"]["type"] == "ModelMissing"
    assert "no-such-model" in document["error"]["message"]


def test_a_fault_of_our_own_is_reported_and_traced(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("kvferry.cluster.cli.status.status_json", broken)
    assert main(["status", "--json"]) == 1
    printed = capsys.readouterr()
    assert "Traceback" in printed.err
    assert documents.parse(printed.out)["error"]["type"] == "ZeroDivisionError"


def test_typed_errors_of_unary_calls_reach_the_document(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status = Internal("the router has lost its mind")
    assert main(["status", "--json"]) == 1
    assert "lost its mind" in documents.parse(capsys.readouterr().out)["error"]["message"]


def test_text_that_the_terminal_cannot_show_is_no_failure(server: FakeServer) -> None:
    server.scripts["symbols"] = [accepted(), delta(0, 7, text="é→😀"), finished(1)]
    done = subprocess.run(
        [*KVFERRY, "generate", "symbols"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
