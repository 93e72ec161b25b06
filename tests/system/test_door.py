"""The gRPC front door over a real socket: what it tells, what it allows, how each error looks."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from kvferry.cluster.client import Client, GenerateStream
from kvferry.cluster.errors import (
    ERROR_KEY,
    REQUEST_ID_KEY,
    RETRY_AFTER_KEY,
    STATUS,
    Cancelled,
    InvalidRequest,
    Overloaded,
    trailing_metadata,
)
from kvferry.cluster.routed_request import FAILED, RequestEnd, RoutedRequest
from kvferry.cluster.server_limits import ServerLimits
from kvferry.cluster.token_run import TokenRun
from kvferry.engine.request import RequestSpec
from kvferry.kv_cache.errors import KVFerryError
from kvferry.protos import kvferry_pb2 as pb
from kvferry.protos.kvferry_pb2_grpc import InferenceStub
from kvferry.worker.messages import NodeRef, Role
from tests.stack import LONG_S, Stack, eventually

SERVICES = {"kvferry.v1.Inference", "kvferry.v1.Cluster", "grpc.health.v1.Health"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture
def alone(folder: Path) -> Iterator[Stack]:
    """A front door without any worker: what is accepted waits."""
    with Stack(folder, num_prefill=0, num_decode=0, wait_ready=False) as stack:
        yield stack


def health_of(stack: Stack, service: str = "kvferry.v1.Inference") -> bool:
    with grpc.insecure_channel(stack.endpoint) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=LONG_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def the_request(stack: Stack) -> RoutedRequest | None:
    """The one request that the router knows."""
    return stack.on_loop(lambda: next(iter(stack.router.requests.values()), None))


# --- reflection ---------------------------------------------------------------------------------


def test_reflection_describes_every_service_to_a_client_without_the_proto(alone: Stack) -> None:
    with grpc.insecure_channel(alone.endpoint) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert set(database.get_services()) >= SERVICES
        described = database.FindFileContainingSymbol("kvferry.v1.Inference")
    methods = {method.name for service in described.service for method in service.method}
    assert methods >= {"Generate", "Cancel", "Tokenize", "ListModels", "Status", "Audit", "Drain"}


# --- readiness ----------------------------------------------------------------------------------

P, D = (Role.PREFILL,), (Role.DECODE,)
BOTH = (Role.PREFILL, Role.DECODE)


@pytest.mark.parametrize(
    ("workers", "ready"),
    [
        ({}, False),
        ({"prefill-0": P}, False),
        ({"decode-0": D}, False),
        ({"prefill-0": P, "prefill-1": P}, False),
        ({"prefill-0": P, "decode-0": D}, True),
        ({"colocated-0": BOTH}, True),
    ],
    ids=lambda value: ",".join(value) or "nobody" if isinstance(value, dict) else str(value),
)
def test_ready_exactly_with_a_live_worker_of_each_role_and_a_handshake(
    alone: Stack, workers: dict[str, tuple[Role, ...]], ready: bool
) -> None:
    assert not health_of(alone)
    for name, roles in workers.items():
        alone.join(name, roles)

    def loads_known() -> bool:
        return all(record.load is not None for record in alone.router.workers)

    eventually("every worker has been heard", lambda: alone.on_loop(loads_known))
    if ready:
        eventually("health follows", lambda: health_of(alone) and health_of(alone, ""))
    else:
        assert not health_of(alone)
    with Client(alone.endpoint) as client:
        status = client.status()
    assert status.ready == ready == (not status.not_ready_reasons)


def test_not_ready_before_a_handshake_although_both_are_alive(alone: Stack) -> None:
    refused = alone.join("prefill-0", P)
    refused.connector.server.close()  # nobody answers handshakes here
    decode = alone.join("decode-0", D)

    def tried() -> bool:
        record = alone.router.workers.get(decode.ref)
        return record is not None and record.load is not None and bool(record.load.peers)

    eventually("decode has tried", lambda: alone.on_loop(tried))
    with Client(alone.endpoint) as client:
        assert list(client.status().not_ready_reasons) == [
            "no decode worker has connected to a prefill worker"
        ]
    assert not health_of(alone)


@pytest.mark.parametrize("gone", ["prefill-0", "decode-0"])
def test_not_ready_once_the_last_worker_of_a_role_is_gone_and_ready_with_its_successor(
    folder: Path, gone: str
) -> None:
    with Stack(folder) as stack:
        eventually("ready", lambda: health_of(stack))
        dead = stack.workers[gone]
        dead.process.stop()
        stack.on_loop(lambda: stack.node.worker_died(dead.ref, "its process has ended"))
        eventually("not ready", lambda: not health_of(stack))
        stack.join(gone, P if gone == "prefill-0" else D)
        eventually("ready again", lambda: health_of(stack))


# --- limits -------------------------------------------------------------------------------------


def test_a_message_beyond_the_limit_is_refused_with_both_sizes_and_others_are_served(
    folder: Path,
) -> None:
    with (
        Stack(folder, limits=ServerLimits(max_message_bytes=4096)) as stack,
        Client(stack.endpoint) as client,
    ):
        with pytest.raises(InvalidRequest, match=r"\d{5} vs\. 4096"):
            client.generate_text(token_ids=[100_000] * 5000)
        assert client.generate_text("x", max_tokens=3).usage.completion_tokens == 3
        assert stack.counters()["accepted"] == 1


def test_a_client_may_ping_while_its_request_waits(folder: Path) -> None:
    limits = ServerLimits(min_client_ping_s=0.01)
    options = [("grpc.keepalive_time_ms", 50), ("grpc.http2.max_pings_without_data", 0)]
    with (
        Stack(folder, num_prefill=0, num_decode=0, wait_ready=False, limits=limits) as stack,
        grpc.insecure_channel(stack.endpoint, options=options) as channel,
    ):
        call = InferenceStub(channel).Generate(pb.GenerateRequest(text="x"), timeout=1.0)
        with pytest.raises(grpc.RpcError) as ended:
            list(call)
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED, ended.value.details()


class Wire:
    """A TCP link to a server that can go dead without a word, as when a machine vanishes."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._target = (host, int(port))
        self._dead = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """From now on nothing passes, and nobody is told."""
        self._dead.set()
        self._thread.join(LONG_S)

    def close(self) -> None:
        """Close both ends."""
        self.cut()
        for end in self._ends:
            end.close()
        self._listener.close()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(self._target)
        self._ends = (client, server)
        while not self._dead.is_set():
            for end in select.select(self._ends, [], [], 0.02)[0]:
                data = end.recv(1 << 16)
                (server if end is client else client).sendall(data)
                if not data:
                    return


def test_a_client_whose_machine_vanishes_has_its_request_cancelled(folder: Path) -> None:
    limits = ServerLimits(keepalive_s=0.2, keepalive_timeout_s=0.3)
    with Stack(folder, num_prefill=0, num_decode=0, wait_ready=False, limits=limits) as stack:
        wire = Wire(stack.endpoint)
        with contextlib.closing(wire), Client(wire.endpoint) as client:
            stream = client.generate("x")
            assert isinstance(next(stream), pb.Accepted)
            wire.cut()
            eventually("it is cancelled", lambda: stack.counters().get("finished_abort"))
        stack.assert_quiet()


# --- slow clients -------------------------------------------------------------------------------

BIG = 40_000  # tokens of one delta: more than the transport takes for a client that does not read


def push_tokens(stack: Stack, count: int, times: int = 1) -> None:
    """Tokens come, as from a worker, so many times with no pause between."""

    def push() -> None:
        (request,) = stack.router.requests.values()
        for _ in range(times):
            known = len(request.delivered)
            run = TokenRun(known, (130 + known % 90,) * count)
            branch = request.branches[0]
            stack.router._delivery._deliver(request, branch, run, stack.node.clock())

    stack.on_loop(push)


@contextlib.contextmanager
def unread_stream(stack: Stack) -> Iterator[GenerateStream]:
    """A stream of which only the first message has been read, with windows that do not grow."""
    request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=10 * BIG))
    options = [("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(stack.endpoint, options=options) as channel:
        call = InferenceStub(channel).Generate(request)
        with GenerateStream(call, request, stack.endpoint) as stream:
            assert isinstance(next(stream), pb.Accepted)
            yield stream


def test_a_slow_client_gets_what_waited_as_one(folder: Path) -> None:
    with (
        Stack(
            folder, num_prefill=0, num_decode=0, wait_ready=False, max_model_len=20 * BIG
        ) as stack,
        unread_stream(stack) as stream,
    ):
        for _ in range(4):
            push_tokens(stack, BIG)  # of these, some fill the transport
        for _ in range(100):
            push_tokens(stack, 2)
        request = the_request(stack)
        assert request is not None
        deltas: list[pb.Delta] = []
        while sum(len(delta.token_ids) for delta in deltas) < 4 * BIG + 200:
            event = next(stream)
            assert isinstance(event, pb.Delta)
            deltas.append(event)
        assert len(deltas) < 10, "what waited came piece by piece"
        received = [token for delta in deltas for token in delta.token_ids]
        assert received == request.delivered
        stream.close()
        stack.assert_quiet()
        assert "slow_clients" not in stack.counters()


def test_a_client_that_takes_nothing_is_cancelled_counted_and_told(folder: Path) -> None:
    with (
        Stack(
            folder,
            num_prefill=0,
            num_decode=0,
            wait_ready=False,
            max_model_len=20 * BIG,
            limits=ServerLimits(slow_client_limit_s=1.0),
        ) as stack,
        unread_stream(stack) as stream,
    ):
        push_tokens(stack, BIG, times=4)
        eventually("it is cancelled", lambda: stack.counters().get("slow_clients"))
        stack.assert_quiet()
        assert stack.counters()["finished_abort"] == stack.counters()["slow_clients"] == 1
        with pytest.raises(Cancelled, match=r"took nothing of its stream for 1 s"):
            list(stream)
        with Client(stack.endpoint) as other:  # and nobody else has noticed
            assert other.status().counters.aborted == 1


# --- statuses -----------------------------------------------------------------------------------

ROWS = [pytest.param(cls, status, id=cls.__name__) for cls, status in STATUS.items()]


def make(cls: type[KVFerryError]) -> KVFerryError:
    return Overloaded("said", 1.25) if cls is Overloaded else cls("said")


def failure_of(stack: Stack, act: Callable[[], None] = lambda: None) -> grpc.RpcError:
    """How a Generate call ends that is not to succeed."""
    with grpc.insecure_channel(stack.endpoint) as channel:
        call = InferenceStub(channel).Generate(pb.GenerateRequest(text="x"), timeout=LONG_S)
        with pytest.raises(grpc.RpcError) as ended:
            for _ in call:
                act()
        return ended.value


def assert_told(error: grpc.RpcError, cls: type[KVFerryError], status: str) -> dict[str, str]:
    metadata = trailing_metadata(error)
    assert error.code() is grpc.StatusCode[status]
    assert error.details() == "said"
    assert metadata[ERROR_KEY] == cls.__name__
    assert metadata.get(RETRY_AFTER_KEY) == ("1250" if cls is Overloaded else None)
    return metadata


@pytest.fixture(scope="module")
def door(folder: Path) -> Iterator[Stack]:
    """A front door without workers, for all of these."""
    with Stack(folder, num_prefill=0, num_decode=0, wait_ready=False) as stack:
        yield stack


@pytest.mark.parametrize(("cls", "status"), ROWS)
def test_a_refused_request_has_the_table_s_status_and_metadata(
    door: Stack, cls: type[KVFerryError], status: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(request: pb.GenerateRequest) -> RequestSpec:
        raise make(cls)

    monkeypatch.setattr(door.node.intake, "prepare", prepare)
    metadata = assert_told(failure_of(door), cls, status.grpc)
    assert REQUEST_ID_KEY not in metadata


@pytest.mark.parametrize(("cls", "status"), ROWS)
def test_a_request_that_fails_later_has_the_table_s_status_and_its_id(
    door: Stack, cls: type[KVFerryError], status: Any
) -> None:
    seen: list[str] = []

    def fail() -> None:
        def end() -> None:
            (request,) = door.router.requests.values()
            seen.append(request.request_id)
            door.router._end(request, RequestEnd(FAILED, make(cls)), door.node.clock())

        door.on_loop(end)

    metadata = assert_told(failure_of(door, fail), cls, status.grpc)
    assert [metadata[REQUEST_ID_KEY]] == seen


def test_a_fault_of_our_own_is_internal_and_names_itself(
    door: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(request: pb.GenerateRequest) -> RequestSpec:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(door.node.intake, "prepare", prepare)
    error = failure_of(door)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == "ZeroDivisionError: a bug"
    assert trailing_metadata(error)[ERROR_KEY] == "Internal"


def test_a_full_queue_is_told_with_when_to_come_back(folder: Path) -> None:
    stack = Stack(folder, num_prefill=0, num_decode=0, wait_ready=False)
    stack.router_config = replace(stack.router_config, queue_limit=1)
    with stack, Client(stack.endpoint) as client, client.generate("x") as waiting:
        assert isinstance(next(waiting), pb.Accepted)
        error = failure_of(stack)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert trailing_metadata(error)[RETRY_AFTER_KEY] == "1000"
        assert stack.counters()["rejected"] == 1


def test_an_unknown_worker_is_not_found(door: Stack) -> None:
    with Client(door.endpoint) as client, pytest.raises(KVFerryError, match="no live worker 'x'"):
        client.audit("x")
    assert NodeRef("x", 1) not in door.node.descriptions
