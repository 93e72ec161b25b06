"""Greedy tokens of transformers, where they are no near tie."""

from __future__ import annotations

from typing import Any

import torch

MARGIN = 1e-3


def generate(theirs: Any, ids: list[int], num_tokens: int) -> list[int] | None:
    """What transformers generates, or None where its two best tokens come within ``MARGIN``."""
    out = theirs.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=2,
    )
    best = torch.cat(out.logits).topk(2).values
    if float((best[:, 0] - best[:, 1]).min()) <= MARGIN:
        return None
    answer: list[int] = out.sequences[0, len(ids) :].tolist()
    return answer
