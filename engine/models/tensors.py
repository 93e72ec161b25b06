"""The tensors of a Hugging Face checkpoint: which names a configuration asks for, in which shape.

Owns the names. Does not know files, values or how tensors are fused; imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.engine.models.checkpoint import shown
from kvferry.engine.models.config import ModelConfig
from kvferry.engine.models.errors import DamagedModel
from kvferry.engine.models.refusals import unsupported

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_FREQUENCIES = ".rotary_emb.inv_freq"  # older checkpoints keep what the configuration says anyway
_NAMED = 4  # unread tensors in a message


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's tensors by name, without ``model.layers.<index>.``."""
    hidden, ffn = config.hidden_size, config.ffn_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    for name, size in qkv.items():
        shapes[f"self_attn.{name}.weight"] = (size, hidden)
        if config.qkv_bias:
            shapes[f"self_attn.{name}.bias"] = (size,)
    shapes["self_attn.o_proj.weight"] = (hidden, q_size)
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {f"self_attn.{x}_norm.weight": (config.head_dim,) for x in "qk"}
    for name, (rows, columns) in {
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
    }.items():
        shapes[f"mlp.{name}.weight"] = (rows, columns)
        if config.mlp_bias:
            shapes[f"mlp.{name}.bias"] = (rows,)
    return shapes


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors by name; a tied head is not among them."""
    vocabulary = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: vocabulary, FINAL_NORM: (config.hidden_size,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = vocabulary
    per_layer = layer_shapes(config)
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in per_layer.items()}
    return shapes


def check_names(config: ModelConfig, names: Iterable[str]) -> None:
    """Refuse a checkpoint with tensors that nothing would read, or without a head.

    Frequencies of the rotary embedding are computed, so stored ones are ignored. A head stored
    although the configuration ties it is for ``loading`` to compare with the embedding.

    Raises UnsupportedModel or DamagedModel; a tensor missing otherwise shows when it is loaded.
    """
    held, known = set(names), tensor_shapes(config)
    ignored = {HEAD} if config.tie_word_embeddings else set()
    unread = sorted(n for n in held - known.keys() - ignored if not n.endswith(_FREQUENCIES))
    if unread:
        more = f" and {len(unread) - _NAMED} more" if len(unread) > _NAMED else ""
        named = ", ".join(map(shown, unread[:_NAMED]))
        found = f"tensors that its configuration does not announce: {named}{more}"
        raise unsupported(config.name, config.architecture, found)
    if HEAD in known and HEAD not in held:
        raise DamagedModel(
            f"model {config.name!r} has no tensor {HEAD!r}, and its configuration has "
            "tie_word_embeddings false: a file is missing, or the head is the embedding and "
            "tie_word_embeddings should be true"
        )
