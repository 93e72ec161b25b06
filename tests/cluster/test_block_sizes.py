"""What a configuration leaves open about block sizes is settled once, for all workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.cluster.block_sizes import choose_block_sizes
from kvferry.cluster.config import ConfigError, load_config
from kvferry.cluster.settings import Share, kv_dtype, worker_setting
from kvferry.engine.models.config import ModelConfig
from kvferry.engine.models.loading import kv_layout
from kvferry.kv_transfer.authentication import NO_KEY
from kvferry.worker.messages import NodeRef
from tests.engine.hub_folders import write_repository

NOWHERE = Path("nowhere")


@pytest.mark.parametrize(
    ("prefill", "decode", "unit"),
    [(16, 16, 16), (16, 4, 4), (4, 16, 4), (1, 128, 1), (12, 8, 4), (128, 128, 128)],
)
def test_hashes_are_taken_as_rarely_as_both_block_sizes_allow(
    prefill: int, decode: int, unit: int
) -> None:
    config = load_config(None, {"prefill.block_size": prefill, "decode.block_size": decode})
    sizes = choose_block_sizes(config, NOWHERE, "float32")
    assert (sizes.by_role, sizes.match_unit) == ({"prefill": prefill, "decode": decode}, unit)
    assert bool(sizes.lines) == (prefill != decode)
    for role, size in (("prefill", prefill), ("decode", decode)):
        ref = NodeRef(f"{role}-0", 1)
        setting = worker_setting(config, NOWHERE, sizes, role, ref, Share(1, 0.5), NO_KEY)
        assert (setting.block_size, setting.match_unit) == (size, unit)


def test_a_match_unit_that_is_asked_for_stands() -> None:
    config = load_config(None, {"cache.prefix_match_unit": 2, "decode.block_size": 4})
    assert choose_block_sizes(config, NOWHERE, "float32").match_unit == 2


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("models") / "tiny")


def test_auto_asks_the_model_and_says_how_it_came_about(model_folder: Path) -> None:
    """So small a model that no size below the largest is worth a descriptor."""
    config = load_config(None, {"cache.block_size": "auto", "decode.block_size": 4})
    sizes = choose_block_sizes(config, model_folder, kv_dtype(config))
    assert sizes.by_role == {"prefill": 128, "decode": 4}
    layout = kv_layout(ModelConfig.from_folder(model_folder), 1, "float32")
    assert f"block size: 128 positions of {layout.block_bytes():,} bytes" in sizes.lines[0]
    assert sizes.lines[1] == "block sizes: 128 (prefill), 4 (decode); hashes every 4 tokens"


def test_a_match_unit_that_does_not_divide_what_auto_chose_is_refused_with_both(
    model_folder: Path,
) -> None:
    config = load_config(None, {"cache.block_size": "auto", "cache.prefix_match_unit": 3})
    with pytest.raises(ConfigError, match=r"prefix_match_unit: got 3.*\(prefill 128, decode 128\)"):
        choose_block_sizes(config, model_folder, "float32")
