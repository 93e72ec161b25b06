"""Log-probabilities of tokens under the model's own distribution, before any parameter.

Knows rows of logits; does not know what they are for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.engine.batch import TokenLogprobs

LOWEST = -9999.0
"""What stands for the logarithm of 0, which JSON cannot say."""


def logprobs_of(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Natural logarithms of softmax(``logits``), of one token per row and of the likeliest.

    Args:
        logits: ``[num_rows, vocab_size]`` float32.
        token_ids: [num_rows]
        num_top: how many of the likeliest, per row; 0 gives none.  [num_rows]
    """
    if not token_ids:
        return []
    normaliser = logits.logsumexp(-1, keepdim=True)
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    own = (logits.gather(-1, ids) - normaliser)[:, 0].clamp(LOWEST, 0.0).tolist()
    width = min(max(num_top), logits.shape[-1])
    best = logits.topk(width)
    top_ids = best.indices.tolist()
    top = (best.values - normaliser).clamp(LOWEST, 0.0).tolist()
    return [
        TokenLogprobs(token_id, own[row], tuple(top_ids[row][:count]), tuple(top[row][:count]))
        for row, (token_id, count) in enumerate(zip(token_ids, num_top, strict=True))
    ]
