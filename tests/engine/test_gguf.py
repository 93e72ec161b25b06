from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from kvferry.engine.models.config import ModelConfig
from kvferry.engine.models.errors import DamagedModel, ModelError, UnsupportedModel
from kvferry.engine.models.frequencies import inverse_frequencies
from kvferry.engine.models.loading import load_model
from kvferry.engine.models.rope import Rope
from kvferry.engine.tokenizer import Tokenizer
from kvferry.engine.weights.convert import convert_gguf
from kvferry.engine.weights.files import no_progress
from kvferry.engine.weights.gguf_reader import open_gguf
from kvferry.engine.weights.gguf_tokenizer import build_tokenizer, tokenizer_config
from kvferry.engine.weights.reader import open_weights
from tests.engine.paged_model import PagedSequences
from tests.engine.tiny_gguf import HEAD_DIM, SPECIAL, TEMPLATE, vocabulary, write_tiny_gguf

ORIGIN = {"gguf_sha256": "0" * 64}


def test_metadata_equals_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, quantised=("model.embed_tokens.weight",))
    ours, theirs = open_gguf(path).file, GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    assert {n: (t.shape, t.kind, t.begin, t.end) for n, t in ours.tensors.items()} == {
        t.name: (
            tuple(int(d) for d in reversed(t.shape)),
            t.tensor_type,
            t.data_offset,
            t.data_offset + t.n_bytes,
        )
        for t in theirs.tensors
    }


def test_tensors_come_back_under_their_names_with_the_rope_order_undone(tmp_path: Path) -> None:
    wanted = write_tiny_gguf(tmp_path / "m.gguf")
    model = open_gguf(tmp_path / "m.gguf")
    assert sorted(model.tensor_names()) == sorted(wanted)
    for name, values in wanted.items():
        np.testing.assert_array_equal(model.tensor(name), values, err_msg=name)


def test_qwen2_keeps_its_row_order(tmp_path: Path) -> None:
    wanted = write_tiny_gguf(tmp_path / "m.gguf", architecture="qwen2")
    model = open_gguf(tmp_path / "m.gguf")
    assert model.config()["architectures"] == ["Qwen2ForCausalLM"]
    for name, values in wanted.items():
        np.testing.assert_array_equal(model.tensor(name), values, err_msg=name)


def test_quantised_tensors_are_dequantised(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    wanted = write_tiny_gguf(tmp_path / "m.gguf", quantised=(name,))
    found = open_gguf(tmp_path / "m.gguf").tensor(name)
    assert found.dtype == np.float32
    step = np.abs(wanted[name]).max() / 127
    assert 0 < np.abs(found - wanted[name]).max() <= step


def test_a_converted_folder_is_a_whole_model(tmp_path: Path) -> None:
    wanted = write_tiny_gguf(tmp_path / "m.gguf")
    folder = tmp_path / "out"
    folder.mkdir()
    steps: list[tuple[int, int]] = []
    convert_gguf(tmp_path / "m.gguf", folder, "tiny", ORIGIN, lambda _, *s: steps.append(s))
    config = ModelConfig.from_folder(folder)
    assert (config.name, config.num_layers, config.rope) == ("tiny", 2, Rope(50000.0))
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    assert "0" * 32 in config.revision
    with open_weights(folder) as weights:
        assert weights.names() == sorted(wanted)
        for name, values in wanted.items():
            np.testing.assert_array_equal(weights.tensor(name).numpy(), values)
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    total = sum(v.nbytes for v in wanted.values())
    assert steps[0] == (0, total)
    assert steps[-1] == (total, total)
    tokenizer = Tokenizer(folder)
    assert tokenizer.vocab_size == len(vocabulary())
    assert [vocabulary()[i] for i in tokenizer.encode("hello  7<|im_end|>")] == [
        "hello",
        "ĠĠ",
        "7",
        SPECIAL[2],
    ]


def test_the_same_file_gives_the_same_bytes(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf")
    contents = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        convert_gguf(tmp_path / "m.gguf", tmp_path / name, "tiny", ORIGIN, no_progress)
        contents.append({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()})
    assert contents[0] == contents[1]


def scaled(kind: str, **values: Any) -> dict[str, Any]:
    return {f"llama.rope.scaling.{key}": value for key, value in ({"type": kind} | values).items()}


def frequencies(*divisors: float) -> dict[str, NDArray[np.float32]]:
    """``rope_freqs.weight``; the last divisor stands for the rest."""
    values = [*divisors, *divisors[-1:] * (HEAD_DIM // 2 - len(divisors))]
    return {"rope_freqs.weight": np.array(values, np.float32)}


CONVERTED: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, biases": {"biases": True},
    "llama, linear": {"extra": scaled("linear", factor=2.5)},
    "llama, yarn": {"extra": scaled("yarn", factor=4.0, original_context_length=32)},
    "llama, yarn, all keys": {
        "extra": scaled(
            "yarn",
            factor=4.0,
            original_context_length=32,
            attn_factor=0.875,
            yarn_beta_fast=16.0,
            yarn_beta_slow=2.0,
        )
    },
    "llama 3, frequencies": {"extra_tensors": frequencies(1.0, 1.5, 4.2, 8.0)},
    "llama, frequencies of one": {"extra_tensors": frequencies(1.0)},
    "qwen2": {"architecture": "qwen2"},
    "qwen3": {"architecture": "qwen3"},
}


@pytest.mark.parametrize("name", CONVERTED)
def test_transformers_and_we_read_a_converted_folder_alike(name: str, tmp_path: Path) -> None:
    written = write_tiny_gguf(tmp_path / "m.gguf", **CONVERTED[name])
    folder = tmp_path / "out"
    folder.mkdir()
    convert_gguf(tmp_path / "m.gguf", folder, "tiny", ORIGIN, no_progress)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    read = theirs.state_dict()
    for tensor, values in written.items():
        np.testing.assert_array_equal(read[tensor].numpy(), values, err_msg=tensor)
    ids = torch.arange(60) * 7 % len(vocabulary())
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
    run = PagedSequences(load_model(folder, "float32"), 16, seed=0)
    bounds = (0, 17, 50, 51, 60)
    found = torch.cat([run.step([(0, ids[a:b].tolist())])[0] for a, b in pairwise(bounds)])
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_frequencies_stand_in_the_configuration_and_ones_do_not(tmp_path: Path) -> None:
    for name, divisors in (("scaled", (1.0, 2.0, 4.0, 8.0)), ("plain", (1.0,))):
        write_tiny_gguf(tmp_path / name, extra_tensors=frequencies(*divisors))
        config = ModelConfig.from_dict(open_gguf(tmp_path / name).config(), name="m", revision="r")
        plain = inverse_frequencies(Rope(50000.0), HEAD_DIM)
        found = inverse_frequencies(config.rope, HEAD_DIM)
        assert torch.allclose(found, plain / torch.tensor(divisors), rtol=1e-6)
        assert config.rope.attention_factor == 1.0
        assert config.rope.kind == ("longrope" if name == "scaled" else "default")


def test_a_bias_that_some_projections_lack_is_named(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m", extra_tensors={"blk.0.attn_q.bias": np.ones(32, "f4")})
    (tmp_path / "out").mkdir()
    with pytest.raises(DamagedModel, match=r"layers\.0\.self_attn\.k_proj\.bias, one of 7"):
        convert_gguf(tmp_path / "m", tmp_path / "out", "tiny", ORIGIN, no_progress)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (lambda p: write_tiny_gguf(p, architecture="mamba"), "mamba"),
        (lambda p: write_tiny_gguf(p, extra=scaled("su")), "'su'"),
        (lambda p: write_tiny_gguf(p, extra=scaled("linear", factor=2.0, attn_factor=0.5)), "0.5"),
        (lambda p: write_tiny_gguf(p, extra=scaled("yarn", yarn_ext_factor=0.5)), "ext_factor"),
        (
            lambda p: write_tiny_gguf(
                p, extra=scaled("linear", factor=2.0), extra_tensors=frequencies(2.0)
            ),
            "together with rope of type 'linear'",
        ),
        (lambda p: write_tiny_gguf(p, extra={"llama.logit_scale": 0.5}), "logit_scale 0.5"),
        (
            lambda p: write_tiny_gguf(p, extra={"llama.attention.sliding_window": 64}),
            "window of 64",
        ),
        (lambda p: write_tiny_gguf(p, extra={"llama.attention.value_length": 16}), "lengths"),
        (
            lambda p: write_tiny_gguf(
                p, architecture="qwen3", extra_tensors={"blk.0.ffn_up.bias": np.ones(64, "f4")}
            ),
            "mlp_bias",
        ),
        (
            lambda p: write_tiny_gguf(
                p, extra_tensors={"blk.0.attn_q_norm.weight": np.ones(8, "f4")}
            ),
            "q_norm",
        ),
        (
            lambda p: write_tiny_gguf(
                p, extra_tensors={"rope_factors_long.weight": np.ones(4, "f4")}
            ),
            "rope_factors_long",
        ),
        (
            lambda p: write_tiny_gguf(
                p, extra_tensors={"blk.0.ffn_gate_inp.weight": np.ones(32, "f4")}
            ),
            "ffn_gate_inp",
        ),
    ],
)
def test_what_is_not_supported_is_named_before_weights_are_written(
    write: Callable[[Path], object], named: str, tmp_path: Path
) -> None:
    write(tmp_path / "m.gguf")
    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(UnsupportedModel, match=named):
        convert_gguf(tmp_path / "m.gguf", folder, "tiny", ORIGIN, no_progress)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04" + bytes(64), b"GGUF" + bytes(64)])
def test_what_is_no_gguf_is_a_typed_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.gguf"):
        open_gguf(tmp_path / "m.gguf")


@cache
def tiny_bytes() -> bytes:
    with TemporaryDirectory() as folder:
        write_tiny_gguf(Path(folder) / "m.gguf")
        return (Path(folder) / "m.gguf").read_bytes()


def read_everything(content: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(content)
        model = open_gguf(path)
        ModelConfig.from_dict(model.config(), model.generation_config(), name="m", revision="r")
        build_tokenizer(model)
        tokenizer_config(model)
        for name in model.tensor_names():
            model.tensor(name)


def test_the_whole_file_reads() -> None:
    read_everything(tiny_bytes())


@given(share=st.floats(0, 1, exclude_max=True))
def test_any_truncation_is_a_typed_error(share: float) -> None:
    content = tiny_bytes()
    with pytest.raises(DamagedModel):
        read_everything(content[: int(len(content) * share)])


@given(place=st.integers(0, 6_300), width=st.integers(1, 8), value=st.integers(0, 255))
def test_overwritten_header_bytes_end_at_worst_in_a_typed_error(
    place: int, width: int, value: int
) -> None:
    content = bytearray(tiny_bytes())
    content[place : place + width] = bytes([value]) * width
    try:
        read_everything(bytes(content))
    except ModelError:
        pass
