"""Small tokenizers of both kinds, saved as model folders."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from kvferry.engine.tokenizer import Tokenizer
from tests.engine.tiny_gguf import MERGES, byte_alphabet, vocabulary

FALLBACK_STEPS = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())


def save(fast: FastTokenizer, folder: Path) -> Tokenizer:
    """Write the tokenizer as a folder and open it."""
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    described = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return Tokenizer(folder)


def byte_level(folder: Path) -> Tokenizer:
    """All bytes, some merges across character borders, special and other added tokens.

    Like many, it would prepend a token if it were let.
    """
    vocab = {token: index for index, token in enumerate(vocabulary())}
    alphabet = byte_alphabet()
    broken = [alphabet[0xE2] + alphabet[0x82], alphabet[0xAC] + alphabet[0xF0]]
    for token in broken:
        vocab[token] = len(vocab)
    merges = [(left, right) for left, right in (m.split(" ") for m in MERGES)]
    merges += [(token[0], token[1]) for token in broken]
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    begin = ("<|im_start|>", 1)
    fast.post_processor = processors.TemplateProcessing(f"{begin[0]} $A", None, [begin])
    fast.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    fast.add_tokens(
        [AddedToken("two words", normalized=False), AddedToken("日本", normalized=False)]
    )
    return save(fast, folder)


def byte_fallback(folder: Path, strip: bool, ends: bool = False) -> Tokenizer:
    """SentencePiece's rules: ``▁`` for a space, ``<0xAB>`` for bytes without a token.

    ``ends`` puts a token before and one after a text, as Llama 2's does with the first.
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "a", "b", "▁a", "▁▁", "é", "<0xZZ>", "<0x1>"]
    fast = FastTokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[("▁", "a"), ("▁", "▁")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    steps = [*FALLBACK_STEPS, decoders.Strip(" ", 1, 0)] if strip else [*FALLBACK_STEPS]
    fast.decoder = decoders.Sequence(steps)
    fast.add_special_tokens(["<unk>", "<s>", "</s>"])
    if ends:
        around = [("<s>", 1), ("</s>", 2)]
        fast.post_processor = processors.TemplateProcessing("<s> $A </s>", None, around)
    return save(fast, folder)
