"""One repository of the Hugging Face Hub: how it is named, which of its files are wanted, and when
a snapshot of it is whole and something that we run.

Knows neither the network nor where the cache lies.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvferry.engine.models.checkpoint import file_size, read_object
from kvferry.engine.models.config import ModelConfig
from kvferry.engine.models.errors import DamagedModel
from kvferry.engine.weights.safetensors_header import (
    INDEX_FILE,
    SINGLE_FILE,
    read_header,
    read_index,
)

DEFAULT_REVISION = "main"

#: Beside the weights. Nothing else of a repository is asked for: no code, no pickles.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*",
    INDEX_FILE,
)
#: Formats that run code when they are opened; we never do.
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class HubModel:
    """What a name asks for: a repository, and one GGUF file of it or (None) the whole."""

    repository: str
    file: str | None = None

    def __str__(self) -> str:
        return self.repository if self.file is None else f"{self.repository}/{self.file}"


def pull_command(model: HubModel, revision: str) -> str:
    """What a user runs to fetch a model."""
    at = "" if revision == DEFAULT_REVISION else f" --revision {revision}"
    return f"kvferry models pull {model}{at}"


def check_snapshot(repository: str, folder: Path, pull: str | None = None) -> None:
    """Raise DamagedModel unless every file that loading needs is there and whole."""
    try:
        for name in SMALL_FILES:
            _check_link(folder / name)
        for needed in ("config.json", "tokenizer.json"):
            file_size(folder / needed)
        shards = [folder / SINGLE_FILE]
        if os.path.lexists(folder / INDEX_FILE):
            shards = list(read_index(folder))
        for shard in shards:
            _check_link(shard)
            read_header(shard)
    except DamagedModel as error:
        again = pull or f"kvferry models pull {repository}"
        raise DamagedModel(
            f"model {repository!r} is not whole: {error}; run '{again}' with a network"
        ) from error


def _check_link(file: Path) -> None:
    """A snapshot is made of links to blobs: one whose blob is not there, or not whole, is named."""
    blob = os.path.realpath(file)
    if os.path.lexists(file) and not os.path.exists(file):
        raise DamagedModel(f"{file}: points at {blob}, which is not there")
    if blob.endswith(".incomplete"):
        raise DamagedModel(f"{file}: points at {blob}, a download that did not end")


def check_config(repository: str, folder: Path) -> None:
    """Raise UnsupportedModel or DamagedModel for a model that we cannot run."""
    ModelConfig.from_dict(
        read_object(folder / "config.json"),
        read_object(folder / "generation_config.json", optional=True),
        name=repository,
        revision=folder.name,
    )
