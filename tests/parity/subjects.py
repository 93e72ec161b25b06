"""The models that are compared: every random variant, and the default model's real weights."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvferry.engine.models.linear import ModelDtype
from kvferry.engine.models.llama import LlamaModel
from kvferry.engine.models.loading import TORCH_DTYPES, load_model
from kvferry.engine.tokenizer import Tokenizer
from kvferry.engine.weights.store import ModelFolder
from tests.golden.prompts import PASSAGE
from tests.parity.measure import (
    LENGTHS,
    LogitsCompared,
    TokensCompared,
    compare_logits,
    compare_tokens,
    nll_per_token,
    paged_logits,
    random_ids,
    random_prompts,
    reference_logits,
)
from tests.parity.text import PARAGRAPH
from tests.parity.variants import VARIANTS, random_reference

REAL_TITLE = "SmolLM2-135M-Instruct, real weights"
NUM_IDS = 120  # several blocks; beyond every window and every trained length of the variants
DTYPES: tuple[ModelDtype, ...] = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    title: str
    logits: LogitsCompared
    tokens: TokensCompared


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Nats per token of ``PARAGRAPH``, both computed in ``dtype``."""

    dtype: str
    num_tokens: int
    theirs: float
    ours: float


def random_pair(kind: str, folder: Path) -> tuple[Any, LlamaModel]:
    """A variant in transformers, and what we load of what it saves into ``folder``."""
    theirs = random_reference(kind)
    theirs.save_pretrained(folder)
    return theirs, load_model(folder, "float32")


def random_row(kind: str, folder: Path) -> Row:
    """Compare one variant."""
    theirs, model = random_pair(kind, folder)
    return Row(
        VARIANTS[kind].title,
        compare_logits(theirs, model, random_ids(7, NUM_IDS)),
        compare_tokens(theirs, model, random_prompts()),
    )


def real_row(theirs: Any, folder: ModelFolder) -> Row:
    """Compare the default model; ``theirs`` is what transformers reads from its GGUF."""
    ids = Tokenizer(folder.path).encode(PARAGRAPH)
    model = load_model(folder.path, "float32")
    return Row(
        REAL_TITLE,
        compare_logits(theirs, model, ids[:NUM_IDS]),
        compare_tokens(theirs, model, _real_prompts(folder)),
    )


def likelihoods(theirs: Any, folder: ModelFolder) -> list[Likelihood]:
    """The likelihood of ``PARAGRAPH`` under the default model, in each dtype."""
    ids = Tokenizer(folder.path).encode(PARAGRAPH)
    found = []
    for dtype in DTYPES:
        twin = _rounded(theirs, TORCH_DTYPES[dtype])
        expected = nll_per_token(reference_logits(twin, ids), ids)
        ours = nll_per_token(paged_logits(load_model(folder.path, dtype), ids, dtype), ids)
        found.append(Likelihood(dtype, len(ids) - 1, expected, ours))
    return found


def _rounded(theirs: Any, dtype: torch.dtype) -> Any:
    """A copy with parameters of ``dtype`` and frequencies untouched, as if it were loaded so."""
    twin = deepcopy(theirs)
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(dtype)
    return twin


def _real_prompts(folder: ModelFolder) -> Iterator[list[int]]:
    ids = Tokenizer(folder.path).encode(PASSAGE)
    for number in range(len(ids)):
        length = LENGTHS[number % len(LENGTHS)]
        if number + length <= len(ids):
            yield ids[number : number + length]
