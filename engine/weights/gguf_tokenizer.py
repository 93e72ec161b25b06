"""Builds ``tokenizer.json`` from the vocabulary and merges that a GGUF file carries.

Owns the splitting rules that GGUF only names (``tokenizer.ggml.pre``), and which tokens stand
around a text. Byte-level BPE here, SentencePiece's in ``gguf_sentencepiece``; others are refused.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvferry.engine.models.checkpoint import shown
from kvferry.engine.models.errors import DamagedModel, UnsupportedModel
from kvferry.engine.weights.gguf_reader import GGUFModel
from kvferry.engine.weights.gguf_sentencepiece import sentencepiece_tokenizer

_SENTENCEPIECE = "llama"
_BYTE_LEVEL = "gpt2"

_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_ENDS = ("bos", "eos")
_MERGES = "tokenizer.ggml.merges"

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "qwen2": _WORDS.format(digits=r"\p{N}"),
    "llama-bpe": _WORDS.format(digits=r"\p{N}{1,3}"),
}


def build_tokenizer(model: GGUFModel) -> Tokenizer:
    """The file's tokenizer. Raises UnsupportedModel or DamagedModel."""
    kind = _kind(model)
    tokens = _strings(model, "tokenizer.ggml.tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise DamagedModel(f"{model.path}: the vocabulary has {len(tokens) - len(vocab)} doubles")
    if kind == _SENTENCEPIECE:
        tokenizer = sentencepiece_tokenizer(
            model, vocab, _merges(model, vocab) if _MERGES in model.file.metadata else None
        )
    else:
        tokenizer = _byte_level(model, vocab)
    _add_special_tokens(tokenizer, model, tokens, kind)
    return _with_ends(tokenizer, model, tokens)


def _kind(model: GGUFModel) -> str:
    kind = model.file.metadata.get("tokenizer.ggml.model")
    if kind not in (_BYTE_LEVEL, _SENTENCEPIECE):
        raise UnsupportedModel(
            f"{model.path}: tokenizer of kind {shown(kind)}, wanted '{_BYTE_LEVEL}' (byte-level "
            f"BPE) or '{_SENTENCEPIECE}' (SentencePiece BPE)"
        )
    return str(kind)


def _byte_level(model: GGUFModel, vocab: dict[str, int]) -> Tokenizer:
    rule = model.file.metadata.get("tokenizer.ggml.pre", "default")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(model, vocab),
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=rule == "llama-bpe",
        )
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(model, rule)
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def tokenizer_config(model: GGUFModel) -> dict[str, Any]:
    """The content of ``tokenizer_config.json``: special tokens and the chat template."""
    tokens = _strings(model, "tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds(model, "bos"),
        "add_eos_token": _adds(model, "eos"),
    }
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for name, role in roles.items():
        token = _role_token(model, tokens, role)
        if token is not None:
            config[f"{name}_token"] = token
    if model.chat_template is not None:
        config["chat_template"] = model.chat_template
    return config


def _role_token(model: GGUFModel, tokens: list[str], role: str) -> str | None:
    index = model.token_id(role)
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise DamagedModel(f"{model.path}: {role} token id {index} of {len(tokens)}")
    return tokens[index]


def _adds(model: GGUFModel, role: str) -> bool:
    """Whether the file's ``bos`` or ``eos`` token stands around raw text.

    A SentencePiece vocabulary that does not say begins a text, as files older than the key do.
    """
    unsaid = role == "bos" and _kind(model) == _SENTENCEPIECE
    value = model.file.metadata.get(f"tokenizer.ggml.add_{role}_token", unsaid)
    if not isinstance(value, bool):
        raise DamagedModel(f"{model.path}: add_{role}_token is {shown(value)}, wanted a bool")
    return value and model.token_id(role) is not None


def _with_ends(tokenizer: Tokenizer, model: GGUFModel, tokens: list[str]) -> Tokenizer:
    """The tokenizer with a post-processor that adds what ``_adds`` says.

    Written as JSON: the constructor would read a token such as ``$A`` as a place for text.
    """
    begin, end = (_role_token(model, tokens, r) if _adds(model, r) else None for r in _ENDS)
    if begin is None and end is None:
        return tokenizer

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        first = [] if begin is None else [{"SpecialToken": {"id": begin, "type_id": type_id}}]
        last = [] if end is None else [{"SpecialToken": {"id": end, "type_id": type_id}}]
        return [*first, {"Sequence": {"id": sequence, "type_id": type_id}}, *last]

    written = json.loads(tokenizer.to_str())
    written["post_processor"] = {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
            for token in (begin, end)
            if token is not None
        },
    }
    made: Tokenizer = Tokenizer.from_str(json.dumps(written))
    return made


def _pre_tokenizer(model: GGUFModel, rule: Any) -> pre_tokenizers.PreTokenizer:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule in ("default", "gpt-2"):
        return whole
    if rule == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    if rule in _SPLITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[rule]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise UnsupportedModel(
        f"{model.path}: splitting rule {shown(rule)}; supported: default, gpt-2, smollm, "
        f"{', '.join(_SPLITS)}"
    )


def _add_special_tokens(
    tokenizer: Tokenizer, model: GGUFModel, tokens: list[str], kind: str
) -> None:
    kinds = model.file.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(kinds, list) or len(kinds) not in (0, len(tokens)):
        raise DamagedModel(f"{model.path}: tokenizer.ggml.token_type does not fit the vocabulary")
    special = (_CONTROL, _UNKNOWN) if kind == _SENTENCEPIECE else (_CONTROL,)
    # Each call reads all added tokens again: one call, not one per token.
    added = [
        AddedToken(token, special=kind in special, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in special or kind == _USER_DEFINED
    ]
    tokenizer.add_tokens(added)


def _merges(model: GGUFModel, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for line in _strings(model, _MERGES):
        left, _, right = line.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise DamagedModel(
                f"{model.path}: merge {shown(line)} is not made of vocabulary entries"
            )
        merges.append((left, right))
    return merges


def _strings(model: GGUFModel, key: str) -> list[str]:
    value = model.file.metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise DamagedModel(f"{model.path}: {key} is missing or not a list of strings")
    return value
