"""A driver of ``LlamaModel`` over a paged pool."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kvferry.engine.model_runner import pool_tensor
from kvferry.engine.models.llama import AttentionInputs, LlamaModel
from kvferry.engine.models.loading import kv_layout
from kvferry.kernels.reference.scaled import row_scales


def save(model: Any, folder: Path) -> Path:
    """Write ``model`` as a Hugging Face folder."""
    model.save_pretrained(folder)
    return folder


class PagedSequences:
    """Drives ``model`` over a pool whose blocks are handed out in a random order.

    Every slot that was not written is NaN, or has a NaN for its scale, so that a read outside a
    sequence shows.
    """

    def __init__(
        self, model: LlamaModel, block_size: int, seed: int, kv_dtype: str = "float32"
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.layout = kv_layout(model.config, block_size, kv_dtype)
        num_blocks = 8 * self.layout.num_blocks_for(64)
        generator = torch.Generator().manual_seed(seed)
        self._free = torch.randperm(num_blocks, generator=generator).tolist()
        raw = torch.empty(num_blocks * self.layout.block_bytes(), dtype=torch.uint8)
        self.pool = pool_tensor(raw, self.layout, num_blocks)
        poisoned = row_scales(self.pool) if kv_dtype == "int8" else self.pool
        poisoned.fill_(torch.nan)
        self._tables: dict[int, list[int]] = {}
        self._computed: dict[int, int] = {}

    def step(self, chunks: list[tuple[int, list[int]]]) -> list[torch.Tensor]:
        """Compute (sequence, next tokens) chunks in one batch; logits of all their positions."""
        tokens: list[int] = []
        positions: list[int] = []
        slots, bounds, lengths = [], [0], []
        for seq, chunk in chunks:
            start = self._computed.get(seq, 0)
            end = self._computed[seq] = start + len(chunk)
            table = self._tables.setdefault(seq, [])
            while len(table) < self.layout.num_blocks_for(end):
                table.append(self._free.pop())
            tokens += chunk
            positions += range(start, end)
            for position in range(start, end):
                block, offset = divmod(position, self.block_size)
                slots.append(table[block] * self.block_size + offset)
            bounds.append(bounds[-1] + len(chunk))
            lengths.append(end)
        widest = max(len(self._tables[seq]) for seq, _ in chunks)
        rows = [self._tables[seq] + [-1] * widest for seq, _ in chunks]
        attention = AttentionInputs(
            slot_mapping=torch.tensor(slots),
            block_tables=torch.tensor([row[:widest] for row in rows], dtype=torch.int32),
            cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
        )
        hidden = self.model.forward(
            torch.tensor(tokens), torch.tensor(positions), attention, self.pool
        )
        logits = self.model.logits(hidden)
        return [logits[a:b] for a, b in pairwise(bounds)]
