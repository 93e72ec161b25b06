"""The default model for tests that need real weights, and transformers' own reading of it.

``KVFERRY_CACHE_DIR`` says where it is kept; it is fetched if it is missing. If it cannot be had
the test is skipped, or fails where ``KVFERRY_REQUIRE_MODEL=1``.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from kvferry.engine.weights.catalog import DEFAULT_MODEL
from kvferry.engine.weights.store import (
    CacheUnusable,
    ModelFolder,
    ModelMissing,
    default_cache_dir,
    resolve_model,
)

# transformers takes seconds to import: only tests that use it pay, inside its fixtures.


def default_model_folder() -> ModelFolder:
    """The default model, fetched and converted if need be; skips or fails without it."""
    try:
        return resolve_model(DEFAULT_MODEL, None, default_cache_dir(os.environ))
    except (ModelMissing, CacheUnusable) as error:
        if os.environ.get("KVFERRY_REQUIRE_MODEL") == "1":
            pytest.fail(f"the default model is required: {error}")
        pytest.skip(f"the default model is not available: {error}")


def read_reference(model: ModelFolder) -> Any:
    """A model as transformers itself reads it, float32, with its plainest attention."""
    import torch
    from transformers import AutoModelForCausalLM

    folder, file = _gguf_of(model)
    reference = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, attn_implementation="eager"
    )
    return reference.eval()


@pytest.fixture(scope="session")
def default_model() -> ModelFolder:
    """The default model's folder, with the GGUF it was made from."""
    return default_model_folder()


@pytest.fixture(scope="session")
def reference_model(default_model: ModelFolder) -> Any:
    """The model as transformers itself reads it from the GGUF, float32, never from our files."""
    return read_reference(default_model)


@pytest.fixture(scope="session")
def reference_tokenizer(default_model: ModelFolder) -> Any:
    """The tokenizer as transformers itself reads it from the GGUF."""
    from transformers import AutoTokenizer

    folder, file = _gguf_of(default_model)
    return AutoTokenizer.from_pretrained(folder, gguf_file=file)


def _gguf_of(model: ModelFolder) -> tuple[str, str]:
    assert model.gguf_path is not None, f"{model.path} keeps no GGUF"
    return str(model.gguf_path.parent), model.gguf_path.name
