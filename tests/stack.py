"""A served cluster in one process, without Ray: real sockets and shared memory, a stub model.

Router and front door run on a loop in a thread of their own, each worker on its engine and network
threads, as in production. Steps of the model and reads of the connector can be held, so that a test
finds a request in the state that it wants.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from kvferry.cluster.access.settings import AccessSettings, load_access
from kvferry.cluster.grpc_server import GrpcServer
from kvferry.cluster.http_door.server import HttpServer
from kvferry.cluster.intake import Intake, ServedModel
from kvferry.cluster.metrics.endpoint import MetricsServer
from kvferry.cluster.router import Router
from kvferry.cluster.router_config import RouterConfig
from kvferry.cluster.router_node import RouterNode
from kvferry.cluster.server_limits import ServerLimits
from kvferry.decode_worker.role import DecodeRole
from kvferry.engine.batch import RunnerOutput, SchedulerOutput
from kvferry.engine.chat import ChatTemplate
from kvferry.engine.engine import Engine
from kvferry.engine.models.config import ModelConfig
from kvferry.engine.models.rope import Rope
from kvferry.engine.models.size import ModelSize
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.engine.tokenizer import Tokenizer
from kvferry.kv_cache.block_pool import BlockPool
from kvferry.kv_cache.layout import KVCacheLayout
from kvferry.kv_cache.prefix_index import PrefixIndex
from kvferry.kv_transfer.connector import BlockResult
from kvferry.kv_transfer.memory import allocate_shared
from kvferry.kv_transfer.shm import ShmConnector
from kvferry.prefill_worker.role import PrefillRole
from kvferry.protos import kvferry_pb2 as pb
from kvferry.worker.cluster_key import SECRET_BYTES, ClusterKey
from kvferry.worker.description import WorkerDescription
from kvferry.worker.messages import AuditReport, Member, NodeRef, Role
from kvferry.worker.process import WorkerProcess
from kvferry.worker.worker import Worker, WorkerTimes
from tests.engine.tiny_gguf import TEMPLATE
from tests.engine.tiny_tokenizers import byte_level
from tests.fakes import STUB_VOCAB, StubRunner, stub_layout

LONG_S = 60.0  # a bound that only a fault exceeds
POLL_S = 0.005
BLOCK = 4
KEY = ClusterKey(bytes(range(SECRET_BYTES)))
MODEL = ModelConfig(
    name="stub",
    revision="1",
    architecture="Stub",
    num_layers=1,
    hidden_size=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    ffn_size=1,
    vocab_size=STUB_VOCAB,
    max_model_len=4096,
    rope=Rope(theta=1.0),
    layer_windows=(None,),
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_token_ids=(),
    bos_token_id=None,
)
SIZE = ModelSize(weight_bytes=4, num_layer_parameters=1, num_head_parameters=1)

T = TypeVar("T")


def eventually(what: str, probe: Callable[[], T], within_s: float = LONG_S) -> T:
    """The first true value of ``probe``; fails after a while."""
    deadline = time.monotonic() + within_s
    while not (value := probe()):
        assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s"
        time.sleep(POLL_S)
    return value


class HeldRunner(StubRunner):
    """A stub model whose steps wait while they are not allowed."""

    def __init__(self, inner: StubRunner) -> None:
        super().__init__(inner.blocks, inner.block_size)
        self._changed = threading.Condition()
        self._allowed: int | None = None
        self._is_waiting = False

    def allow(self, num_steps: int | None) -> None:
        """Let so many more steps run, the one that waits now included; None lets all run."""
        with self._changed:
            self._allowed = num_steps
            self._changed.notify_all()

    def wait_held(self) -> None:
        """Return when a step waits for leave."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_waiting, LONG_S), "no step came"

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Wait for leave, then compute."""
        with self._changed:
            self._is_waiting = self._allowed == 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._allowed != 0)
            self._is_waiting = False
            if self._allowed is not None:
                self._allowed -= 1
        return super().execute(output)


class HeldConnector(ShmConnector):
    """Shared memory whose reads make no progress while ``held``."""

    held = False

    def poll(self, now: float) -> list[BlockResult]:
        """Nothing while held."""
        return [] if self.held else super().poll(now)


@dataclass
class StackWorker:
    """A running worker and the parts of it that tests look into."""

    worker: Worker
    process: WorkerProcess
    runner: HeldRunner
    connector: HeldConnector
    description: WorkerDescription
    died: threading.Event

    @property
    def ref(self) -> NodeRef:
        """The worker in this life."""
        return self.worker.ref


def start_worker(
    ref: NodeRef,
    roles: Sequence[Role],
    layout: KVCacheLayout,
    num_blocks: int,
    scheduler: SchedulerConfig,
    times: WorkerTimes,
    audit_every_step: bool,
) -> StackWorker:
    """A worker over the stub model, serving."""
    memory = allocate_shared(num_blocks, layout.block_bytes())
    connector = HeldConnector(
        memory, worker_id=ref.node_id, epoch=ref.epoch, model="stub@1", layout=layout
    )
    runner = HeldRunner(StubRunner(memory.blocks, layout.block_size))
    pool = BlockPool(num_blocks, memory.raise_generation, PrefixIndex())
    engine = Engine(scheduler, runner, pool, layout.block_size, "stub@1", time.monotonic)
    worker = Worker(ref, engine, connector, times)
    for role in roles:
        worker.attach(PrefillRole(worker) if role is Role.PREFILL else DecodeRole(worker))
    died = threading.Event()
    process = WorkerProcess(worker, "127.0.0.1", audit_every_step, died.set, key=KEY)
    process.start()
    member = Member(ref, tuple(roles), process.address, connector.local_info())
    description = WorkerDescription(
        member=member,
        pid=os.getpid(),
        host="here",
        threads=1,
        kernels="stub",
        isa=None,
        connectors=("shm",),
        model=MODEL,
        size=SIZE,
        layout=layout,
        dtype="float32",
        max_model_len=MODEL.max_model_len,
        pool_arithmetic="",
    )
    return StackWorker(worker, process, runner, connector, description, died)


@dataclass
class Stack:
    """See the module; a context manager, ready when entered unless told otherwise."""

    folder: Path
    num_prefill: int = 1
    num_decode: int = 1
    num_colocated: int = 0
    num_blocks: int = 64
    decode_blocks: int | None = None
    prefill_window: int = 1000
    max_model_len: int = 200
    scheduler: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(8, 32, 8, 0.0))
    times: WorkerTimes = field(
        default_factory=lambda: WorkerTimes(0.2, 0.1, LONG_S, LONG_S, LONG_S)
    )
    router_config: RouterConfig = field(
        default_factory=lambda: RouterConfig(
            list_period=0.2, heartbeat=0.1, heartbeat_timeout=LONG_S, stall_limit=LONG_S
        )
    )
    limits: ServerLimits = field(default_factory=ServerLimits)
    audit_every_step: bool = False
    wait_ready: bool = True
    http: bool = False
    metrics: bool = False
    access: AccessSettings = field(default_factory=AccessSettings)

    def __post_init__(self) -> None:
        self.workers: dict[str, StackWorker] = {}
        self.endpoint = ""
        self.url = ""
        self._epoch = 1
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    # --- starting and stopping --------------------------------------------------------------

    def __enter__(self) -> Self:
        if not (self.folder / "tokenizer.json").exists():
            byte_level(self.folder)
            (self.folder / "chat_template.jinja").write_text(TEMPLATE)
        self._thread.start()
        self._call(self._start_router())
        for name, count, roles in (
            ("prefill", self.num_prefill, (Role.PREFILL,)),
            ("decode", self.num_decode, (Role.DECODE,)),
            ("colocated", self.num_colocated, (Role.PREFILL, Role.DECODE)),
        ):
            for index in range(count):
                self.join(f"{name}-{index}", roles)
        if self.wait_ready:
            eventually("ready", lambda: not self.on_loop(self._not_ready_reasons))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()
        self._call(self._stop())
        for each in self.workers.values():
            each.process.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LONG_S)
        self._loop.close()

    def join(self, name: str, roles: Sequence[Role]) -> StackWorker:
        """Start a worker (or its next life) and register it."""
        self._epoch += 1
        is_decode = Role.DECODE in roles
        blocks = (self.decode_blocks if is_decode else None) or self.num_blocks
        made = self.workers[name] = start_worker(
            NodeRef(name, self._epoch),
            roles,
            stub_layout(BLOCK),
            blocks,
            self.scheduler,
            self.times,
            self.audit_every_step,
        )
        self.on_loop(lambda: self.node.register(made.description))
        return made

    def release(self) -> None:
        """Hold nothing any longer."""
        for each in self.workers.values():
            each.runner.allow(None)
            each.connector.held = False

    async def _start_router(self) -> None:
        served = ServedModel(
            "stub",
            "1",
            "Stub",
            "float32",
            SIZE,
            stub_layout(BLOCK),
            self.max_model_len,
            STUB_VOCAB,
            (),
        )
        intake = Intake(
            served,
            Tokenizer(self.folder),
            ChatTemplate.from_folder(self.folder),
            secrets.randbits,
        )
        self.node = RouterNode(
            NodeRef("router-0", 1),
            intake,
            self.router_config,
            self.prefill_window,
            access=load_access(self.access),
            key=KEY,
        )
        self.metrics_server: MetricsServer | None = None
        if self.metrics:
            node = self.node
            self.metrics_server = MetricsServer(
                "127.0.0.1:0", node.metrics, node.access, node.refusals, self.limits
            )
            self.metrics_server.start()
        self.http_server = HttpServer(self.node, "127.0.0.1:0", self.limits) if self.http else None
        http = () if self.http_server is None else (self.http_server.endpoint,)
        others = pb.Endpoints(http=http)
        self.server = GrpcServer(self.node, "127.0.0.1:0", self.limits, others)
        await self.server.start()
        self.endpoint = self.server.endpoint
        if self.http_server is not None:
            await self.http_server.start()
            self.url = f"http://{self.http_server.endpoint}"

    async def _stop(self) -> None:
        if self.metrics_server is not None:
            await asyncio.to_thread(self.metrics_server.stop)
        if self.http_server is not None:
            await self.http_server.stop(0.0)
        await self.server.stop(0.0)
        await self.node.stop()

    # --- looking inside ---------------------------------------------------------------------

    @property
    def router(self) -> Router:
        """The router; look into it on the loop only."""
        return self.node.router

    @property
    def prefill(self) -> StackWorker:
        """The first prefill worker."""
        return self.workers["prefill-0"]

    @property
    def decode(self) -> StackWorker:
        """The first decode worker."""
        return self.workers["decode-0"]

    def on_loop(self, action: Callable[[], T]) -> T:
        """Run something where router and front door run."""

        async def run() -> T:
            return action()

        return self._call(run())

    def counters(self) -> dict[str, int]:
        """The router's totals."""
        return self.on_loop(lambda: dict(self.router.counters))

    def audits(self) -> list[AuditReport]:
        """Every registered worker's audit; each must be consistent."""

        async def ask() -> list[AuditReport]:
            refs = [record.ref for record in self.router.workers]
            return list(await asyncio.gather(*(self.node.audit(ref) for ref in refs)))

        reports = self._call(ask())
        assert not any(report.problems for report in reports), reports
        return reports

    def assert_quiet(self) -> None:
        """Soon no request is known, no block held and no load counted; every request has ended."""

        def is_quiet() -> bool:
            if self.on_loop(lambda: bool(self.router.requests)):
                return False
            loose = ("free", "cached")
            held = [sum(n for name, n in r.counts if name not in loose) for r in self.audits()]
            return not any(held)

        eventually("everything is given back", is_quiet)
        loads = self.on_loop(
            lambda: [(r.prefill, r.decode, r.waiting) for r in self.router.workers]
        )
        assert all(load == ({}, {}, None) for load in loads), loads
        count = self.counters()
        finished = sum(n for name, n in count.items() if name.startswith("finished_"))
        assert finished == count.get("accepted", 0), count
        for each in self.workers.values():
            assert not each.died.is_set()

    def _not_ready_reasons(self) -> list[str]:
        return self.router.workers.not_ready_reasons()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LONG_S)


__all__ = ["BLOCK", "LONG_S", "HeldRunner", "Stack", "StackWorker", "eventually"]
