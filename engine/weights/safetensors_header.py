"""The header of a safetensors file and the index of a sharded checkpoint, checked before use.

Owns the format: eight bytes of length, a JSON object, then the tensors' bytes without gap or
overlap. Everything that the header announces is compared with the file's size before anything is
allocated for it. Knows neither torch nor what a tensor is for.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from kvferry.engine.models.checkpoint import file_size, parse_object, read_object, shown
from kvferry.engine.models.errors import DamagedModel

#: Where the tensors of a folder are: in one file, or in the shards that an index names.
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

#: Bits of an element, by the format's name of its type.
DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
#: The types that are read as weights.
WEIGHT_DTYPES = ("F32", "BF16", "F16")

_MAX_HEADER_BYTES = 32 << 20
_MAX_INDEX_BYTES = 32 << 20
_MAX_DIMS = 8
_MAX_SHARDS = 4096
_MAX_TENSORS = 1 << 16


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: its type by the format's name, shape, and bytes ``[begin, end)`` of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header's own bytes, and the tensors in the order of their bytes."""

    text: bytes
    tensors: dict[str, StoredTensor]


def read_header(file: Path) -> Header:
    """Read and check the header of a safetensors file. Raises DamagedModel."""
    size = file_size(file)
    try:
        with file.open("rb") as handle:
            first = handle.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise DamagedModel(
                    f"{file}: of {size} bytes, with a header of {length}: not a whole safetensors "
                    f"file (wanted a header within the file, of at most {_MAX_HEADER_BYTES} bytes)"
                )
            text = handle.read(length)
    except OSError as error:
        raise DamagedModel(f"{file}: cannot be read ({error.strerror})") from error
    entries = parse_object(text, f"{file}: header")
    entries.pop("__metadata__", None)
    if len(entries) > _MAX_TENSORS:
        raise DamagedModel(f"{file}: {len(entries)} tensors, wanted at most {_MAX_TENSORS}")
    tensors = [(name, _tensor(file, name, entry, 8 + length)) for name, entry in entries.items()]
    tensors.sort(key=lambda item: (item[1].begin, item[1].end))
    at = 8 + length
    for name, tensor in tensors:
        if tensor.begin != at:
            raise DamagedModel(
                f"{file}: tensor {shown(name)} begins at byte {tensor.begin}, wanted {at}: tensors "
                "overlap or leave a gap"
            )
        at = tensor.end
    if at != size:
        raise DamagedModel(
            f"{file}: tensors end at byte {at}, the file at {size}; it is truncated or damaged: "
            "fetch it again"
        )
    return Header(text, dict(tensors))


def _tensor(file: Path, name: str, entry: Any, base: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise DamagedModel(f"{file}: tensor {shown(name)} is {shown(entry)}, wanted an object")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise DamagedModel(f"{file}: tensor {shown(name)} has the unknown type {shown(dtype)}")
    if not _counts(shape) or len(shape) > _MAX_DIMS:
        raise DamagedModel(f"{file}: tensor {shown(name)} has the impossible shape {shown(shape)}")
    if not _counts(span) or len(span) != 2:
        raise DamagedModel(
            f"{file}: tensor {shown(name)} has data_offsets {shown(span)}, wanted two numbers"
        )
    begin, end = span
    if (end - begin) * 8 != math.prod(shape) * DTYPE_BITS[dtype]:
        raise DamagedModel(
            f"{file}: tensor {shown(name)} of shape {shown(shape)} and type {dtype} has "
            f"{shown(end - begin)} bytes, wanted {shown(math.prod(shape) * DTYPE_BITS[dtype] // 8)}"
        )
    return StoredTensor(dtype, tuple(shape), base + begin, base + end)


def _counts(value: Any) -> TypeGuard[list[int]]:
    """Whether it is a list of whole numbers of 64 bits."""
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 63 for n in value
    )


def read_index(folder: Path) -> dict[Path, list[str]]:
    """The shards that the folder's index names, each with its tensors. Raises DamagedModel."""
    path = folder / INDEX_FILE
    weight_map = read_object(path, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedModel(f"{path}: no readable weight_map ({shown(weight_map)})")
    files: dict[Path, list[str]] = {}
    for name, shard in sorted(weight_map.items()):
        if not isinstance(shard, str) or "\0" in shard or shard in ("", ".", ".."):
            raise DamagedModel(f"{path}: shard {shown(shard)} of {shown(name)} is no file's name")
        if Path(shard).name != shard:
            raise DamagedModel(f"{path}: shard {shown(shard)} lies outside the folder")
        if not shard.endswith(".safetensors"):
            raise DamagedModel(f"{path}: shard {shown(shard)} is not a .safetensors file")
        files.setdefault(folder / shard, []).append(name)
    if len(files) > _MAX_SHARDS:
        raise DamagedModel(f"{path}: {len(files)} shards, wanted at most {_MAX_SHARDS}")
    return files
