from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvferry.engine.models.config import ModelConfig
from kvferry.engine.models.errors import DamagedModel, ModelError, UnsupportedModel
from kvferry.engine.models.linear import ModelDtype
from kvferry.engine.models.llama import LlamaModel
from kvferry.engine.models.loading import (
    MisshapedTensor,
    kv_layout,
    load_model,
    random_model,
)
from kvferry.engine.weights.reader import MissingTensor
from tests.engine.paged_model import PagedSequences, save
from tests.parity.variants import VARIANTS, VOCAB_SIZE, random_reference

KINDS = tuple(VARIANTS)

References = dict[str, tuple[Any, Path]]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    models = {kind: random_reference(kind) for kind in KINDS}
    root = tmp_path_factory.mktemp("checkpoints")
    return {kind: (model, save(model, root / kind)) for kind, model in models.items()}


def tokens(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()


def expected_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0].float()
    return logits


def in_chunks(run: PagedSequences, ids: list[int], sizes: list[int]) -> torch.Tensor:
    """Logits of all positions of ``ids``, computed in chunks of ``sizes``, alone."""
    parts, first = [], 0
    for size in [*sizes, len(ids)]:
        if first < len(ids):
            parts += run.step([(0, ids[first : first + size])])
            first += size
    return torch.cat(parts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_logits_equal_transformers_for_odd_chunks_and_decode_steps(
    references: References, kind: str, block_size: int
) -> None:
    theirs, folder = references[kind]
    ids = tokens(1, 61)
    run = PagedSequences(load_model(folder, "float32"), block_size, seed=3)
    found = in_chunks(run, ids, [5, 1, 17, 2, 13, 16, *[1] * 7])
    assert (found - expected_logits(theirs, ids)).abs().max() < 1e-4


@st.composite
def schedules(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Steps of (sequence, tokens) chunks, of up to four sequences of up to 60 tokens."""
    left = [60] * 4
    steps = []
    for _ in range(draw(st.integers(1, 7))):
        step = []
        for seq in draw(st.lists(st.integers(0, 3), unique=True, min_size=1)):
            size = min(left[seq], draw(st.one_of(st.just(1), st.integers(1, 25))))
            if size:
                left[seq] -= size
                step.append((seq, size))
        if step:
            steps.append(step)
    return steps


@settings(max_examples=80, deadline=None)
@given(schedules(), st.sampled_from(KINDS), st.integers(1, 20), st.integers(0, 2**31))
def test_logits_equal_transformers_in_mixed_batches(
    references: References,
    steps: list[list[tuple[int, int]]],
    kind: str,
    block_size: int,
    seed: int,
) -> None:
    theirs, folder = references[kind]
    run = PagedSequences(load_model(folder, "float32"), block_size, seed)
    ids = [tokens(seed + seq, 60) for seq in range(4)]
    computed = [0] * 4
    found: list[list[torch.Tensor]] = [[] for _ in ids]
    for step in steps:
        chunks = []
        for seq, size in step:
            chunks.append((seq, ids[seq][computed[seq] : computed[seq] + size]))
            computed[seq] += size
        for (seq, _), logits in zip(step, run.step(chunks), strict=True):
            found[seq].append(logits)
    for seq, parts in enumerate(found):
        if parts:
            expected = expected_logits(theirs, ids[seq][: computed[seq]])
            assert (torch.cat(parts) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_stays_near_float32_as_transformers_does(
    references: References, kind: str
) -> None:
    theirs, folder = references[kind]
    ids = tokens(4, 50)
    exact = expected_logits(theirs, ids)
    run = PagedSequences(load_model(folder, "bfloat16"), 8, seed=0, kv_dtype="bfloat16")
    found = in_chunks(run, ids, [20, 9])
    assert found.dtype == torch.float32
    twin = random_reference(kind).to(torch.bfloat16)
    their_error = (expected_logits(twin, ids) - exact).abs().mean()
    assert (found - exact).abs().mean() < 1.5 * their_error
    assert (found - exact).abs().max() < 0.3 * exact.std()


@pytest.mark.parametrize(("kv_dtype", "share"), [("float16", 0.02), ("int8", 0.3)])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_over_a_narrower_pool_stay_near(
    references: References, kind: str, kv_dtype: str, share: float
) -> None:
    theirs, folder = references[kind]
    ids = tokens(4, 50)
    exact = expected_logits(theirs, ids)
    run = PagedSequences(load_model(folder, "float32"), 8, seed=0, kv_dtype=kv_dtype)
    found = in_chunks(run, ids, [20, 9, 1, 1])
    assert (found - exact).abs().max() < share * exact.std()


def test_chunked_prefill_equals_whole_prefill() -> None:
    model = small_model("float32")
    ids = tokens(5, 60)
    whole = in_chunks(PagedSequences(model, 16, seed=1), ids, [])
    for sizes in ([1] * 60, [7] * 9, [31], [59]):
        chunked = in_chunks(PagedSequences(model, 16, seed=2), ids, sizes)
        assert torch.allclose(chunked, whole, atol=1e-5)


def small_model(dtype: ModelDtype, seed: int = 0) -> LlamaModel:
    config = ModelConfig.from_dict(
        random_reference("qwen2").config.to_dict(), name="small", revision="none"
    )
    return random_model(config, seed, dtype)


def test_random_models_are_a_function_of_the_seed() -> None:
    first, again, other = small_model("float32"), small_model("float32"), small_model("float32", 1)
    assert torch.equal(*(model.weights.layers[2].qkv.tensors()[0] for model in (first, again)))
    assert not torch.equal(*(model.weights.layers[2].qkv.tensors()[0] for model in (first, other)))
    assert small_model("bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_weight_bytes_are_those_of_the_checkpoint(references: References, kind: str) -> None:
    theirs, folder = references[kind]
    expected = sum(p.numel() for p in theirs.parameters())  # a tied head is listed once
    assert load_model(folder, "float32").weights.num_bytes() == 4 * expected
    assert load_model(folder, "bfloat16").weights.num_bytes() == 2 * expected


def test_a_missing_tensor_is_an_error_that_names_it(references: References, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    damaged = damage(references["llama"][1], tmp_path, name, None)
    with pytest.raises(MissingTensor, match=name.replace(".", r"\.")):
        load_model(damaged, "float32")


def test_a_misshaped_tensor_is_an_error_that_names_it_and_both_shapes(
    references: References, tmp_path: Path
) -> None:
    name = "model.layers.2.self_attn.k_proj.weight"
    damaged = damage(references["llama"][1], tmp_path, name, torch.zeros(48, 16))
    with pytest.raises(MisshapedTensor, match=r"k_proj.* \[48, 16\], wanted \[16, 48\]") as caught:
        load_model(damaged, "float32")
    assert isinstance(caught.value, ModelError)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.bias"),
        ("llama", "model.layers.1.mlp.down_proj.bias"),
        ("llama", "model.layers.2.self_attn.q_norm.weight"),
        ("qwen2", "model.layers.0.self_attn.o_proj.bias"),
        ("mistral", "model.layers.0.mlp.experts.0.w1.weight"),
        ("qwen3", "model.layers.3.input_layernorm.weight"),
    ],
)
def test_a_tensor_that_nothing_would_read_is_refused(
    references: References, tmp_path: Path, kind: str, name: str
) -> None:
    folder = damage(references[kind][1], tmp_path, name, torch.zeros(48))
    with pytest.raises(UnsupportedModel, match=name.replace(".", r"\.")):
        load_model(folder, "float32")


def test_a_missing_bias_or_norm_is_an_error_that_names_it(
    references: References, tmp_path: Path
) -> None:
    for number, (kind, name) in enumerate(
        [
            ("llama-biases", "model.layers.1.mlp.gate_proj.bias"),
            ("qwen2", "model.layers.0.self_attn.k_proj.bias"),
            ("qwen3", "model.layers.2.self_attn.k_norm.weight"),
        ]
    ):
        (tmp_path / str(number)).mkdir()
        folder = damage(references[kind][1], tmp_path / str(number), name, None)
        with pytest.raises(MissingTensor, match=name.replace(".", r"\.")):
            load_model(folder, "float32")


def test_stored_frequencies_are_ignored(references: References, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = damage(references["llama"][1], tmp_path, name, torch.full((4,), 9.0))
    ids = tokens(7, 20)
    found = in_chunks(PagedSequences(load_model(folder, "float32"), 4, seed=0), ids, [])
    assert (found - expected_logits(references["llama"][0], ids)).abs().max() < 1e-4


@pytest.mark.parametrize("differs", [False, True])
def test_a_head_stored_beside_a_tied_embedding_counts_where_it_differs_as_in_transformers(
    references: References, tmp_path: Path, differs: bool
) -> None:
    embedding = references["llama-tied"][0].model.embed_tokens.weight.detach()
    head = embedding.flip(0).contiguous() if differs else embedding.clone()
    folder = damage(references["llama-tied"][1], tmp_path, "lm_head.weight", head)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model, ids = load_model(folder, "float32"), tokens(8, 20)
    found = in_chunks(PagedSequences(model, 4, seed=0), ids, [])
    assert (found - expected_logits(theirs, ids)).abs().max() < 1e-4
    assert (model.weights.head.tensors()[0] is model.weights.embedding) == (not differs)


def test_a_missing_head_says_what_it_could_be(references: References, tmp_path: Path) -> None:
    folder = damage(references["mistral"][1], tmp_path, "lm_head.weight", None)
    with pytest.raises(DamagedModel, match="tie_word_embeddings"):
        load_model(folder, "float32")


def damage(folder: Path, target: Path, name: str, value: torch.Tensor | None) -> Path:
    """A copy of a checkpoint with one tensor replaced, added or removed."""
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


def test_kv_layout_has_one_group_of_all_layers() -> None:
    model = small_model("float32")
    layout = kv_layout(model.config, 16, "bfloat16")
    assert layout.block_shape() == (3, 2, 2, 16, 8)
    assert layout.block_bytes() == 3 * 2 * 2 * 16 * 8 * 2
    assert kv_layout(model.config, 16, "float16").block_bytes() == layout.block_bytes()
    assert kv_layout(model.config, 16, "int8").block_bytes() == 3 * 2 * 2 * 16 * (8 + 4)
