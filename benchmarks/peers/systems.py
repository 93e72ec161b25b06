"""The systems under load, as running servers: KVFerry, and vLLM in both arrangements.

Owns start and end of each; does not know what is sent.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.peers import completions_api
from benchmarks.peers.launches import (
    COLOCATED,
    HOST,
    KVFERRY,
    Case,
    PeerSettings,
    halves,
    kvferry_config,
    kvferry_launch,
    proxy_launch,
    served_name,
    vllm_launch,
)
from benchmarks.peers.processes import Launch, Server, free_ports
from kvferry.cluster import bench_serve
from kvferry.cluster.client import AsyncClient
from kvferry.cluster.closed_loop import Send

START_S = 1200.0  # the first start of each kind of vLLM server compiles for minutes
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Setup:
    """What all runs share: the model's folder, the cores, and how the peer is run."""

    model: Path
    cores: Sequence[int]
    peer: PeerSettings


@dataclass(frozen=True, slots=True)
class Running:
    """A system that takes requests.

    Attributes:
        client: opens the connections of one run, and gives what sends over them.
        servers: its processes.
    """

    client: Callable[[], AbstractAsyncContextManager[Send]]
    servers: Sequence[Server]

    def family(self) -> list[psutil.Process]:
        """Every process of it."""
        return [process for server in self.servers for process in server.family()]


@contextmanager
def running(system: str, case: Case, setup: Setup) -> Iterator[Running]:
    """Start a system, wait until it is ready, and end it. Raises ServerFailed."""
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        folder = Path(name)
        start = _kvferry if system == KVFERRY else _vllm
        with start(case, setup, folder) as found:
            yield found


@contextmanager
def _kvferry(case: Case, setup: Setup, folder: Path) -> Iterator[Running]:
    config, ready = folder / "kvferry.yaml", folder / "ready"
    # JSON is YAML, too.
    config.write_text(json.dumps(kvferry_config(case, setup.model, setup.cores)), encoding="utf-8")
    launch = kvferry_launch(sys.executable, config, ready, os.environ)
    with Server(launch, folder) as server:
        server.wait_until(ready.exists, START_S)
        facts = json.loads(ready.read_text(encoding="utf-8").removeprefix("READY "))

        @asynccontextmanager
        async def client() -> AsyncIterator[Send]:
            async with AsyncClient(facts["grpc"]) as opened:
                yield bench_serve.sender(opened)

        yield Running(client, [server])


@contextmanager
def _vllm(case: Case, setup: Setup, folder: Path) -> Iterator[Running]:
    with ExitStack() as stack:
        servers: list[Server] = []

        def start(launch: Launch, port: int) -> None:
            server = stack.enter_context(Server(launch, folder))
            servers.append(server)
            server.wait_until(lambda: _is_healthy(port), START_S)

        launches = vllm_launches(case, setup, free_ports(5))
        for launch, port in launches:
            start(launch, port)
        url = f"http://{HOST}:{launches[-1][1]}"

        @asynccontextmanager
        async def client() -> AsyncIterator[Send]:
            async with completions_api.client(url, served_name(setup.model)) as send:
                yield send

        yield Running(client, servers)


def vllm_launches(case: Case, setup: Setup, ports: Sequence[int]) -> list[tuple[Launch, int]]:
    """Servers and ports of vLLM, in the order of their start; clients go to the last one."""
    dtype, settings = case.peer_dtype, setup.peer
    if case.arrangement == COLOCATED:
        launch = vllm_launch(
            "vllm", setup.model, dtype, ports[0], setup.cores, settings, os.environ
        )
        return [(launch, ports[0])]
    launches = []
    roles = ("kv_producer", "kv_consumer")
    for role, name, cores, port, side in zip(
        roles, ("prefill", "decode"), halves(setup.cores), ports[:2], ports[2:4], strict=True
    ):
        launch = vllm_launch(
            f"vllm-{name}",
            setup.model,
            dtype,
            port,
            cores,
            settings,
            os.environ,
            kv_role=role,
            side_channel_port=side,
        )
        launches.append((launch, port))
    proxy = proxy_launch(ROOT, ports[4], ports[0], ports[1], settings, os.environ)
    return [*launches, (proxy, ports[4])]


def _is_healthy(port: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{HOST}:{port}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False
