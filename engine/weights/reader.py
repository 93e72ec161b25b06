"""Memory-mapped reading of safetensors: one file, or shards named by an index.

Owns finding a tensor and mapping its bytes; does not know what a tensor is for. Tensors are views
of a private mapping: pages are shared between processes through the page cache, nothing is read
before it is used.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from kvferry.engine.models.errors import DamagedModel, ModelError, UnsupportedModel
from kvferry.engine.weights.safetensors_header import (
    INDEX_FILE,
    SINGLE_FILE,
    WEIGHT_DTYPES,
    StoredTensor,
    read_header,
    read_index,
)


class MissingTensor(ModelError):
    """The checkpoint has no tensor of this name; names near ones."""


class WeightReader:
    """The tensors of one checkpoint by name. Files are opened, and checked, at the start.

    ``files`` maps each file to the names expected in it, or to None for all that it holds.
    """

    def __init__(self, files: dict[Path, list[str] | None]) -> None:
        self._owner: dict[str, Any] = {}
        self._files: dict[str, Path] = {}
        self._stored: dict[str, StoredTensor] = {}
        self._handles: list[Any] = []
        for path, wanted in files.items():
            held = read_header(path).tensors
            handle = _open(path)
            self._handles.append(handle)
            for name in sorted(held) if wanted is None else wanted:
                if name not in held:
                    raise DamagedModel(f"{path}: the index names tensor {name!r}, not held here")
                self._owner[name] = handle
                self._files[name] = path
                self._stored[name] = held[name]

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._owner)

    def __contains__(self, name: object) -> bool:
        return name in self._owner

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor on the CPU in its stored dtype, a view of the mapped file where possible.

        Do not write into it: clone first. Raises MissingTensor, UnsupportedModel for a type that
        is no weight's (integers, eight-bit floats), or DamagedModel if its bytes cannot be read.
        """
        if name not in self._owner:
            raise MissingTensor(f"no tensor {name!r} in the checkpoint; {self._hint(name)}")
        dtype = self._stored[name].dtype
        if dtype not in WEIGHT_DTYPES:
            raise UnsupportedModel(
                f"{self._files[name]}: tensor {name!r} is stored as {dtype}, wanted one of "
                f"{', '.join(WEIGHT_DTYPES)}; use a checkpoint that is not quantised"
            )
        try:
            tensor: torch.Tensor = self._owner[name].get_tensor(name)
        except (SafetensorError, RuntimeError, ValueError) as error:
            raise DamagedModel(f"{self._files[name]}: tensor {name!r}: {error}") from error
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, without touching its bytes. Raises MissingTensor."""
        if name not in self._owner:
            raise MissingTensor(f"no tensor {name!r} in the checkpoint; {self._hint(name)}")
        return self._stored[name].shape

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
    if os.path.lexists(root / INDEX_FILE):
        return WeightReader(dict(read_index(root)))
    if os.path.lexists(root / SINGLE_FILE):
        return WeightReader({root / SINGLE_FILE: None})
    raise DamagedModel(f"{root}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise DamagedModel(f"{path}: not a whole safetensors file ({error})") from error
