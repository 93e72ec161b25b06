"""Every storage type that the gguf package can read comes out as it reads it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import _type_traits
from numpy.typing import NDArray

from kvferry.engine.models.errors import UnsupportedModel
from kvferry.engine.weights.gguf_file import read_gguf

READABLE = sorted({*_type_traits, GGMLQuantizationType.F32, GGMLQuantizationType.F16})
OTHERS = sorted(set(GGMLQuantizationType) - set(READABLE))
ROWS, COLUMNS = 3, 512


def stored(kind: GGMLQuantizationType) -> NDArray[np.uint8]:
    """Rows of the type: quantised where the package can, else random bytes."""
    random = np.random.default_rng(int(kind))
    block, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        packed = quantize(random.standard_normal((ROWS, COLUMNS), np.float32), kind)
    except NotImplementedError:
        shape = (ROWS, COLUMNS // block * block_bytes)
        packed = random.integers(0, 256, shape, dtype=np.uint8)
    return np.ascontiguousarray(packed).view(np.uint8)


def write(path: Path, kind: GGMLQuantizationType) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("first", np.ones(7, np.float32))
    writer.add_tensor("t", stored(kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_package_reads_what_models_are_made_of() -> None:
    names = {kind.name for kind in READABLE}
    assert names >= {"F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"}


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_a_readable_type_is_dequantised_as_the_package_does(
    kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    write(tmp_path / "m.gguf", kind)
    found = read_gguf(tmp_path / "m.gguf").dequantised("t")
    (theirs,) = (t for t in GGUFReader(tmp_path / "m.gguf").tensors if t.name == "t")
    with np.errstate(all="ignore"):
        wanted = dequantize(np.asarray(theirs.data), kind)
    assert found.dtype == np.float32
    assert found.shape == (ROWS, COLUMNS)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.name)
def test_another_type_is_refused_by_its_name(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", kind)
    with pytest.raises(UnsupportedModel, match=f"stored as {kind.name},"):
        read_gguf(tmp_path / "m.gguf").dequantised("t")
