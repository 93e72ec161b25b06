"""Memory-mapped reading of safetensors: one file, or shards named by an index.

Owns finding a tensor and mapping its bytes; does not know what a tensor is for. Tensors are views
of a private mapping: pages are shared between processes through the page cache, nothing is read
before it is used.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from kvferry.engine.models.config import DamagedModel, ModelError
from kvferry.engine.weights.files import INDEX_FILE, SINGLE_FILE


class MissingTensor(ModelError):
    """The checkpoint has no tensor of this name; names near ones."""


class WeightReader:
    """The tensors of one checkpoint by name. Files are opened, and checked, at the start.

    ``files`` maps each file to the names expected in it, or to None for all that it holds.
    """

    def __init__(self, files: dict[Path, list[str] | None]) -> None:
        self._owner: dict[str, Any] = {}
        self._files: dict[str, Path] = {}
        self._handles: list[Any] = []
        for path, wanted in files.items():
            handle = _open(path)
            self._handles.append(handle)
            held = set(handle.keys())
            for name in sorted(held) if wanted is None else wanted:
                if name not in held:
                    raise DamagedModel(f"{path}: the index names tensor {name!r}, not held here")
                self._owner[name] = handle
                self._files[name] = path

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._owner)

    def __contains__(self, name: object) -> bool:
        return name in self._owner

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor on the CPU in its stored dtype, a view of the mapped file where possible.

        Do not write into it: clone first. Raises MissingTensor, or DamagedModel if its bytes
        cannot be read.
        """
        if name not in self._owner:
            raise MissingTensor(f"no tensor {name!r} in the checkpoint; {self._hint(name)}")
        try:
            tensor: torch.Tensor = self._owner[name].get_tensor(name)
        except (SafetensorError, RuntimeError, ValueError) as error:
            raise DamagedModel(f"{self._files[name]}: tensor {name!r}: {error}") from error
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, without touching its bytes. Raises MissingTensor."""
        if name not in self._owner:
            raise MissingTensor(f"no tensor {name!r} in the checkpoint; {self._hint(name)}")
        return tuple(self._owner[name].get_slice(name).get_shape())

    def close(self) -> None:
        """Forget the files; tensors already given out stay valid. Idempotent."""
        self._owner.clear()
        self._handles.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _hint(self, name: str) -> str:
        if not self._owner:
            return "it holds none"
        tail = name.rsplit(".", 2)[-2:]
        near = [n for n in self.names() if n.rsplit(".", 2)[-2:] == tail] or self.names()
        return f"it holds {len(self._owner)} tensors, among them {', '.join(near[:3])}"


def open_weights(folder: str | Path) -> WeightReader:
    """Open the checkpoint in ``folder``: ``model.safetensors`` or a sharded index.

    Raises DamagedModel for files that are missing, truncated or malformed.
    """
    root = Path(folder)
    if (root / INDEX_FILE).exists():
        return WeightReader(_read_index(root))
    if (root / SINGLE_FILE).exists():
        return WeightReader({root / SINGLE_FILE: None})
    raise DamagedModel(f"{root}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise DamagedModel(f"{path}: not a whole safetensors file ({error})") from error


def _read_index(root: Path) -> dict[Path, list[str] | None]:
    path = root / INDEX_FILE
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        pairs = [(str(name), str(shard)) for name, shard in weight_map.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedModel(f"{path}: no readable weight_map ({error!r})") from error
    files: dict[Path, list[str] | None] = {}
    for name, shard in sorted(pairs):
        if Path(shard).name != shard:
            raise DamagedModel(f"{path}: shard {shard!r} lies outside the folder")
        names = files.setdefault(root / shard, [])
        if names is not None:
            names.append(name)
    return files
