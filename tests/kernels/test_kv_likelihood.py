"""What the element type of the pool costs in likelihood, on either family of kernels."""

from __future__ import annotations

import pytest

from kvferry.engine.models.llama import Kernels
from kvferry.engine.models.loading import load_model
from kvferry.engine.tokenizer import Tokenizer
from kvferry.engine.weights.store import ModelFolder
from kvferry.kernels import reference
from tests.kernels.families import compiled
from tests.parity.measure import nll_per_token, paged_logits
from tests.parity.text import PARAGRAPH

# Nats per token on PARAGRAPH, to either side; measured 0.0001, 0.0006, and 0.0013 to 0.0031 by
# instruction set.
COST = {"float16": 0.001, "bfloat16": 0.003, "int8": 0.01}


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("family", ["reference", "cpu"])
def test_what_kv_dtypes_cost_in_likelihood(
    default_model: ModelFolder, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    kernels: Kernels = reference if family == "reference" else compiled()
    ids = Tokenizer(default_model.path).encode(PARAGRAPH)
    model = load_model(default_model.path, "float32", kernels)
    found = {
        kv_dtype: nll_per_token(paged_logits(model, ids, kv_dtype), ids)
        for kv_dtype in ("float32", *COST)
    }
    with capsys.disabled():
        named = ", ".join(f"{kv_dtype} {nats:.4f}" for kv_dtype, nats in found.items())
        print(f"\nKV in {family}, nats per token of {len(ids) - 1}: {named}")
    for kv_dtype, most in COST.items():
        assert abs(found[kv_dtype] - found["float32"]) <= most
