"""SentencePiece BPE from a GGUF file: pieces with scores, and bytes for what has no piece.

Owns the rules of Llama 2, TinyLlama and Mistral: ``▁`` for a space, one before the text, and
merges that follow from the scores. Does not know special tokens (``gguf_tokenizer``).
"""

from __future__ import annotations

import math

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvferry.engine.models.checkpoint import shown
from kvferry.engine.models.errors import DamagedModel
from kvferry.engine.weights.gguf_reader import GGUFModel

# Finding the merges takes time with the square of a piece's length; real ones have up to 64.
_MAX_PIECE = 256


def sentencepiece_tokenizer(
    model: GGUFModel, vocab: dict[str, int], merges: list[tuple[str, str]] | None
) -> Tokenizer:
    """The file's tokenizer; ``merges`` None derives them. Raises DamagedModel."""
    prefix = model.file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    unknown = model.token_id("unknown")
    names = {index: token for token, index in vocab.items()}
    if merges is None:
        merges = derive_merges(vocab, _scores(model, vocab))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=names.get(unknown) if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if prefix else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def derive_merges(vocab: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """The pairs of pieces that make a piece, the best made piece first.

    SentencePiece joins, among all neighbours, those that make the piece of the highest score; BPE
    applies the merge that stands first. Each way to cut a piece in two pieces is a merge of its
    score; among equals, longer left and right parts stand first.
    """
    found: list[tuple[float, str, str]] = []
    for piece, score in scores.items():
        cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        known = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(score, left, right) for left, right in known]
    found.sort(key=lambda it: (it[0], len(it[1]), len(it[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _scores(model: GGUFModel, vocab: dict[str, int]) -> dict[str, float]:
    values = model.file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(values, list) or len(values) != len(vocab):
        raise DamagedModel(f"{model.path}: tokenizer.ggml.scores does not fit the vocabulary")
    wrong = next((v for v in values if not isinstance(v, float) or not math.isfinite(v)), None)
    if wrong is not None:
        raise DamagedModel(f"{model.path}: score {shown(wrong)}, wanted a finite number")
    long = next((piece for piece in vocab if len(piece) > _MAX_PIECE), None)
    if long is not None:
        raise DamagedModel(
            f"{model.path}: a piece of {len(long)} characters, wanted at most {_MAX_PIECE}"
        )
    return dict(zip(vocab, values, strict=True))
