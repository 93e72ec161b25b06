"""What a model folder is called and what it holds: the name and the revision that peers compare.

Owns the manifest's name, the shape of a Hugging Face cache, and the sampling of tensors. Does not
know shapes or layers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvferry.engine.models.checkpoint import MAX_CONFIG_BYTES, file_size, read_bytes, read_object
from kvferry.engine.models.errors import DamagedModel
from kvferry.engine.weights.safetensors_header import read_header

MANIFEST_FILE = "kvferry-manifest.json"

_SAMPLES_PER_TENSOR = 16
_SAMPLE_BYTES = 1024
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Identity:
    """``name`` is for people and for the handshake; equal ``revision``s have equal content."""

    name: str
    revision: str


def identify(folder: Path) -> Identity:
    """The identity of a folder in Hugging Face layout.

    A folder that we converted says it in its manifest; a snapshot in a Hugging Face cache
    (``models--ORG--NAME/snapshots/COMMIT``) is ``ORG/NAME``, and its revision holds the commit
    beside the digest; any other folder goes by its own name and its digest. Raises DamagedModel.
    """
    repository = hub_repository(folder)
    if repository is not None:
        commit = folder.resolve().name
        return Identity(repository, f"hub:{commit}+{content_revision(folder)}")
    manifest = read_object(folder / MANIFEST_FILE, optional=True)
    name, revision = manifest.get("name"), manifest.get("revision")
    for key, value in (("name", name), ("revision", revision)):
        if value is not None and not isinstance(value, str):
            raise DamagedModel(f"{folder / MANIFEST_FILE}: {key} is not a string")
    return Identity(name or folder.resolve().name, revision or content_revision(folder))


def hub_repository(folder: Path) -> str | None:
    """``ORG/NAME`` if ``folder`` is a snapshot in a Hugging Face cache, else None."""
    snapshots, commit = folder.resolve().parent, folder.resolve().name
    kind, *parts = snapshots.parent.name.split("--")
    if snapshots.name != "snapshots" or kind != "models" or not parts:
        return None
    return "/".join(parts) if _COMMIT.fullmatch(commit) else None


def content_revision(folder: Path) -> str:
    """Identity of a folder's content: ``sha256:`` and 32 hex digits.

    Covers ``config.json`` and, of every safetensors file, the name, the size, the header and
    evenly spaced samples of each tensor: two checkpoints whose tensors differ as a whole (another
    training run, a merged adapter) differ here, without reading gigabytes at every start. It is
    no proof against an edit of a few chosen bytes.
    """
    digest = hashlib.sha256()
    digest.update(read_bytes(folder / "config.json", MAX_CONFIG_BYTES))
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name}:{file_size(file)}\n".encode(errors="surrogateescape"))
        _sample_safetensors(file, digest.update)
    return f"sha256:{digest.hexdigest()[:32]}"


def _sample_safetensors(file: Path, update: Callable[[bytes], object]) -> None:
    header = read_header(file)
    update(header.text)
    with file.open("rb") as handle:
        for span in header.tensors.values():
            step = max((span.end - span.begin) // _SAMPLES_PER_TENSOR, _SAMPLE_BYTES)
            for offset in range(span.begin, span.end, step):
                handle.seek(offset)
                update(handle.read(min(_SAMPLE_BYTES, span.end - offset)))
