"""The stepped cluster of ``tests.sim`` with real parts: model, runner, shared-memory connector.

Workers, roles and router are driven by hand in one process, so that a test decides when each
step and each read happens; the bytes go through real pools and real descriptors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.engine.batch import ModelRunner, RunnerOutput, SchedulerOutput
from kvferry.engine.engine import Engine
from kvferry.engine.model_runner import TorchModelRunner
from kvferry.engine.models.llama import LlamaModel
from kvferry.engine.models.loading import kv_layout
from kvferry.engine.offload import Offloading
from kvferry.engine.request import RequestId, RequestSpec, SamplingParams
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kv_cache.block_pool import BlockPool
from kvferry.kv_transfer.authentication import NO_KEY
from kvferry.kv_transfer.memory import SharedPoolMemory, allocate_shared
from kvferry.worker.connectors import make_connector
from kvferry.worker.messages import NodeRef
from kvferry.worker.worker import Worker, WorkerTimes
from tests.sim.cluster import SimCluster, SimWorker


@dataclass
class WatchedRunner:
    """The real runner; may be told to refuse prompt positions, and shows what it runs."""

    inner: ModelRunner
    forbid_prompt: bool = False
    before_step: Callable[[SchedulerOutput], None] | None = None
    steps: list[SchedulerOutput] = field(default_factory=list)

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """One real step."""
        if self.forbid_prompt and any(len(s.token_ids) > 1 for s in output.sequences):
            raise AssertionError("a prompt forward on the decode side")
        if self.before_step is not None:
            self.before_step(output)
        self.steps.append(output)
        return self.inner.execute(output)


@dataclass
class RealCluster(SimCluster):
    """See the module. ``model`` is shared by all workers; each has its own pool, and a host tier
    if ``offloading`` makes one of (pool, block size).
    """

    model: LlamaModel | None = None
    kv_dtype: str = "float32"
    block_size: int = 16
    prefill_blocks: int = 64
    decode_blocks: int = 96
    blocks_per_poll: int = 4
    connector: str = "shm"
    caching: bool = False
    offloading: Callable[[SharedPoolMemory, int], Offloading] | None = None
    times: WorkerTimes = field(default_factory=lambda: WorkerTimes(read_timeout=1e9))
    scheduler: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(8, 64, 32, watermark=0.0)
    )
    memories: dict[NodeRef, SharedPoolMemory] = field(default_factory=dict)

    def build(self, ref: NodeRef, num_blocks: int) -> SimWorker:
        """A worker with the real model on a shared pool."""
        assert self.model is not None
        block_size = self.block_size_of(ref)
        layout = kv_layout(self.model.config, block_size, self.kv_dtype)
        memory = allocate_shared(num_blocks, layout.block_bytes())
        self.memories[ref] = memory
        connector = make_connector(
            memory,
            layout,
            ref,
            "golden",
            configured=self.connector,
            max_in_flight_blocks=self.blocks_per_poll,
            match_unit=self.match_unit,
            key=NO_KEY,
        )
        runner = WatchedRunner(
            TorchModelRunner(
                self.model,
                torch.from_numpy(memory.blocks),
                layout,
                num_blocks,
                self.scheduler.max_num_batched_tokens,
                self.scheduler.max_num_seqs,
            )
        )
        pool = BlockPool(num_blocks, memory.raise_generation, self.index(), self.clock)
        engine = Engine(
            self.scheduler,
            runner,
            pool,
            block_size,
            "golden",
            self.clock,
            self.match_unit,
            offloading=self.offloading(memory, block_size) if self.offloading else None,
        )
        return SimWorker(Worker(ref, engine, connector, self.times), runner, connector)

    def advance(self) -> None:
        """One tick; virtual time stands for computing, so a real socket gets real time too."""
        super().advance()
        if any(sim.alive and len(sim.worker.reads) for sim in self.workers):
            time.sleep(0.0005)

    def block(self, sim: SimWorker, block_id: int) -> NDArray[np.float32]:
        """One block of a float32 pool as ``[layer, plane, head, slot, dim]``."""
        assert self.model is not None
        layout = kv_layout(self.model.config, self.block_size_of(sim.ref), "float32")
        raw: NDArray[np.float32] = self.memories[sim.ref].blocks[block_id].view(np.float32)
        return raw.reshape(layout.block_shape())

    def close(self) -> None:
        """Give the pools back."""
        for sim in self.workers:
            sim.worker.close()


def greedy(name: str, prompt: list[int], num_tokens: int = 32) -> RequestSpec:
    """A greedy request that ignores end of sequence."""
    return RequestSpec(
        RequestId(name),
        tuple(prompt),
        sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
        max_model_len=8192,
    )
