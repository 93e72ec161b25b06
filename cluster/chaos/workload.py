"""What is sent while things die, and the configuration that makes every state last. Pure.

Prompts recite the alphabet, cyclically, each from another letter: the model goes on with a large
margin at every step, so that greedy float32 output is the same however a request's tokens are
batched, and no two requests have the same output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any

LONG_TOKENS = 320  # five chunks of prefill, 20 blocks
SHORT_TOKENS = 56
CHUNK_TOKENS = 64
NUM_BLOCKERS = 4
NUM_BACKGROUND = 2

# Two blockers fit into a decode pool, three do not; what is left is too little for the target,
# and enough for the background.
DECODE_BLOCKS = 58
PREFILL_BLOCKS = 128
TRANSFER_DELAY_S = 1.5


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of one token per letter and the exact length of its output."""

    text: str
    max_tokens: int

    @property
    def options(self) -> dict[str, Any]:
        """Options of a request for it: greedy, of exact length."""
        return {"max_tokens": self.max_tokens, "temperature": 0.0, "ignore_eos": True}


def recital(first: int, num_tokens: int, max_tokens: int) -> Prompt:
    """The alphabet from its ``first`` letter on (from 0), around and around."""
    letters = [ascii_lowercase[(first + i) % 26] for i in range(num_tokens)]
    return Prompt(" ".join(letters), max_tokens)


TARGET = recital(0, LONG_TOKENS, 48)
ENDLESS = recital(0, LONG_TOKENS, 190)  # for a client that will not see its end
BLOCKERS = tuple(recital(3 + 5 * i, LONG_TOKENS, 32) for i in range(NUM_BLOCKERS))
BACKGROUND = tuple(recital(2 + 9 * i, SHORT_TOKENS, 32) for i in range(NUM_BACKGROUND))


def settings(slow_transfers: bool) -> Mapping[str, Any]:
    """Configuration by dotted key: two workers per role, small pools."""
    return {
        "model.max_model_len": 512,
        "model.dtype": "float32",
        "prefill.replicas": 2,
        "decode.replicas": 2,
        "prefill.num_blocks": PREFILL_BLOCKS,
        "decode.num_blocks": DECODE_BLOCKS,
        "scheduler.chunk_tokens": CHUNK_TOKENS,
        "scheduler.max_num_batched_tokens": 2 * CHUNK_TOKENS,
        "transfer.faults.delay": TRANSFER_DELAY_S if slow_transfers else 0.0,
        "server.keepalive": 1.0,  # a stopped client answers no ping
        "server.keepalive_timeout": 2.0,
        "server.grpc": "127.0.0.1:0",
    }
