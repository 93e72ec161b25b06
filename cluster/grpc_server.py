"""The gRPC front door: ``kvferry.v1`` over a ``RouterNode``.

The listening server: its limits, TLS, health, reflection, readiness, and how it stops. What its
calls do is ``cluster.grpc_services``'s, who may call is ``cluster.grpc_guard``'s.
"""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvferry.cluster.grpc_guard import GrpcGuard, OpenStreams
from kvferry.cluster.grpc_services import ClusterServicer, InferenceServicer
from kvferry.cluster.ports import unavailable
from kvferry.cluster.router_node import RouterNode
from kvferry.cluster.server_limits import ServerLimits
from kvferry.protos import kvferry_pb2 as pb
from kvferry.protos import kvferry_pb2_grpc

SERVICES = ("", "kvferry.v1.Inference")
READY_PERIOD_S = 0.1
LAST_WORDS_S = 1.0  # for the errors of streams that a stop has ended


class GrpcServer:
    """The listening server: services, health, reflection, readiness.

    ``others``: the other doors, for status.
    """

    def __init__(
        self,
        node: RouterNode,
        address: str,
        limits: ServerLimits | None = None,
        others: pb.Endpoints | None = None,
    ) -> None:
        self._node = node
        limits = limits or ServerLimits()
        access = node.access
        streams = OpenStreams(limits.max_open_streams, node.refusals)
        guards = (
            (streams,) if access.gate.is_open else (GrpcGuard(access.gate, node.refusals), streams)
        )
        self._server = grpc.aio.server(interceptors=guards, options=limits.channel_options())
        try:
            if access.tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, access.tls.grpc_credentials())
        except RuntimeError as error:
            raise unavailable(address, str(error)) from error
        self.endpoint = f"{address.rpartition(':')[0]}:{port}"
        endpoints = pb.Endpoints(grpc=[self.endpoint])
        endpoints.MergeFrom(others or pb.Endpoints())
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        kvferry_pb2_grpc.add_InferenceServicer_to_server(
            InferenceServicer(node, limits.slow_client_limit_s), self._server
        )
        kvferry_pb2_grpc.add_ClusterServicer_to_server(
            ClusterServicer(node, endpoints), self._server
        )
        services = (service.full_name for service in pb.DESCRIPTOR.services_by_name.values())
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._readiness: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen; health follows readiness."""
        await self._set_health(ready=False)
        await self._server.start()
        self._readiness = asyncio.get_running_loop().create_task(self._follow_readiness())

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones finish for ``grace_s`` seconds, then fail them."""
        if self._readiness is not None:
            self._readiness.cancel()
            await asyncio.gather(self._readiness, return_exceptions=True)
        await self._health.enter_graceful_shutdown()
        stopping = asyncio.get_running_loop().create_task(self._server.stop(grace_s + LAST_WORDS_S))
        await asyncio.wait({stopping}, timeout=grace_s)
        self._node.end_requests()  # a stream ends with its typed error, it is not cut off
        await stopping

    async def _follow_readiness(self) -> None:
        known: bool | None = None
        while True:
            ready = not self._node.router.workers.not_ready_reasons()
            if ready is not known:
                known = ready
                await self._set_health(ready)
            await asyncio.sleep(READY_PERIOD_S)

    async def _set_health(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for service in SERVICES:
            await self._health.set(service, status.SERVING if ready else status.NOT_SERVING)
