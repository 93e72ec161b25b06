"""Calls at all three doors: who has no key, a wrong one, or another's, is refused and counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvferry.cluster.access.gate import Caller
from kvferry.cluster.client import Client
from kvferry.cluster.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KVFerryError,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    from_grpc,
)
from kvferry.cluster.grpc_guard import CALLERS_SERVICES
from kvferry.cluster.http_door.guard import Admits
from kvferry.protos import kvferry_pb2 as pb
from tests.cluster.access.locked import ACME, BROAD, HASTY, OPERATOR, SLOW, THRIFTY, ZETA, Locked
from tests.cluster.http_door.test_errors import error_of
from tests.stack import BLOCK, LONG_S, Stack, eventually

WRONG = "wrong-token-0123456789"
SHORT: dict[str, Any] = {"max_tokens": 2, "ignore_eos": True}


@contextmanager
def counted(
    locked: Locked, kind: type[KVFerryError], caplog: pytest.LogCaptureFixture, times: int = 1
) -> Iterator[None]:
    """So many calls are refused meanwhile, each counted and logged, none with its token."""
    before = locked.rejected()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "kvferry"):
        yield
        wanted = before + Counter({kind.__name__: times})
        eventually("it is counted", lambda: locked.rejected() == wanted, LONG_S)
    said = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(said) == times and all(kind.__name__ in line for line in said), said
    assert all("127.0.0.1" in line for line in said), "where it came from"
    for token in (OPERATOR, ACME, ZETA, SLOW, WRONG):
        assert not any(token in line for line in said)


INFERENCE, CLUSTER = (pb.DESCRIPTOR.services_by_name[name] for name in ("Inference", "Cluster"))
METHODS = {
    method.name: method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def call(client: Client, name: str) -> None:
    """Any method of the contract, with an empty request; raises its typed error."""
    method = METHODS[name]
    channel: Any = client._channel
    kind = channel.unary_stream if method.server_streaming else channel.unary_unary
    begin = kind(f"/{method.containing_service.full_name}/{name}", bytes, bytes)
    try:
        answer = begin(b"", timeout=LONG_S, metadata=client._metadata)
        if method.server_streaming:
            list(answer)
    except grpc.RpcError as error:
        raise from_grpc(error) from error


def test_no_method_streams_requests() -> None:
    """``call`` sends one."""
    assert not any(method.client_streaming for method in METHODS.values())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("token", [None, WRONG])
def test_grpc_without_a_known_token(
    locked: Locked, name: str, token: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        counted(locked, Unauthenticated, caplog),
        locked.client(token) as client,
        pytest.raises(Unauthenticated),
    ):
        call(client, name)


@pytest.mark.parametrize("name", [method.name for method in CLUSTER.methods])
def test_a_tenant_does_not_look_at_the_cluster(
    locked: Locked, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        counted(locked, PermissionDenied, caplog),
        locked.client(ACME) as client,
        pytest.raises(PermissionDenied, match=r"server\.auth\.tokens_file"),
    ):
        call(client, name)


def test_every_service_is_of_one_kind() -> None:
    """A new one is the operators' until somebody has thought about it, here too."""
    assert set(pb.DESCRIPTOR.services_by_name.values()) == {INFERENCE, CLUSTER}
    assert {INFERENCE.full_name} == CALLERS_SERVICES


@pytest.mark.parametrize(("token", "named"), [(ACME, "zeta"), (ACME, "?"), (OPERATOR, "acme")])
def test_another_s_tenant_over_grpc(
    locked: Locked, token: str, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        counted(locked, PermissionDenied, caplog),
        locked.client(token) as client,
        pytest.raises(PermissionDenied, match=f"tenant: got '.?{named[:1]}"),
    ):
        client.generate_text("x", tenant=named, **SHORT)


@pytest.mark.parametrize("named", ["", "acme"])
def test_a_tenant_is_served_over_both_doors(locked: Locked, named: str) -> None:
    with locked.client(ACME) as client:
        done = client.generate_text("hello", tenant=named, **SHORT)
    assert done.usage.completion_tokens == 2
    with locked.http(ACME) as http:
        body = {"prompt": "hello", "tenant": named, **SHORT}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert http.get("/v1/models").status_code == 200


def test_operators_see_the_cluster(locked: Locked) -> None:
    with locked.client(OPERATOR) as client:
        assert client.status().ready and len(client.audit().pools) == 2
        assert client.generate_text("hello", **SHORT).usage.completion_tokens == 2
        with pytest.raises(DeadlineExceeded):  # it is let in; nobody is here who starts workers
            client.scale(decode=2, timeout_s=0.2)
    with locked.http(OPERATOR) as http, locked.scraper(OPERATOR) as scraper:
        for each in (http, scraper):
            answer = each.get("/metrics")
            assert answer.status_code == 200 and "kvferry_requests_rejected_total" in answer.text


def test_http_without_a_known_token(locked: Locked, caplog: pytest.LogCaptureFixture) -> None:
    """Every route but the open ones, and a path that is none."""
    server: Any = locked.stack.http_server
    served = [
        (method, route.path.replace("{name:path}", "stub"))
        for route in server._server.config.app.routes
        if route.admits is not Admits.ANYBODY
        for method in route.methods
    ]
    assert len(served) >= 7
    for method, path in [*served, ("POST", "/x")]:
        for token in (None, WRONG):
            with counted(locked, Unauthenticated, caplog), locked.http(token) as http:
                answer = http.request(method, path)
            error = error_of(answer, 401)
            assert (error["type"], error["code"]) == ("authentication_error", "unauthenticated")
            assert answer.headers["kvferry-error"] == "Unauthenticated"
            assert answer.headers["www-authenticate"] == "Bearer"


def test_another_s_tenant_over_http(locked: Locked, caplog: pytest.LogCaptureFixture) -> None:
    with counted(locked, PermissionDenied, caplog), locked.http(ACME) as http:
        answer = http.post("/v1/completions", json={"prompt": "x", "tenant": "zeta"})
    error = error_of(answer, 403)
    assert (error["type"], error["code"]) == ("permission_error", "permission_denied")


def test_a_tenant_does_not_read_the_metrics(
    locked: Locked, caplog: pytest.LogCaptureFixture
) -> None:
    with counted(locked, PermissionDenied, caplog), locked.http(ACME) as http:
        error_of(http.get("/metrics"), 403)
    for token, kind, status in ((None, Unauthenticated, 401), (ACME, PermissionDenied, 403)):
        with counted(locked, kind, caplog), locked.scraper(token) as scraper:
            answer = scraper.get("/metrics")
        assert answer.status_code == status and "kvferry_" not in answer.text


def test_health_and_reflection_need_no_token(locked: Locked) -> None:
    before = locked.rejected()
    with locked.client(None) as client:
        assert client.health()
        stub = reflection_pb2_grpc.ServerReflectionStub(client._channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = stub.ServerReflectionInfo(iter([ask]), timeout=LONG_S)
        assert "kvferry.v1.Inference" in str(answer)
    with locked.http(None) as http:
        assert http.get("/health").status_code == http.get("/ready").status_code == 200
    assert locked.rejected() == before


def test_a_request_is_cancelled_by_its_tenant_and_by_operators_only(locked: Locked) -> None:
    locked.stack.prefill.runner.allow(0)
    try:
        for cancels in (ACME, OPERATOR):
            with (
                locked.client(ACME) as client,
                locked.client(ZETA) as other,
                locked.client(cancels) as owner,
                client.generate("hello", **SHORT) as stream,
            ):
                next(iter(stream))
                assert not other.cancel(stream.request_id), "to others it is unknown"
                assert owner.cancel(stream.request_id)
    finally:
        locked.stack.prefill.runner.allow(None)
    assert not locked.stack.on_loop(lambda: dict(locked.stack.node._tenant_of))


def test_a_tenant_finds_nothing_of_another_s_cache_whatever_salt_it_chooses(
    locked: Locked,
) -> None:
    prompt = list(range(40, 40 + 6 * BLOCK))

    def cached(token: str, salt: str = "") -> int:
        with locked.client(token) as client:
            done = client.generate_text(token_ids=prompt, cache_salt=salt, **SHORT)
        return done.usage.cached_tokens

    assert cached(ACME) == 0
    assert cached(ACME) > 0, "its own it finds"
    for salt in ("", "acme", "4:acme:", "4:zeta:", "0::"):
        assert cached(ZETA, salt) == 0
        assert cached(OPERATOR, salt) == 0
    assert cached(ACME, "private") == 0


def test_beyond_its_rate_a_tenant_is_told_when_to_come_again(
    locked: Locked, caplog: pytest.LogCaptureFixture
) -> None:
    """One token a second, of which ten were saved up; others are not held up."""
    with locked.client(SLOW) as client:
        done = client.generate_text(token_ids=range(1, 30), max_tokens=150, ignore_eos=True)
        assert done.usage.completion_tokens == 150, "what runs is not cut off"
        with counted(locked, Overloaded, caplog), pytest.raises(Overloaded) as caught:
            client.generate_text("x", **SHORT)
    assert caught.value.retry_after_s is not None
    assert 60 < caught.value.retry_after_s <= 170, "prompt and output less what was saved up"
    with counted(locked, Overloaded, caplog), locked.http(SLOW) as http:
        answer = http.post("/v1/completions", json={"prompt": "x"})
    error_of(answer, 429)
    assert 60 < int(answer.headers["retry-after"]) <= 170
    with locked.client(ACME) as client:
        assert client.generate_text("x", **SHORT).usage.completion_tokens == 2


def test_prompts_of_one_call_are_let_in_together(locked: Locked) -> None:
    """Each could use more than was saved up, so that one at a time the others would be refused."""
    asked = {"prompt": ["x", "y", "z"], "max_tokens": 20, "ignore_eos": True}
    with locked.http(BROAD) as http:
        answer = http.post("/v1/completions", json=asked)
        assert answer.status_code == 200
        assert len(answer.json()["choices"]) == 3
        error_of(http.post("/v1/completions", json=asked), 429)


def test_what_a_client_that_leaves_has_not_used_is_given_back(locked: Locked) -> None:
    asked = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
    runner = locked.stack.prefill.runner
    runner.allow(0)
    try:
        with locked.http(HASTY) as http, pytest.raises(httpx2.ReadTimeout):
            http.post("/v1/completions", json=asked, timeout=0.5)
    finally:
        locked.stack.release()
    with locked.http(HASTY) as http:
        short = {"prompt": "x", **SHORT}
        answers = partial(http.post, "/v1/completions", json=short)
        eventually("it is let in again", lambda: answers().status_code == 200)


def test_what_a_request_does_not_use_is_given_back(locked: Locked) -> None:
    """Of the ten tokens that were saved up it may use far more, and uses three."""
    asked: dict[str, Any] = {"token_ids": [5], "max_tokens": 100, "ignore_eos": True}
    with locked.client(ACME) as client:
        first = client.generate_text(**asked).output_token_ids
    with locked.client(THRIFTY) as client:
        done = client.generate_text(**asked, stop_token_ids=[first[1]])
        assert done.usage.completion_tokens <= 2
        client.generate_text(**asked)


def test_what_others_used_meanwhile_counts_when_a_request_is_submitted(
    locked: Locked, caplog: pytest.LogCaptureFixture
) -> None:
    """One that was taken in within the rate, and comes beyond it, is refused like any."""
    node, peer = locked.stack.node, "ipv4:127.0.0.1:40312"
    caller = Caller("tenant quick (line 1)", "quick")

    async def prepared_then_late() -> None:
        spec = await node.prepare(pb.GenerateRequest(text="x"), caller, peer)
        node.access.tenants.began(caller, 10**6, node.clock())
        node.submit(spec, lambda item: None, node.clock(), caller, peer)

    with counted(locked, Overloaded, caplog), pytest.raises(Overloaded, match="'quick' has used"):
        locked.stack._call(prepared_then_late())
    assert f"tenant quick (line 1) from {peer}" in caplog.text
    assert not locked.stack.on_loop(lambda: dict(node._tenant_of))


def test_a_token_that_is_no_text_is_refused(locked: Locked) -> None:
    with locked.http(None) as http:
        answer = http.get("/v1/models", headers={b"authorization": b"Bearer \xff\xfe"})
    error_of(answer, 401)


def test_an_unknown_method_is_not_told_to_strangers(locked: Locked) -> None:
    with locked.client(None) as client, pytest.raises(grpc.RpcError) as caught:
        client._channel.unary_unary("/kvferry.v1.Inference/Nothing", bytes, bytes)(
            b"", timeout=LONG_S
        )
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_without_tenants_naming_one_is_an_invalid_request(tmp_path: Path) -> None:
    with (
        Stack(tmp_path) as stack,
        Client(stack.endpoint) as client,
        pytest.raises(InvalidRequest, match="there are no tenants"),
    ):
        client.generate_text("x", tenant="acme", **SHORT)
