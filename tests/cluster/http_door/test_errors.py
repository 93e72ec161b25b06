"""Every failure has the table's status and OpenAI's shape, and none is a success."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kvferry.cluster.errors import (
    STATUS,
    Cancelled,
    Internal,
    KVFerryError,
    Overloaded,
    Status,
)
from kvferry.cluster.http_door.bodies import MAX_PROMPTS
from kvferry.cluster.routed_request import FAILED, RequestEnd
from kvferry.cluster.server_limits import ServerLimits
from kvferry.engine.request import RequestSpec
from kvferry.protos import kvferry_pb2 as pb
from kvferry.worker.logs import JsonFormatter
from tests.cluster.metrics.scraping import read
from tests.stack import LONG_S, Stack, eventually

ROWS = [pytest.param(cls, status, id=cls.__name__) for cls, status in STATUS.items()]
Background = Callable[[Callable[[], httpx2.Response]], Callable[[], httpx2.Response]]
ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    """A door without workers: what is accepted waits."""
    with Stack(folder, num_prefill=0, num_decode=0, wait_ready=False, http=True) as running:
        yield running
        running.assert_quiet()


def error_of(answer: httpx2.Response, status: int) -> dict[str, Any]:
    """The error that an answer tells, which has OpenAI's four fields and no more."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert isinstance(error["message"], str) and "Traceback" not in error["message"]
    return error


def make(cls: type[KVFerryError]) -> KVFerryError:
    return Overloaded("said", 1.25) if cls is Overloaded else cls("said")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("cls", "status"), ROWS)
def test_a_refused_request_has_the_table_s_status(
    cls: type[KVFerryError],
    status: Status,
    stream: bool,
    http: httpx2.Client,
    stack: Stack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prepare(request: pb.GenerateRequest) -> RequestSpec:
        raise make(cls)

    monkeypatch.setattr(stack.node.intake, "prepare", prepare)
    answer = http.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert error_of(answer, status.http)["message"] == "said"
    assert answer.headers["kvferry-error"] == cls.__name__
    assert answer.headers.get("retry-after") == ("2" if cls is Overloaded else None)
    assert answer.headers.get("retry-after-ms") == ("1250" if cls is Overloaded else None)


def end_with(stack: Stack, error: KVFerryError) -> None:
    """The one request fails, once it is there."""

    def request() -> Any:
        return next(iter(stack.router.requests.values()), None)

    eventually("it is there", lambda: stack.on_loop(request))
    stack.on_loop(
        lambda: stack.router._end(request(), RequestEnd(FAILED, error), stack.node.clock())
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("cls", "status"), ROWS)
def test_a_request_that_fails_before_its_first_token_has_the_table_s_status_and_its_id(
    cls: type[KVFerryError],
    status: Status,
    stream: bool,
    http: httpx2.Client,
    stack: Stack,
    in_background: Background,
) -> None:
    body = {"prompt": "x", "stream": stream}
    answer = in_background(lambda: http.post("/v1/completions", json=body))
    end_with(stack, make(cls))
    assert error_of(answer(), status.http)["message"] == "said"
    assert len(answer().headers["kvferry-request-id"]) == 32
    assert answer().headers["x-request-id"] == answer().headers["kvferry-request-id"]


@pytest.mark.parametrize(("prompt", "count"), [("x", 1), (["x", "y"], 2)])
def test_a_failure_is_logged_with_the_ids_and_attempts_of_its_requests(
    prompt: Any,
    count: int,
    http: httpx2.Client,
    stack: Stack,
    in_background: Background,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answer = in_background(lambda: http.post("/v1/completions", json={"prompt": prompt}))

    def abouts() -> list[dict[str, object]]:
        found = [request.about for request in stack.router.requests.values()]
        return found if len(found) == count else []

    known = eventually("all are there", lambda: stack.on_loop(abouts))
    end_with(stack, Internal("a bug"))
    assert error_of(answer(), 500)["message"] == "a bug"
    (record,) = [each for each in caplog.records if "a bug" in each.getMessage()]
    line = json.loads(JsonFormatter("router-0").format(record))
    if count == 1:
        assert {name: line[name] for name in ("request_id", "attempt")} == known[0]
    else:
        assert line["requests"] == known


BODIES: tuple[tuple[str, Any, str | None], ...] = (
    ("/v1/completions", {"prompt": "x", "temperature": "hot"}, "InvalidRequest"),
    ("/v1/completions", {"prompt": "x", "unknown": 1}, "InvalidRequest"),
    ("/v1/completions", {"prompt": "x", "stream_options": {}}, "InvalidRequest"),
    ("/v1/chat/completions", {"messages": []}, "InvalidRequest"),
    ("/v1/chat/completions", b"{", "InvalidRequest"),
    ("/v1/completions", None, "InvalidRequest"),  # not said to be JSON
    ("/v1/completions", {"prompt": "x", "model": "another"}, "UnknownModel"),
    ("/tokenize", {"prompt": 3}, None),  # nothing is generated
)


@pytest.mark.parametrize(("path", "body", "reason"), BODIES)
def test_what_is_refused_is_counted_once_by_its_reason(
    path: str, body: Any, reason: str | None, http: httpx2.Client
) -> None:
    def rejected() -> dict[str, float]:
        page = read(http.get("/metrics").content)
        return page.by("reason", "kvferry_requests_rejected_total")

    before = rejected()
    if isinstance(body, dict):
        answer = http.post(path, json=body)
    else:
        kind = "application/json" if body else "text/plain"
        answer = http.post(path, content=body or b"x", headers={"content-type": kind})
    assert 400 <= answer.status_code < 500
    after = rejected()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert {name: count for name, count in grown.items() if count} == (
        {} if reason is None else {reason: 1}
    )


def test_a_fault_of_our_own_names_itself_without_a_traceback(
    http: httpx2.Client, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(request: object) -> RequestSpec:
        raise ZeroDivisionError("a\nbug")

    monkeypatch.setattr(stack.node.intake, "prepare", broken)
    monkeypatch.setattr(stack.node.intake, "tokenize_input", broken)
    for path in ("/v1/completions", "/tokenize"):
        error = error_of(http.post(path, json={"prompt": "x"}), 500)
        assert error["message"] == "ZeroDivisionError: a bug"
        assert (error["type"], error["code"]) == ("server_error", "internal")


def test_a_stream_that_fails_later_says_so_and_is_not_done(folder: Path) -> None:
    with (
        Stack(folder, http=True) as stack,
        httpx2.Client(base_url=stack.url, timeout=LONG_S) as http,
    ):
        stack.decode.runner.allow(2)
        body = {"prompt": "x", "max_tokens": 50, "stream": True, "temperature": 0}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            lines = (line for line in answer.iter_lines() if line)
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
            stack.decode.runner.wait_held()
            end_with(stack, Cancelled("said"))
            *_, last = list(lines)  # the answer ends as HTTP answers do
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["message"], error["code"]) == ("said", "cancelled")
        stack.release()
        stack.assert_quiet()


def test_a_request_cancelled_by_another_is_no_success(
    http: httpx2.Client,
    stack: Stack,
    in_background: Background,
) -> None:
    answer = in_background(lambda: http.post("/v1/completions", json={"prompt": "x"}))
    (request_id,) = eventually(
        "it is there", lambda: stack.on_loop(lambda: list(stack.router.requests))
    )
    assert stack.on_loop(lambda: stack.node.cancel(request_id))
    assert error_of(answer(), 499)["code"] == "cancelled"


def test_a_full_queue_says_when_to_come_back_and_a_batch_is_all_or_nothing(folder: Path) -> None:
    stack = Stack(folder, num_prefill=0, num_decode=0, wait_ready=False, http=True)
    stack.router_config = replace(stack.router_config, queue_limit=2)
    with stack, httpx2.Client(base_url=stack.url, timeout=LONG_S) as http:
        answer = http.post("/v1/completions", json={"prompt": ["x", "y", "z"]})
        error = error_of(answer, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert answer.headers["retry-after"] == "1"
        assert stack.counters()["rejected"] == 1
        stack.assert_quiet()


# --- what is not a request ----------------------------------------------------------------------


def test_an_unknown_route_and_a_wrong_method_are_told_alike(http: httpx2.Client) -> None:
    for path in ("/v1/embeddings", "/docs", "/openapi.json", "/v1/completions/"):
        assert error_of(http.get(path), 404)["code"] == "no_such_route"
    assert error_of(http.get("/v1/completions"), 405)["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_an_unknown_model_is_not_found(path: str, http: httpx2.Client) -> None:
    error = error_of(http.post(path, json={"model": "gpt-9", "prompt": "x"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'gpt-9'" in error["message"] and "'stub'" in error["message"]
    assert error_of(http.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"


DEEP = 5000
BROKEN = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b"\xff\xfe{", "not valid JSON"),
    (b'{"prompt": NaN}', "not valid JSON"),
    (b'{"prompt": "x", "temperature": 1e999}', "not valid JSON"),
    (b'{"seed": 1' + b"0" * 5000 + b"}", "not valid JSON"),
    (b'{"prompt": "x", "prompt": "y"}', "stands twice"),
    (b"[" * DEEP + b"]" * DEEP, "nested too deeply"),
    (b'{"prompt": ' * DEEP + b"1" + b"}" * DEEP, "nested too deeply"),
    (b"[]", "wanted a JSON object"),
    (b"null", "wanted a JSON object"),
    (b'"x"', "wanted a JSON object"),
]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("body", "said"), BROKEN, ids=range(len(BROKEN)))
def test_a_body_that_is_no_json_object_is_refused(
    body: bytes, said: str, path: str, http: httpx2.Client
) -> None:
    answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert said in error_of(answer, 400)["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_read(kind: str, http: httpx2.Client) -> None:
    headers = {"content-type": kind} if kind else {}
    answer = http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert "application/json" in error_of(answer, 415)["message"]


REFUSED = [
    ({}, "prompt", "missing"),
    ({"prompt": 3}, "prompt", "wanted a string"),
    ({"prompt": []}, "prompt", "wanted a string"),
    ({"prompt": ""}, "prompt", "no tokens"),
    ({"prompt": [1.5]}, "prompt", "wanted strings only"),
    ({"prompt": [True]}, "prompt", "wanted strings only"),
    ({"prompt": ["x", [1]]}, "prompt", "wanted strings only"),
    ({"prompt": ["x"] * (MAX_PROMPTS + 1)}, "prompt", "at most"),
    ({"prompt": [[1], [10**6]]}, "prompt[1]", "wanted 0 to"),
    ({"prompt": ["x", ""]}, "prompt[1]", "no tokens"),
    ({"prompt": [2**40]}, "prompt", "prompt"),
    ({"prompt": "\ud800"}, "prompt", "cannot be encoded"),
    ({"prompt": "x", "user": "\ud800"}, "user", "valid Unicode"),
    ({"max_tokens": 0}, "max_tokens", "wanted 1 to"),
    ({"max_tokens": 1.5}, "max_tokens", "integer"),
    ({"max_tokens": True}, "max_tokens", "integer"),
    ({"max_tokens": "3"}, "max_tokens", "integer"),
    ({"max_tokens": 2**31}, "max_tokens", "cannot be encoded"),
    ({"max_tokens": 10**4000}, "max_tokens", "cannot be encoded"),
    ({"temperature": -1}, "temperature", "wanted from 0"),
    ({"temperature": 10**4000}, "temperature", "number"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "wanted above 0"),
    ({"seed": -1}, "seed", "cannot be encoded"),
    ({"n": 65}, "n", "wanted 1 to 64"),
    ({"logprobs": 21}, "logprobs", "wanted 0 to 20"),
    ({"stop": 3}, "stop", "a string or a list of strings"),
    ({"stop": [""]}, "stop", "0 characters"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids as keys"),
    ({"logit_bias": {"1": 101}}, "logit_bias[1]", "-100 to 100"),
    ({"logit_bias": {"1": "x"}}, "logit_bias", "numbers"),
    ({"logit_bias": {"1": 10**4000}}, "logit_bias", "numbers"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "wanted 0 to"),
    ({"logit_bias": {"9999999999": 1}}, "logit_bias", "cannot be encoded"),
    ({"priority": 1}, "priority", "order of arrival"),
    ({"priority": 2**31}, "priority", "less than"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "without stream"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "not supported"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "streams"),
    ({"echo": 0}, "echo", "boolean"),
    ({"echo": True, "logprobs": 1, "prompt_logprobs": 1}, "prompt_logprobs", "show the same"),
    ({"echo": True, "logprobs": 1, "stream": True, "n": 2}, "n", "wanted 1"),
    ({"echo": True, "logprobs": 21}, "logprobs", "wanted 0 to 20"),
    ({"best_of": 2}, "best_of", "not supported"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"guided_json": {}}, "guided_json", "not supported"),
    ({"max_token": 3}, "max_token", "did you mean max_tokens?"),
]


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED, ids=range(len(REFUSED)))
def test_a_field_is_refused_by_name(
    fields: dict[str, Any], param: str, said: str, http: httpx2.Client
) -> None:
    body = fields if "prompt" in fields or not fields else {"prompt": "x", **fields}
    content = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    error = error_of(http.post("/v1/completions", content=content, headers=headers), 400)
    assert error["param"] == param
    assert said in error["message"] and len(error["message"]) < 500


def test_a_prompt_that_is_too_long_has_openai_s_code(http: httpx2.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": [5] * 200})
    assert error_of(answer, 400)["code"] == "context_length_exceeded"
    assert answer.headers["kvferry-error"] == "PromptTooLong"


def test_a_body_beyond_the_limit_is_refused_declared_or_not(folder: Path) -> None:
    limits = ServerLimits(max_message_bytes=4096)
    body = json.dumps({"prompt": "x" * 5000}).encode()
    headers = {"content-type": "application/json"}
    with (
        Stack(folder, http=True, limits=limits) as stack,
        httpx2.Client(base_url=stack.url, timeout=LONG_S) as http,
    ):
        for content in (body, iter([body[:3000], body[3000:]])):
            answer = http.post("/v1/completions", content=content, headers=headers)
            assert "at most 4096" in error_of(answer, 413)["message"]
        small = {"prompt": "x", "max_tokens": 1}
        assert http.post("/v1/completions", json=small).status_code == 200
        assert stack.counters()["accepted"] == 1


# --- health and readiness -----------------------------------------------------------------------


def test_ready_says_why_not(http: httpx2.Client, stack: Stack) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    error = error_of(http.get("/ready"), 503)
    assert error["code"] == "not_ready" and "no live" in error["message"]


def test_ready_follows_the_workers(folder: Path) -> None:
    with Stack(folder, http=True) as stack, httpx2.Client(base_url=stack.url) as http:
        assert http.get("/ready").json() == {"ready": True}
        dead = stack.prefill
        dead.process.stop()
        stack.on_loop(lambda: stack.node.worker_died(dead.ref, "its process has ended"))
        error_of(http.get("/ready"), 503)
        assert http.get("/health").status_code == 200


def test_metrics_are_served_here_too(http: httpx2.Client) -> None:
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert "kvferry_requests_accepted_total" in answer.text
