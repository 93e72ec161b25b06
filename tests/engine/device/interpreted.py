"""``TRITON_INTERPRET=1 python -m tests.engine.device.interpreted``: the device's runner with the
GPU's kernels, interpreted, beside the CPU's with the reference's; in a process of its own, for the
interpreter is chosen when kernels are imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

import torch

from kvferry.engine.batch import SchedulerOutput
from kvferry.engine.device.graph_keys import graph_keys
from kvferry.engine.device.runner import DeviceModelRunner, num_scratch_blocks
from kvferry.engine.models.llama import Kernels, LlamaModel
from kvferry.engine.models.loading import kv_layout
from tests.engine.generation import BLOCK_SIZE, NUM_BLOCKS, Generation, runner, small_model
from tests.fake_device import FakeDevice

MAX_TOKENS, MAX_SEQS = 32, 4


def main() -> None:
    """Chunks without a graph, then steps of three rows in a graph of four: tokens and KV agree."""
    plain_model = small_model(num_layers=1, layer_windows=(None,))
    kernels = cast(Kernels, import_module("kvferry.kernels.triton"))
    model = LlamaModel(plain_model.config, plain_model.weights, kernels)
    layout = kv_layout(model.config, BLOCK_SIZE, "float32")
    device = FakeDevice(seed=1)
    blocks = NUM_BLOCKS + num_scratch_blocks(MAX_SEQS, BLOCK_SIZE)
    memory = device.zeros(blocks * layout.block_bytes())
    own = DeviceModelRunner(device, model, memory, layout, NUM_BLOCKS, MAX_TOKENS, MAX_SEQS)
    own.capture_graphs()
    assert len(device.graphs) == len(graph_keys(MAX_SEQS, 256 // BLOCK_SIZE))
    plain = runner(plain_model)
    for pool in (own.pool, plain.pool):
        pool.fill_(0.25)
    generations = [
        Generation(i, length, list(range(8 * i, 8 * i + 8)), [5])
        for i, length in enumerate((9, 3, 6))
    ]
    for _ in range(4):
        shares = [generation.schedule() for generation in generations]
        output = SchedulerOutput(tuple(shares))
        wanted, found = plain.execute(output).token_ids, own.execute(output).token_ids
        assert found == wanted, (found, wanted)
        for generation, share, token in zip(generations, shares, found, strict=True):
            generation.advance(share, token)
    assert sum(graph.num_launches for graph in device.graphs) == 2
    assert torch.allclose(own.pool[:NUM_BLOCKS], plain.pool, atol=1e-4)


if __name__ == "__main__":
    main()
