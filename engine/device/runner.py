"""The model runner of a device: steps are queued on one stream, decode steps as captured graphs.

Owns the order of a step: block copies, inputs, forward, sampling, all behind one another on the
step's stream, and one wait at its end. So when ``execute`` returns, the step's KV is in the pool
and its tokens are on the host, as ``engine.batch.ModelRunner`` promises, and nothing of it is
queued any longer. Does not know requests, nor who owns a block.

The pool has ``num_scratch_blocks`` blocks more than others know of, at its end, for what padding
rows write (``graph_keys``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvferry.engine.batch import RunnerOutput, SchedulerOutput
from kvferry.engine.device.graph_keys import GraphKey, graph_key, graph_keys
from kvferry.engine.device.input_buffers import InputBuffers, InputLayout, InputViews
from kvferry.engine.device.protocol import Device, Graph
from kvferry.engine.model_runner import (
    check_layout,
    pool_bytes,
    pool_tensor,
    step_activation_bytes,
    step_logits_bytes,
)
from kvferry.engine.models.llama import LlamaModel
from kvferry.engine.step_inputs import NOTHING, StepInputs
from kvferry.engine.step_sampling import sample_hidden, sample_logits
from kvferry.kv_cache.layout import KVCacheLayout

SPLIT_BYTES = 64 << 20
"""More than partial sums of split attention take: splits fill a device's processors about once."""


def device_step_bytes(model: LlamaModel, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Upper estimate of the memory that one maximal step takes on a device beside weights and pool:
    activations of one layer, what split attention writes down, and logits with what sampling makes
    of them. No mask is made there, and no KV is gathered.
    """
    return (
        step_activation_bytes(model, max_num_batched_tokens)
        + SPLIT_BYTES
        + (step_logits_bytes(model, max_num_seqs) + max_num_seqs * model.config.vocab_size * 4)
    )


def num_scratch_blocks(max_num_seqs: int, block_size: int) -> int:
    """Blocks behind those of the pool: a slot for every row of a step."""
    return -(-max_num_seqs // block_size)


class DeviceModelRunner:
    """See the module. Not thread-safe.

    Args:
        device: where model and pool lie.
        model: its weights are there.
        pool_buffer: uint8 on the device, of ``num_blocks + num_scratch_blocks`` blocks.
        layout: of the pool.
        num_blocks: blocks that sequences may have.
        max_num_batched_tokens, max_num_seqs: bounds of every step that will come.
        max_model_len: positions of a sequence at most; None: those of the model.

    Raises PoolMismatch.
    """

    def __init__(
        self,
        device: Device,
        model: LlamaModel,
        pool_buffer: torch.Tensor,
        layout: KVCacheLayout,
        num_blocks: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int | None = None,
    ) -> None:
        check_layout(model, layout)
        self.model = model
        all_blocks = num_blocks + num_scratch_blocks(max_num_seqs, layout.block_size)
        self.pool_bytes = pool_bytes(pool_buffer, layout, all_blocks)
        self.pool = pool_tensor(self.pool_bytes, layout, all_blocks)
        self.graphs: dict[GraphKey, Graph] = {}
        self._device = device
        self._max_seqs = max_num_seqs
        self._stream = device.stream()
        self._inputs = StepInputs(
            max_num_batched_tokens,
            max_num_seqs,
            min(max_model_len or model.config.max_model_len, model.config.max_model_len),
            layout.block_size,
            num_blocks,
        )
        largest = InputLayout(max_num_batched_tokens, max_num_seqs, self._inputs.max_blocks)
        self._buffers = InputBuffers(device, self._inputs, largest, num_blocks)
        logits = device.zeros(max_num_seqs * model.config.vocab_size * 4).view(torch.float32)
        self._logits = logits.view(max_num_seqs, -1)

    def capture_graphs(self) -> None:
        """Record the graphs of every decode step that may come, the largest first, so that the
        others fit into its scratch memory.
        """
        for key in sorted(graph_keys(self._max_seqs, self._inputs.max_blocks), reverse=True):
            views = self._buffers.send(NOTHING, _layout_of(key), self._stream)  # padding alone
            self._stream.record().synchronize()
            self.graphs[key] = self._device.capture(self._stream, self._decode_work(views))

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Copy blocks, write the KV of every scheduled position, sample where asked.

        Raises InvalidStep before anything is queued, or PoisonedRows, whose ``rows`` are places in
        the batch, after the KV has been written.
        """
        sequences, copies = output.sequences, output.copies
        plan = self._inputs.plan(sequences)
        found: list[RunnerOutput] = []
        try:
            if copies:
                self._stream.launch(lambda: self.model.kernels.copy_blocks(self.pool_bytes, copies))
            if sequences:
                num_blocks = self._inputs.num_blocks_for(plan.longest)
                key = graph_key(sequences, num_blocks, self._max_seqs, self._inputs.max_blocks)
                graph = self.graphs.get(key) if key is not None else None
                if key is not None and graph is not None:
                    self._buffers.send(plan, _layout_of(key), self._stream)
                    graph.launch(self._stream)
                    logits = self._logits[: len(sequences)]
                    self._launch(lambda: found.append(sample_logits(sequences, logits)))
                else:
                    layout = InputLayout(plan.num_tokens, plan.num_seqs, num_blocks)
                    views = self._buffers.send(plan, layout, self._stream)
                    self._launch(
                        lambda: found.append(
                            sample_hidden(self.model, sequences, self._forward(views), plan.ends)
                        )
                    )
        finally:  # also where something raised: what was queued must not meet the next step
            self._stream.record().synchronize()
        return found[0] if found else RunnerOutput(())

    def _launch(self, work: Callable[[], object]) -> None:
        """Queue work that may run after ``execute`` has left its own inference mode."""

        def inferring() -> None:
            with torch.inference_mode():
                work()

        self._stream.launch(inferring)

    def _decode_work(self, views: InputViews) -> Callable[[], None]:
        """A decode step over inputs that stay where they are; its logits do, too."""
        logits = self._logits[: len(views.seq_lens)]

        @torch.inference_mode()
        def work() -> None:
            logits.copy_(self.model.logits(self._forward(views)))

        return work

    def _forward(self, views: InputViews) -> torch.Tensor:
        return self.model.forward(views.input_ids, views.positions, views.attention(), self.pool)


def _layout_of(key: GraphKey) -> InputLayout:
    return InputLayout(key.num_rows, key.num_rows, key.width)
