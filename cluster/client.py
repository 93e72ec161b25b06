"""Python clients of ``kvferry.v1``: ``Client`` for threads, ``AsyncClient`` for asyncio.

Both open one channel, give typed errors (``kvferry.cluster.errors``), and hold every stream to
its contract: a repeated or missing index, or an end without the terminal event, raises
StreamError instead of passing for success. Dropping or closing an unfinished stream cancels its
request. Importing this loads neither torch nor ray.

    with Client("127.0.0.1:50051") as client:  # security=ClientSecurity(...) for TLS and tokens
        for event in client.generate("Once upon a time", max_tokens=32):
            ...
        print(client.generate_text("Once upon a time", max_tokens=32).text)
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self, TypeVar, Unpack, cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.cluster.client_security import PLAIN, ClientSecurity
from kvferry.cluster.client_stream import (
    Completion,
    Event,
    GenerateOptions,
    StreamChecker,
    Transcript,
    build_request,
)
from kvferry.cluster.errors import REQUEST_ID_KEY, StreamError, from_grpc, trailing_metadata
from kvferry.protos import kvferry_pb2 as pb
from kvferry.protos.kvferry_pb2_grpc import ClusterStub, InferenceStub

if TYPE_CHECKING:
    from kvferry.protos.kvferry_pb2_grpc import ClusterAsyncStub, InferenceAsyncStub

__all__ = [
    "AsyncClient",
    "AsyncGenerateStream",
    "Client",
    "ClientSecurity",
    "Completion",
    "Event",
    "GenerateOptions",
    "GenerateStream",
]

HEALTH_SERVICE = "kvferry.v1.Inference"
DEFAULT_TIMEOUT_S = 10.0  # of calls that answer at once; streams have no default deadline

# Refuse nothing for its size that the server sends, and notice a vanished server.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class GenerateStream:
    """Iterates over the events of one request; ``request_id`` is known from the first one on.

    A context manager; ``close``, and being dropped, cancel the request unless it has ended.
    """

    def __init__(
        self,
        call: grpc.CallIterator[pb.GenerateResponse],
        request: pb.GenerateRequest,
        endpoint: str,
    ) -> None:
        self._cancel: Callable[[], object] = call.cancel
        self._responses = iter(call)
        self._checker = StreamChecker(request.first_output_index)
        self._endpoint = endpoint

    @property
    def request_id(self) -> str:
        """The server's id, or empty as long as the server has not answered."""
        return self._checker.request_id

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        try:
            return self._checker.check(next(self._responses))
        except StopIteration:
            self._checker.end()
            raise
        except grpc.RpcError as error:
            self._checker.request_id = _request_id(error) or self.request_id
            raise from_grpc(error, self._endpoint) from error
        except StreamError:
            self._cancel()
            raise

    def close(self) -> None:
        """Cancel the request if it has not ended; harmless otherwise."""
        self._cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class AsyncGenerateStream:
    """Like ``GenerateStream``, for ``async for`` and ``async with``."""

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse],
        request: pb.GenerateRequest,
        endpoint: str,
    ) -> None:
        self._call = call
        self._responses = call.__aiter__()
        self._checker = StreamChecker(request.first_output_index)
        self._endpoint = endpoint

    @property
    def request_id(self) -> str:
        """The server's id, or empty as long as the server has not answered."""
        return self._checker.request_id

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        try:
            return self._checker.check(await anext(self._responses))
        except StopAsyncIteration:
            self._checker.end()
            raise
        except grpc.RpcError as error:
            self._checker.request_id = _request_id(error) or self.request_id
            raise from_grpc(error, self._endpoint) from error
        except StreamError:
            self._call.cancel()
            raise

    def close(self) -> None:
        """Cancel the request if it has not ended; harmless otherwise."""
        self._call.cancel()

    def __del__(self) -> None:
        # asyncio keeps the call alive; of a synchronous stream gRPC itself does this.
        if not self._call.done():
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()


class Client:
    """A connection to one endpoint, for use from any thread.

    ``clock`` gives seconds of a monotonic clock, for the client's own times. Raises UnusableSecret
    or TokenInTheClear if ``security`` cannot be had at this endpoint.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        security: ClientSecurity = PLAIN,
    ) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._clock = clock
        self._metadata = security.metadata()
        credentials = security.channel_credentials(endpoint)
        self._channel = (
            grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
            if credentials is None
            else grpc.secure_channel(endpoint, credentials, options=CHANNEL_OPTIONS)
        )
        self._inference = InferenceStub(self._channel)
        self._cluster = ClusterStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> GenerateStream:
        """Start a request and iterate over its events: Accepted, Delta…, Finished.

        Exactly one of ``prompt`` and, among the options, ``token_ids`` and ``chat`` is given.
        Raises InvalidRequest at once; what the server refuses is raised from the iteration.
        """
        return self.stream(build_request(prompt, options), timeout_s=options.get("timeout_s"))

    def stream(
        self, request: pb.GenerateRequest, *, timeout_s: float | None = None
    ) -> GenerateStream:
        """Like ``generate``, for a request that is already built."""
        call = self._inference.Generate(request, timeout=timeout_s, metadata=self._metadata)
        return GenerateStream(call, request, self._endpoint)

    def generate_text(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Run a request to its end; arguments as for ``generate``."""
        transcript = Transcript(self._clock())
        with self.generate(prompt, **options) as stream:
            for event in stream:
                transcript.add(event, self._clock())
        return transcript.completion(stream.request_id)

    def cancel(self, request_id: str) -> bool:
        """Cancel a request by the server's id; whether the server knew it."""
        return self._call(self._inference.Cancel, pb.CancelRequest(request_id=request_id)).found

    def status(self, *, decisions: bool = False) -> pb.StatusResponse:
        """The cluster's workers, counters and readiness; with ``decisions`` the last placements."""
        request = pb.StatusRequest(include_decisions=decisions)
        return self._call(self._cluster.Status, request)

    def audit(self, worker_id: str = "", *, include_blocks: bool = False) -> pb.AuditResponse:
        """Recount every block, of one worker or (empty) of all."""
        request = pb.AuditRequest(worker_id=worker_id, include_blocks=include_blocks)
        return self._call(self._cluster.Audit, request)

    def drain(self, worker_id: str, *, timeout_s: float = 0.0) -> None:
        """Take a worker out of service; returns when it holds nothing any more and is ended.

        Raises DeadlineExceeded after ``timeout_s`` (0: no limit); it goes on draining all the same.
        """
        request = pb.DrainRequest(worker_id=worker_id, timeout_s=timeout_s)
        with _typed_errors(self._endpoint):
            limit_s = timeout_s + self._timeout_s if timeout_s else None
            self._cluster.Drain(request, timeout=limit_s, metadata=self._metadata)

    def scale(self, *, timeout_s: float = 0.0, **counts: int | None) -> pb.ScaleResponse:
        """Grow and shrink to so many workers of ``prefill``, ``decode``, ``colocated``; what is
        None, or not given, stays. Returns how many there are, when that is what was asked for;
        of the others, how many there are to be.

        Raises InvalidRequest, NotReady, DeadlineExceeded after ``timeout_s`` (0: no limit); it goes
        on all the same.
        """
        request = pb.ScaleRequest(timeout_s=timeout_s, **counts)
        limit_s = timeout_s + self._timeout_s if timeout_s else None
        with _typed_errors(self._endpoint):
            response: pb.ScaleResponse = self._cluster.Scale(
                request, timeout=limit_s, metadata=self._metadata
            )
        return response

    def health(self) -> bool:
        """Whether the inference service says that it is serving."""
        request = health_pb2.HealthCheckRequest(service=HEALTH_SERVICE)
        with _typed_errors(self._endpoint):
            response = self._health.Check(request, timeout=self._timeout_s)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Close the channel; running streams are cancelled."""
        self._channel.close()

    def _call(
        self, method: grpc.UnaryUnaryMultiCallable[_Request, _Response], request: _Request
    ) -> _Response:
        with _typed_errors(self._endpoint):
            return method(request, timeout=self._timeout_s, metadata=self._metadata)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class AsyncClient:
    """Like ``Client``, for asyncio; to be made and used inside one running loop."""

    def __init__(
        self,
        endpoint: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        security: ClientSecurity = PLAIN,
    ) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._clock = clock
        self._metadata = security.metadata()
        credentials = security.channel_credentials(endpoint)
        self._channel = (
            grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(endpoint, credentials, options=CHANNEL_OPTIONS)
        )
        self._inference = cast("InferenceAsyncStub", InferenceStub(self._channel))
        self._cluster = cast("ClusterAsyncStub", ClusterStub(self._channel))
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerateStream:
        """Start a request; see ``Client.generate``."""
        return self.stream(build_request(prompt, options), timeout_s=options.get("timeout_s"))

    def stream(
        self, request: pb.GenerateRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerateStream:
        """Like ``generate``, for a request that is already built."""
        call = self._inference.Generate(request, timeout=timeout_s, metadata=self._metadata)
        return AsyncGenerateStream(call, request, self._endpoint)

    async def generate_text(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Run a request to its end; arguments as for ``generate``."""
        transcript = Transcript(self._clock())
        async with self.generate(prompt, **options) as stream:
            async for event in stream:
                transcript.add(event, self._clock())
        return transcript.completion(stream.request_id)

    async def cancel(self, request_id: str) -> bool:
        """Cancel a request by the server's id; whether the server knew it."""
        request = pb.CancelRequest(request_id=request_id)
        return (await self._call(self._inference.Cancel, request)).found

    async def status(self, *, decisions: bool = False) -> pb.StatusResponse:
        """The cluster's workers, counters and readiness; with ``decisions`` the last placements."""
        request = pb.StatusRequest(include_decisions=decisions)
        return await self._call(self._cluster.Status, request)

    async def audit(self, worker_id: str = "", *, include_blocks: bool = False) -> pb.AuditResponse:
        """Recount every block, of one worker or (empty) of all."""
        request = pb.AuditRequest(worker_id=worker_id, include_blocks=include_blocks)
        return await self._call(self._cluster.Audit, request)

    async def health(self) -> bool:
        """Whether the inference service says that it is serving."""
        request = health_pb2.HealthCheckRequest(service=HEALTH_SERVICE)
        with _typed_errors(self._endpoint):
            response = await self._health.Check(request, timeout=self._timeout_s)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Close the channel; running streams are cancelled."""
        await self._channel.close(None)

    async def _call(
        self, method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response], request: _Request
    ) -> _Response:
        with _typed_errors(self._endpoint):
            return await method(request, timeout=self._timeout_s, metadata=self._metadata)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


@contextmanager
def _typed_errors(endpoint: str) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise from_grpc(error, endpoint) from error


def _request_id(error: grpc.RpcError) -> str:
    return trailing_metadata(error).get(REQUEST_ID_KEY, "")
