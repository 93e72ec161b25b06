"""Who may pass the gRPC door: an interceptor in front of every call.

Health and reflection stay open: probes carry no tokens, and what reflection tells is public.
``Inference`` is for every caller, and all else for those who run the cluster, not for tenants.
Streams that need no token are limited in number.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from kvferry.cluster.access.gate import Gate
from kvferry.cluster.access.refusals import Refusals
from kvferry.cluster.errors import Overloaded
from kvferry.cluster.grpc_services import Context, authorization, fail
from kvferry.kv_cache.errors import KVFerryError
from kvferry.protos import kvferry_pb2 as pb

if TYPE_CHECKING:  # generic for mypy only
    Details = grpc.HandlerCallDetails
    Handler = grpc.RpcMethodHandler[Any, Any]

PORT = "grpc"
OPEN_SERVICES = frozenset({health.SERVICE_NAME, reflection.SERVICE_NAME})
CALLERS_SERVICES = frozenset({pb.DESCRIPTOR.services_by_name["Inference"].full_name})


class GrpcGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # no generic when run
    """See the module."""

    def __init__(self, gate: Gate, refusals: Refusals) -> None:
        self._gate = gate
        self._refusals = refusals

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], handler_call_details: Details
    ) -> Handler:
        """The call's own handler, or one of the same kind that refuses it."""
        details = handler_call_details
        handler = await continuation(details)
        service = _service(details)
        if service in OPEN_SERVICES:
            return handler
        header = authorization(details.invocation_metadata)
        try:
            if service in CALLERS_SERVICES or handler is None:
                self._gate.caller(header)
            else:
                self._gate.operator(header, details.method)
        except KVFerryError as error:
            return self._refusing(handler, details.method, error)
        return handler

    def _refusing(self, handler: Handler | None, method: str, error: KVFerryError) -> Handler:
        async def refuse(_: object, context: Context) -> None:
            self._refusals.call(PORT, method, context.peer(), error)
            await fail(context, error)

        return _like(handler, refuse)


class OpenStreams(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # no generic when run
    """Lets so many streams of the open services run at a time, and refuses the others."""

    def __init__(self, most: int, refusals: Refusals) -> None:
        self._most = most
        self._refusals = refusals
        self._num = 0

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], handler_call_details: Details
    ) -> Handler:
        """The call's own handler, but a stream of an open service is counted while it runs."""
        details = handler_call_details
        handler = await continuation(details)
        if _service(details) not in OPEN_SERVICES or handler is None:
            return handler
        inner = handler.stream_stream or handler.unary_stream
        return handler if inner is None else self._counted(handler, inner, details.method)

    def _counted(self, handler: Handler, inner: Any, method: str) -> Handler:
        async def call(request: object, context: Context) -> None:
            if self._num >= self._most:
                error = Overloaded(
                    f"{self._num} calls to services that need no token last already, the limit is "
                    f"{self._most}; try again later"
                )
                self._refusals.call(PORT, method, context.peer(), error)
                await fail(context, error)
            self._num += 1
            try:
                result = inner(request, context)
                if not hasattr(result, "__aiter__"):  # it writes by itself
                    await result
                    return
                async for message in result:
                    await context.write(message)
            finally:
                self._num -= 1

        return _like(handler, call, handler.request_deserializer, handler.response_serializer)


def _service(details: Details) -> str:
    return details.method.strip("/").partition("/")[0]


def _like(handler: Handler | None, call: Any, *codecs: Any) -> Handler:
    """A handler of the same kind as another; unary if that is none.

    An unknown method is none of an unknown caller's business.
    """
    kinds: dict[tuple[bool, bool], Any] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    kind = (False, False)
    if handler is not None:
        kind = (bool(handler.request_streaming), bool(handler.response_streaming))
    made: Handler = kinds[kind](call, *codecs)
    return made
