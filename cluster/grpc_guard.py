"""Who may pass the gRPC door: an interceptor in front of every call.

Health and reflection stay open: probes carry no tokens, and what reflection tells is public. The
``Cluster`` service is for those who run the cluster, not for tenants.
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
from kvferry.cluster.grpc_services import Context, authorization, fail
from kvferry.kv_cache.errors import KVFerryError
from kvferry.protos import kvferry_pb2 as pb

if TYPE_CHECKING:  # generic for mypy only
    Details = grpc.HandlerCallDetails
    Handler = grpc.RpcMethodHandler[Any, Any]

OPEN_SERVICES = frozenset({health.SERVICE_NAME, reflection.SERVICE_NAME})
OPERATORS_SERVICES = frozenset({pb.DESCRIPTOR.services_by_name["Cluster"].full_name})


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
        service = details.method.strip("/").partition("/")[0]
        if service in OPEN_SERVICES:
            return handler
        header = authorization(details.invocation_metadata)
        try:
            if service in OPERATORS_SERVICES:
                self._gate.operator(header, details.method)
            else:
                self._gate.caller(header)
        except KVFerryError as error:
            return self._refusing(handler, details.method, error)
        return handler

    def _refusing(self, handler: Handler | None, method: str, error: KVFerryError) -> Handler:
        async def refuse(_: object, context: Context) -> None:
            self._refusals.call(method, context.peer(), error)
            await fail(context, error)

        kinds: dict[tuple[bool, bool], Any] = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }
        if handler is None:  # an unknown method is none of an unknown caller's business
            kind = (False, False)
        else:
            kind = (bool(handler.request_streaming), bool(handler.response_streaming))
        made: Handler = kinds[kind](refuse)
        return made
