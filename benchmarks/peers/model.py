"""The model's folder: one that both systems open."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from kvferry.engine.models.errors import ModelError
from kvferry.engine.weights.files import Progress, no_progress
from kvferry.engine.weights.store import default_cache_dir, resolve_model

NEEDED = ("config.json", "tokenizer.json", "tokenizer_config.json")


class NotForPeers(ModelError):
    """The folder lacks what the peer reads of it; names the files."""


@dataclass(frozen=True, slots=True)
class Model:
    """A folder in Hugging Face layout, and the size of its vocabulary."""

    folder: Path
    vocab_size: int


def find_model(name: str, progress: Progress = no_progress) -> Model:
    """The model of a name or folder, fetched and converted if need be.

    Raises ModelError where it cannot be had, or the peer could not read it.
    """
    given = Path(name) if "/" in name else None
    cache_dir = default_cache_dir(os.environ)
    folder = resolve_model(None if given else name, given, cache_dir, progress=progress).path
    missing = [file for file in NEEDED if not (folder / file).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise NotForPeers(f"{folder} lacks {', '.join(missing)}, which vLLM reads")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Model(folder, int(config["vocab_size"]))
