"""How large the tiles of attention are, and how many splits there are: data and rules, no device.

The tables in ``tuned/`` hold one file per architecture, made by ``scripts/gpu_check --tune`` on a
device of it. Where a table has no row for a kind of work, the rules below decide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files

DECODE, PREFILL = "decode", "prefill"
MAX_SPLITS = 32
PREFILL_SPLITS = 8
"""Of chunks of prompts it is this many or none: each number is a kernel that somebody waits for."""
_MIN_ROWS = 16  # of a matrix unit
_LARGE_PREFILL_ROWS = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """One way to compute attention.

    Attributes:
        rows: queries of a program, packed over the heads of a group; a power of two from 16 on.
        keys: positions of one step of its loop; a power of two from 16 on.
        num_warps, num_stages: as Triton takes them.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Work:
    """What a tile depends on.

    Attributes:
        kind: ``decode`` where every sequence has one query, else ``prefill``.
        head_dim: elements per head.
        group: query heads per KV head.
        dtype: of queries, and so of the products, as torch names it, less ``torch.``.
        kv_dtype: of the pool.
    """

    kind: str
    head_dim: int
    group: int
    dtype: str
    kv_dtype: str

    def key(self) -> str:
        """Its name in a table."""
        return f"{self.kind}/{self.head_dim}/{self.group}/{self.dtype}/{self.kv_dtype}"


def power_of_two(number: int) -> int:
    """The next power of two that is not less."""
    return 1 << max(0, number - 1).bit_length()


def tile_for(work: Work, architecture: str | None) -> Tile:
    """The tuned tile, or the rules' one. ``architecture``: ``sm_90``, ``gfx942``, …"""
    table = tuned(architecture) if architecture else {}
    is_amd = architecture is not None and architecture.startswith("gfx")
    return table.get(work.key()) or default_tile(work, is_amd)


def default_tile(work: Work, is_amd: bool = False) -> Tile:
    """Without measurements. Wide heads and wide numbers take more of the registers and the shared
    memory, so they get fewer keys and stages.
    """
    group_rows = max(_MIN_ROWS, power_of_two(work.group))
    is_wide = work.head_dim > 128
    has_scales = work.kv_dtype in ("int8", "float8_e4m3fn")  # widened in registers
    if work.dtype == "float32":
        rows = group_rows if work.kind == DECODE else max(group_rows, 32)
        keys = 16 if is_wide or has_scales else 32
        return Tile(rows, keys, num_warps=8 if is_wide else 4, num_stages=1 if is_wide else 2)
    if work.kind == DECODE:
        return Tile(group_rows, 32 if is_wide else 64, num_warps=4, num_stages=2 if is_wide else 3)
    rows = max(group_rows, _LARGE_PREFILL_ROWS)
    # Of NVIDIA's registers a thread has 255 at most, of AMD's twice that, but not in eight waves.
    num_warps = 8 if is_wide or (has_scales and not is_amd) else 4
    return Tile(rows, 32 if is_wide else 64, num_warps=num_warps, num_stages=2)


def num_splits(num_programs: int, max_context: int, keys: int, num_processors: int) -> int:
    """Into how many parts the keys of every sequence are cut: a power of two, 1 for none.

    As many as give every processor two programs, but none that has less than four tiles of keys.

    Args:
        num_programs: how many there are without splits.
        max_context: positions of a sequence at most.
        keys: positions of a tile.
        num_processors: multiprocessors of the device.
    """
    wanted = 2 * num_processors // max(1, num_programs)
    useful = max_context // (4 * keys)
    splits = min(wanted, useful, MAX_SPLITS)
    return 1 << (splits.bit_length() - 1) if splits > 1 else 1


@cache
def tuned(architecture: str) -> Mapping[str, Tile]:
    """The table of an architecture; empty where there is none."""
    place = files("kvferry.kernels.triton").joinpath("tuned", f"{architecture}.json")
    if not place.is_file():
        return {}
    rows = json.loads(place.read_text(encoding="utf-8"))["tiles"]
    return {key: Tile(**fields) for key, fields in rows.items()}


def table_json(
    architecture: str, device: str, command: str, tiles: Mapping[str, Tile]
) -> dict[str, object]:
    """A table as it is kept, with the device and the command that made it."""
    return {
        "architecture": architecture,
        "device": device,
        "command": command,
        "tiles": {key: asdict(tile) for key, tile in sorted(tiles.items())},
    }
