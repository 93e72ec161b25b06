from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvferry.engine.models.errors import DamagedModel
from kvferry.engine.weights.reader import MissingTensor, open_weights

TENSORS = {
    "model.layers.0.mlp.up_proj.weight": torch.arange(12.0).reshape(3, 4),
    "model.norm.weight": torch.arange(4).to(torch.bfloat16),
    "half": torch.ones(2, 2, dtype=torch.float16),
}
SHARDS = {"model-1.safetensors": ["half"], "model-2.safetensors": sorted(set(TENSORS) - {"half"})}


def single(folder: Path) -> Path:
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def sharded(folder: Path) -> Path:
    for file, names in SHARDS.items():
        save_file({name: TENSORS[name] for name in names}, folder / file)
    write_index(folder, {name: file for file, names in SHARDS.items() for name in names})
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize("write", [single, sharded])
def test_every_tensor_is_read_as_it_was_written(write: object, tmp_path: Path) -> None:
    folder = single(tmp_path) if write is single else sharded(tmp_path)
    with open_weights(folder) as weights:
        assert weights.names() == sorted(TENSORS)
        for name, values in TENSORS.items():
            assert name in weights
            assert weights.shape(name) == tuple(values.shape)
            assert weights.tensor(name).dtype == values.dtype
            assert torch.equal(weights.tensor(name), values)


def test_tensors_are_views_of_one_mapping_and_outlive_the_reader(tmp_path: Path) -> None:
    with open_weights(single(tmp_path)) as weights:
        first = weights.tensor("half")
        again = weights.tensor("half")
    assert first.data_ptr() == again.data_ptr(), "each read made a copy"
    assert torch.equal(first, TENSORS["half"])


def test_a_missing_tensor_is_named_with_its_like(tmp_path: Path) -> None:
    with open_weights(single(tmp_path)) as weights:
        with pytest.raises(MissingTensor, match=r"layers\.7\.mlp.*layers\.0\.mlp\.up_proj"):
            weights.tensor("model.layers.7.mlp.up_proj.weight")
        with pytest.raises(MissingTensor):
            weights.shape("nothing")


@pytest.mark.parametrize("length", [0, 4, 30, -1])
def test_a_truncated_file_is_refused_when_opened(length: int, tmp_path: Path) -> None:
    file = single(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(DamagedModel, match=r"model\.safetensors"):
        open_weights(tmp_path)


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"PK" + bytes(range(256)))
    with pytest.raises(DamagedModel, match=r"model\.safetensors"):
        open_weights(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DamagedModel, match=r"model\.safetensors"):
        open_weights(tmp_path)


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-1.safetensors").unlink()
    with pytest.raises(DamagedModel, match=r"model-1\.safetensors"):
        open_weights(tmp_path)


def test_a_tensor_that_its_shard_does_not_hold_is_named(tmp_path: Path) -> None:
    write_index(sharded(tmp_path), {"absent": "model-1.safetensors"})
    with pytest.raises(DamagedModel, match="absent"):
        open_weights(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [1], {"a": "../model-1.safetensors"}])
def test_a_malformed_index_is_refused(weight_map: object, tmp_path: Path) -> None:
    write_index(sharded(tmp_path), weight_map)
    with pytest.raises(DamagedModel, match=r"index\.json"):
        open_weights(tmp_path)
