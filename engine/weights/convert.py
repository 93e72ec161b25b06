"""Converts a GGUF file into a folder in Hugging Face layout, tensor by tensor.

Owns the files written and their order. Knows neither caches nor locks: it writes into an empty
folder that it is given, and the same file gives the same bytes every time. Memory stays at one
tensor.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.models.config import ModelConfig
from kvferry.engine.models.errors import DamagedModel
from kvferry.engine.models.identity import MANIFEST_FILE
from kvferry.engine.models.tensors import check_names, tensor_shapes
from kvferry.engine.weights.files import Progress, flush, write_bytes
from kvferry.engine.weights.gguf_reader import open_gguf
from kvferry.engine.weights.gguf_tokenizer import build_tokenizer, tokenizer_config
from kvferry.engine.weights.safetensors_header import SINGLE_FILE

#: Raised when the same source gives other files, so that older conversions are made again.
CONVERTER_VERSION = 2

_HEADER_ALIGNMENT = 64


def convert_gguf(
    source: Path, target: Path, name: str, origin: Mapping[str, Any], progress: Progress
) -> None:
    """Write ``source`` as a Hugging Face folder into ``target``, an existing empty folder.

    ``origin`` goes into the manifest and must hold ``gguf_sha256``. Everything that can be
    refused is refused before the weights are written. All files are flushed to disk.
    """
    model = open_gguf(source)
    config = model.config()
    revision = model_revision(str(origin["gguf_sha256"]))
    parsed = ModelConfig.from_dict(config, model.generation_config(), name=name, revision=revision)
    check_names(parsed, model.tensor_names())
    missing = sorted(tensor_shapes(parsed).keys() - set(model.tensor_names()))
    if missing:
        raise DamagedModel(f"{source}: has no tensor for {missing[0]}, one of {len(missing)}")
    tokenizer = build_tokenizer(model)
    described = tokenizer_config(model)
    manifest = {
        "name": name,
        "revision": revision,
        "converter_version": CONVERTER_VERSION,
        **origin,
    }
    write_bytes(target / "config.json", _json(config))
    write_bytes(target / "generation_config.json", _json(model.generation_config()))
    write_bytes(target / "tokenizer.json", tokenizer.to_str().encode())
    write_bytes(target / "tokenizer_config.json", _json(described))
    if model.chat_template is not None:
        write_bytes(target / "chat_template.jinja", model.chat_template.encode())
    write_safetensors(
        target / SINGLE_FILE,
        {tensor: model.tensor_shape(tensor) for tensor in sorted(model.tensor_names())},
        model.tensor,
        lambda done, total: progress("convert", done, total),
    )
    write_bytes(target / MANIFEST_FILE, _json(manifest))


def model_revision(gguf_sha256: str) -> str:
    """Identity of a converted model: its source's digest and the converter's version."""
    return f"gguf:{gguf_sha256[:32]}.{CONVERTER_VERSION}"


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensor: Callable[[str], NDArray[np.float32]],
    progress: Callable[[int, int], None],
) -> None:
    """Write float32 tensors in the order of ``shapes``, asking for one at a time.

    ``progress`` gets (bytes written, bytes in all). The file is flushed to disk.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for name, shape in shapes.items():
        end = total + math.prod(shape) * 4
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [total, end]}
        total = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_ALIGNMENT)
    with path.open("wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        done = 0
        progress(done, total)
        for name in shapes:
            values = tensor(name)
            handle.write(values.astype("<f4", copy=False).data)
            done += values.nbytes
            progress(done, total)
        flush(handle)


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
