"""What a started worker says of itself, to whoever started it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.engine.models.config import ModelConfig
from kvferry.engine.models.size import ModelSize
from kvferry.kv_cache.layout import KVCacheLayout
from kvferry.worker.messages import Member


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """What a started worker says of itself.

    ``pool_arithmetic`` is the line that says how its number of blocks came about;
    ``kernels_warning`` why its kernels are not the ones that were hoped for; ``placement`` why it
    is where it is, for people. ``cores`` are its own on its host; none: it is not pinned.
    """

    member: Member
    pid: int
    host: str
    threads: int
    kernels: str
    isa: str | None
    connectors: tuple[str, ...]
    model: ModelConfig
    size: ModelSize
    layout: KVCacheLayout
    dtype: str
    max_model_len: int
    pool_arithmetic: str
    node_id: str | None = None
    num_restarts: int = 0
    kernels_warning: str | None = None
    placement: str = ""
    cores: tuple[int, ...] = ()
