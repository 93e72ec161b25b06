"""Tiny repositories as folders, laid by hand into a cache as ``huggingface_hub`` lays it."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file, save_file

from kvferry.engine.weights.convert import convert_gguf
from kvferry.engine.weights.files import no_progress
from tests.engine.tiny_gguf import write_tiny_gguf

REPOSITORY = "tiny-org/Tiny.Llama-1"
COMMIT = hashlib.sha1(b"first").hexdigest()
OTHER_COMMIT = hashlib.sha1(b"second").hexdigest()
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_repository(folder: Path, seed: int = 0, sharded: bool = False) -> Path:
    """A whole model as its owner would publish it, beside files that nobody should ask for."""
    folder.mkdir(parents=True)
    with TemporaryDirectory() as scratch:
        gguf = Path(scratch) / "tiny.gguf"
        write_tiny_gguf(gguf, seed)
        convert_gguf(gguf, folder, "tiny", {"gguf_sha256": "0" * 64}, no_progress)
    (folder / "kvferry-manifest.json").unlink()
    if sharded:
        tensors = load_file(folder / "model.safetensors")
        names = sorted(tensors)
        parts = dict(zip(SHARDS, (names[::2], names[1::2]), strict=True))
        for file, part in parts.items():
            save_file({name: tensors[name] for name in part}, folder / file)
        weight_map = {name: file for file, part in parts.items() for name in part}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        (folder / "model.safetensors").unlink()
    (folder / "modeling_tiny.py").write_text("raise SystemExit('code of a checkpoint ran')")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04 a pickle")
    (folder / "README.md").write_text("tiny")
    return folder


def lay_cache(
    hub_home: Path,
    source: Path,
    commit: str = COMMIT,
    ref: str | None = "main",
    repository: str = REPOSITORY,
) -> Path:
    """Lay a folder into ``hub_home/hub`` as one commit; returns the snapshot."""
    base = hub_home / "hub" / f"models--{repository.replace('/', '--')}"
    snapshot = base / "snapshots" / commit
    for folder in (base / "blobs", base / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.suffix in (".py", ".bin", ".md"):
            continue
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copyfile(file, base / "blobs" / digest)
        (snapshot / file.name).symlink_to(Path("../../blobs") / digest)
    if ref is not None:
        path = base / "refs" / ref
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)
    return snapshot


RESOLVE = [sys.executable, "-m", "tests.engine.hub_process"]
