"""How a front door ends the streams that a stop finds, and how start-up answers signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys

import pytest
import ray

from kvferry.cluster.cli.progress import ProgressLine
from kvferry.cluster.cli.signals import StopSignals
from kvferry.cluster.client import AsyncClient
from kvferry.cluster.config import Config
from kvferry.cluster.errors import PortUnavailable, WorkerLost
from kvferry.cluster.grpc_server import GrpcServer
from kvferry.cluster.intake import Intake, ServedModel
from kvferry.cluster.ports import check_port
from kvferry.cluster.ray_session import init_ray
from kvferry.cluster.router_config import RouterConfig
from kvferry.cluster.router_node import RouterNode
from kvferry.engine.chat import ChatTemplate
from kvferry.engine.tokenizer import Tokenizer
from kvferry.engine.weights.store import ModelFolder
from kvferry.kv_transfer.authentication import NO_KEY
from kvferry.protos import kvferry_pb2 as pb
from kvferry.worker.messages import NodeRef
from tests.fakes import stub_layout
from tests.stack import SIZE


@pytest.mark.model
def test_a_stop_ends_the_streams_that_go_on_with_a_typed_error(default_model: ModelFolder) -> None:
    intake = Intake(
        ServedModel("stub", "1", "Stub", "float32", SIZE, stub_layout(), 64, 49152, ()),
        Tokenizer(default_model.path),
        ChatTemplate.from_folder(default_model.path),
        lambda bits: 7,
    )

    async def stopped() -> None:
        # No worker registers, so that the request waits for as long as the router lives.
        node = RouterNode(NodeRef("router-0", 1), intake, RouterConfig(), 64, key=NO_KEY)
        server = GrpcServer(node, "127.0.0.1:0")
        await server.start()
        async with AsyncClient(server.endpoint) as client:
            assert not await client.health()
            async with client.generate("x", max_tokens=3) as stream:
                assert isinstance(await anext(stream), pb.Accepted)
                stopping = asyncio.create_task(server.stop(grace_s=0.0))
                with pytest.raises(WorkerLost, match="shutting down"):
                    await anext(stream)
                await stopping
        assert node.router.requests == {}
        assert node.router.counters["finished_error"] == 1
        await node.stop()

    asyncio.run(stopped())


def test_a_taken_port_is_found_and_a_free_one_is_not_kept() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortUnavailable, match=f"127.0.0.1:{port}"):
            check_port(f"127.0.0.1:{port}")
    check_port(f"127.0.0.1:{port}")
    check_port(f"127.0.0.1:{port}")
    check_port("127.0.0.1:0")


def test_an_interrupt_that_was_lost_in_a_hook_is_raised_by_the_next_news() -> None:
    with StopSignals() as signals:
        progress = ProgressLine(quiet=True, on_news=signals.check)
        progress.say("all is well")
        with contextlib.suppress(KeyboardInterrupt):  # as Python does in a finalizer
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            progress.say("x")
        with pytest.raises(KeyboardInterrupt):
            progress.stage("x", 1, 2)
        with pytest.raises(KeyboardInterrupt):
            signals.started()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("lost", [False, True])
def test_a_signal_while_ray_connects_is_answered_and_the_handlers_come_back(
    number: signal.Signals, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected = []

    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does
        with contextlib.suppress(SystemExit) if lost else contextlib.nullcontext():
            os.kill(os.getpid(), number)
        connected.append(True)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with StopSignals():
        handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
        with pytest.raises(KeyboardInterrupt):
            init_ray(Config())
        assert connected or (number is signal.SIGTERM and not lost)
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert signal.set_wakeup_fd(-1) == -1
