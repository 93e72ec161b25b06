"""The GGUF container: bounds-checked reading of its metadata and its table of tensors.

Owns the file format (versions 2 and 3, little endian) and its limits: a header of ``_MAX_HEADER``
bytes, so many keys, tensors and elements of an array. Does not know what a key or a tensor means.
The ``gguf`` package gives the numbers of the types and the dequantisation; its own reader
trusts every length in the file, so a damaged one can make it spin for hours: this one cannot.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize
from numpy.typing import NDArray

from kvferry.engine.models.checkpoint import file_size, shown
from kvferry.engine.models.errors import DamagedModel, UnsupportedModel

Value: TypeAlias = "int | float | bool | str | list[Any]"

_MAGIC = b"GGUF"
_MAX_DIMS = 4
# Several times what the largest vocabularies and models take. As Python objects, metadata is about
# eight times as large as in the file.
_MAX_HEADER = 64 << 20
_MAX_ENTRIES = 1 << 16
_MAX_ELEMENTS = 1 << 22
_MAX_NAME = 512
_MAX_ALIGNMENT = 1 << 16
_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies: shape (outermost first), stored type, bytes ``[begin, end)``."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed file: metadata by key, tensors by their GGUF names, and the mapped bytes."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, GGUFTensor]
    data: NDArray[np.uint8]

    def dequantised(self, name: str) -> NDArray[np.float32]:
        """The tensor as float32, outermost dimension first. Raises UnsupportedModel."""
        tensor = self.tensors[name]
        rows = self.data[tensor.begin : tensor.end].reshape(*tensor.shape[:-1], -1)
        try:
            with np.errstate(all="ignore"):  # a scale may be infinite; that is the weights' matter
                values: NDArray[np.float32] = dequantize(rows, tensor.kind)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{self.path}: tensor {shown(name)} is stored as {tensor.kind.name}, which cannot "
                "be dequantised; use a file quantised as Q4_0, Q4_1, Q5_x, Q8_0, K-quants or F16"
            ) from error
        return values.reshape(tensor.shape)


def read_gguf(path: Path) -> GGUFFile:
    """Parse the header of ``path`` and map the rest.

    Raises DamagedModel naming the byte where the file stops making sense, UnsupportedModel for
    versions and byte orders that are not read.
    """
    file_size(path)
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise DamagedModel(f"{path}: cannot be mapped ({error})") from error
    try:
        return _parse(path, data)
    except UnicodeDecodeError as error:
        raise DamagedModel(f"{path}: a string is not UTF-8 ({error})") from error


def _parse(path: Path, data: NDArray[np.uint8]) -> GGUFFile:
    cursor = _Cursor(path, data)
    if cursor.take(4) != _MAGIC:
        raise DamagedModel(f"{path}: does not begin with {_MAGIC!r}; not a GGUF file")
    version = cursor.unpack("<I")
    if version not in (2, 3):
        raise UnsupportedModel(f"{path}: GGUF version {version}, wanted 2 or 3, little endian")
    num_tensors = cursor.count("tensors", _MAX_ENTRIES)
    num_keys = cursor.count("keys", _MAX_ENTRIES)
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = cursor.string(_MAX_NAME)
        if key in metadata:
            raise cursor.damage(f"key {shown(key)} stands twice")
        metadata[key] = _value(cursor, _kind(cursor))
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    if metadata.get("split.count", 1) != 1:
        raise UnsupportedModel(
            f"{path}: one part of {shown(metadata['split.count'])}; wanted a whole model in one "
            "file: merge the parts first"
        )
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT or alignment % 8:
        raise cursor.damage(
            f"general.alignment is {shown(alignment)}, wanted a multiple of 8 up to "
            f"{_MAX_ALIGNMENT}"
        )
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise cursor.damage(f"tensor {shown(name)} stands twice")
        tensors[name] = _place(cursor, name, shape, kind, base + offset)
    _refuse_overlap(path, tensors)
    return GGUFFile(path, metadata, tensors, data)


def _value(cursor: _Cursor, kind: GGUFValueType) -> Value:
    if kind is GGUFValueType.STRING:
        return cursor.string()
    if kind is not GGUFValueType.ARRAY:
        item: Value = cursor.scalars(_SCALARS[kind], 1)[0]
        return item
    element = _kind(cursor)
    if element is GGUFValueType.ARRAY:
        raise cursor.damage("an array of arrays")
    if element is GGUFValueType.STRING:
        return [cursor.string() for _ in range(cursor.count("elements", _MAX_ELEMENTS))]
    return cursor.scalars(_SCALARS[element], cursor.count("elements", _MAX_ELEMENTS))


def _kind(cursor: _Cursor) -> GGUFValueType:
    number = cursor.unpack("<I")
    try:
        return GGUFValueType(number)
    except ValueError as error:
        raise cursor.damage(f"value type {number} does not exist") from error


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = cursor.string(_MAX_NAME)
    num_dims = cursor.unpack("<I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.damage(
            f"tensor {shown(name)} has {num_dims} dimensions, wanted 1 to {_MAX_DIMS}"
        )
    innermost_first = [cursor.unpack("<Q") for _ in range(num_dims)]
    number = cursor.unpack("<I")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise UnsupportedModel(
            f"{cursor.path}: tensor {shown(name)} has storage type {number}, unknown to the "
            "installed gguf package"
        ) from error
    return name, tuple(reversed(innermost_first)), kind, cursor.unpack("<Q")


def _place(
    cursor: _Cursor, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, begin: int
) -> GGUFTensor:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % block:
        raise cursor.damage(f"tensor {shown(name)}: shape {shape} is impossible for {kind.name}")
    end = begin + math.prod(shape) // block * block_bytes
    if end > cursor.size:
        raise DamagedModel(
            f"{cursor.path}: tensor {shown(name)} ends at byte {end}, but the file has "
            f"{cursor.size}; it is truncated: fetch it again"
        )
    return GGUFTensor(shape, kind, begin, end)


def _refuse_overlap(path: Path, tensors: dict[str, GGUFTensor]) -> None:
    """A file whose tensors share bytes would be written out many times as large as it is."""
    at, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
        if tensor.begin < at:
            raise DamagedModel(f"{path}: tensors {shown(before)} and {shown(name)} overlap")
        at, before = tensor.end, name


class _Cursor:
    """A position in the mapped header; every step is checked against what is left of it.

    Whatever a count announces, each entry takes bytes: reading ends with the header's limit or the
    file at the latest.
    """

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self.path = path
        self.at = 0
        self.size = len(data)
        self._view = data.data

    def damage(self, what: str) -> DamagedModel:
        return DamagedModel(f"{self.path}: damaged near byte {self.at}: {what}")

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self.size - self.at:
            raise self.damage(
                f"{num_bytes} bytes wanted, {self.size - self.at} left; the file is truncated"
            )
        if num_bytes > _MAX_HEADER - self.at:
            raise self.damage(f"the header is larger than {_MAX_HEADER} bytes")
        self.at += num_bytes
        return bytes(self._view[self.at - num_bytes : self.at])

    def unpack(self, code: str) -> int:
        value: int = struct.unpack(code, self.take(struct.calcsize(code)))[0]
        return value

    def count(self, what: str, limit: int) -> int:
        number = self.unpack("<Q")
        if number > limit:
            raise self.damage(f"{number} {what}, wanted at most {limit}")
        return number

    def string(self, limit: int = _MAX_HEADER) -> str:
        length = self.unpack("<Q")
        if length > limit:
            raise self.damage(f"a string of {length} bytes, wanted at most {limit}")
        return self.take(length).decode("utf-8")

    def scalars(self, code: str, number: int) -> list[Any]:
        dtype = np.dtype(code)
        values: list[Any] = np.frombuffer(self.take(number * dtype.itemsize), dtype).tolist()
        return values
