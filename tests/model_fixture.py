"""The default model for tests that need real weights.

``KVFERRY_CACHE_DIR`` says where it is kept; it is fetched if it is missing. If it cannot be had
the test is skipped, or fails where ``KVFERRY_REQUIRE_MODEL=1``.
"""

from __future__ import annotations

import os

import pytest

from kvferry.engine.weights.catalog import DEFAULT_MODEL
from kvferry.engine.weights.store import (
    CacheUnusable,
    ModelFolder,
    ModelMissing,
    default_cache_dir,
    resolve_model,
)


def default_model_folder() -> ModelFolder:
    """The default model, fetched and converted if need be; skips or fails without it."""
    try:
        return resolve_model(DEFAULT_MODEL, None, default_cache_dir(os.environ))
    except (ModelMissing, CacheUnusable) as error:
        if os.environ.get("KVFERRY_REQUIRE_MODEL") == "1":
            pytest.fail(f"the default model is required: {error}")
        pytest.skip(f"the default model is not available: {error}")


@pytest.fixture(scope="session")
def default_model() -> ModelFolder:
    """The default model's folder, with the GGUF it was made from."""
    return default_model_folder()
