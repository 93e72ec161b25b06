"""How many positions a block has in the pools of each role, and how often hashes are taken.

Settles what the configuration leaves open: ``auto``, and the match unit, which must divide the size
of every pool. Reads the model's configuration where a size is ``auto``, and nothing otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from pathlib import Path

from kvferry.cluster.config import Config, ConfigError
from kvferry.cluster.config_types import AUTO_SIZE
from kvferry.engine.models.config import ModelConfig
from kvferry.engine.models.loading import kv_layout
from kvferry.worker.block_sizing import ChosenBlockSize, auto_block_size


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """What holds for a cluster.

    Attributes:
        by_role: positions per block, of each role that has workers.
        match_unit: tokens per value of a hash chain, the same for all workers.
        lines: what start-up has to say about it; nothing where all is as it was asked for.
    """

    by_role: dict[str, int]
    match_unit: int
    lines: tuple[str, ...]


def choose_block_sizes(config: Config, model_folder: Path, kv_dtype: str) -> BlockSizes:
    """Settle the block sizes. Raises ConfigError, or ModelError if the model must be asked.

    Args:
        config: the configuration, which is in order by itself.
        model_folder: folder in Hugging Face layout.
        kv_dtype: element type of the pools.
    """
    asked = config.block_sizes()
    lines: list[str] = []
    if AUTO_SIZE in asked.values():
        chosen = _choose(config, model_folder, kv_dtype)
        lines.append(chosen.arithmetic)
    by_role = {
        role: chosen.block_size if isinstance(size, str) else size for role, size in asked.items()
    }
    common = gcd(*by_role.values())
    unit = config.cache.prefix_match_unit or common
    if common % unit:
        listed = ", ".join(f"{role} {size}" for role, size in by_role.items())
        raise ConfigError(
            f"cache.prefix_match_unit: got {unit}, wanted a divisor of every block size ({listed})"
        )
    if len(set(by_role.values())) > 1:
        listed = ", ".join(f"{size} ({role})" for role, size in by_role.items())
        lines.append(f"block sizes: {listed}; hashes every {unit} tokens")
    return BlockSizes(by_role, unit, tuple(lines))


def _choose(config: Config, model_folder: Path, kv_dtype: str) -> ChosenBlockSize:
    model = ModelConfig.from_folder(model_folder)
    return auto_block_size(
        lambda size: kv_layout(model, size, kv_dtype).block_bytes(), config.transfer.connector
    )
