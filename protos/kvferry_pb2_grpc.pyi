"""Types of the generated service classes, for synchronous and asyncio channels.

Written by hand, because the gRPC plugin writes no stub; a test compares the names with the
generated module and the proto. ``*AsyncStub`` exist for type checkers only: they are what a stub
built on an asyncio channel looks like.
"""

from collections.abc import AsyncIterator, Awaitable
from typing import TypeAlias, type_check_only

import grpc
import grpc.aio

from kvferry.protos import kvferry_pb2 as pb

_Server: TypeAlias = grpc.Server | grpc.aio.Server

class InferenceStub:
    Generate: grpc.UnaryStreamMultiCallable[pb.GenerateRequest, pb.GenerateResponse]
    Resume: grpc.UnaryStreamMultiCallable[pb.ResumeRequest, pb.GenerateResponse]
    Cancel: grpc.UnaryUnaryMultiCallable[pb.CancelRequest, pb.CancelResponse]
    Tokenize: grpc.UnaryUnaryMultiCallable[pb.TokenizeRequest, pb.TokenizeResponse]
    ListModels: grpc.UnaryUnaryMultiCallable[pb.ListModelsRequest, pb.ListModelsResponse]
    def __init__(self, channel: grpc.Channel | grpc.aio.Channel) -> None: ...

@type_check_only
class InferenceAsyncStub:
    Generate: grpc.aio.UnaryStreamMultiCallable[pb.GenerateRequest, pb.GenerateResponse]
    Resume: grpc.aio.UnaryStreamMultiCallable[pb.ResumeRequest, pb.GenerateResponse]
    Cancel: grpc.aio.UnaryUnaryMultiCallable[pb.CancelRequest, pb.CancelResponse]
    Tokenize: grpc.aio.UnaryUnaryMultiCallable[pb.TokenizeRequest, pb.TokenizeResponse]
    ListModels: grpc.aio.UnaryUnaryMultiCallable[pb.ListModelsRequest, pb.ListModelsResponse]

class InferenceServicer:
    def Generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> AsyncIterator[pb.GenerateResponse] | Awaitable[None]: ...
    def Resume(
        self,
        request: pb.ResumeRequest,
        context: grpc.aio.ServicerContext[pb.ResumeRequest, pb.GenerateResponse],
    ) -> AsyncIterator[pb.GenerateResponse] | Awaitable[None]: ...
    async def Cancel(
        self,
        request: pb.CancelRequest,
        context: grpc.aio.ServicerContext[pb.CancelRequest, pb.CancelResponse],
    ) -> pb.CancelResponse: ...
    async def Tokenize(
        self,
        request: pb.TokenizeRequest,
        context: grpc.aio.ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse],
    ) -> pb.TokenizeResponse: ...
    async def ListModels(
        self,
        request: pb.ListModelsRequest,
        context: grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse],
    ) -> pb.ListModelsResponse: ...

def add_InferenceServicer_to_server(servicer: InferenceServicer, server: _Server) -> None: ...

class ClusterStub:
    Status: grpc.UnaryUnaryMultiCallable[pb.StatusRequest, pb.StatusResponse]
    Audit: grpc.UnaryUnaryMultiCallable[pb.AuditRequest, pb.AuditResponse]
    Drain: grpc.UnaryUnaryMultiCallable[pb.DrainRequest, pb.DrainResponse]
    Scale: grpc.UnaryUnaryMultiCallable[pb.ScaleRequest, pb.ScaleResponse]
    def __init__(self, channel: grpc.Channel | grpc.aio.Channel) -> None: ...

@type_check_only
class ClusterAsyncStub:
    Status: grpc.aio.UnaryUnaryMultiCallable[pb.StatusRequest, pb.StatusResponse]
    Audit: grpc.aio.UnaryUnaryMultiCallable[pb.AuditRequest, pb.AuditResponse]
    Drain: grpc.aio.UnaryUnaryMultiCallable[pb.DrainRequest, pb.DrainResponse]
    Scale: grpc.aio.UnaryUnaryMultiCallable[pb.ScaleRequest, pb.ScaleResponse]

class ClusterServicer:
    async def Status(
        self,
        request: pb.StatusRequest,
        context: grpc.aio.ServicerContext[pb.StatusRequest, pb.StatusResponse],
    ) -> pb.StatusResponse: ...
    async def Audit(
        self,
        request: pb.AuditRequest,
        context: grpc.aio.ServicerContext[pb.AuditRequest, pb.AuditResponse],
    ) -> pb.AuditResponse: ...
    async def Drain(
        self,
        request: pb.DrainRequest,
        context: grpc.aio.ServicerContext[pb.DrainRequest, pb.DrainResponse],
    ) -> pb.DrainResponse: ...
    async def Scale(
        self,
        request: pb.ScaleRequest,
        context: grpc.aio.ServicerContext[pb.ScaleRequest, pb.ScaleResponse],
    ) -> pb.ScaleResponse: ...

def add_ClusterServicer_to_server(servicer: ClusterServicer, server: _Server) -> None: ...
