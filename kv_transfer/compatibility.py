"""Whether one worker's blocks may be copied into another's pool, decided before any block moves.

Pure: compares two descriptions. What differs is refused by name, but for the block size: between
pools whose blocks differ in nothing else, slots are put where their positions belong (``targets``).
The match unit must be one, or no chain value of the one would be one of the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from kvferry.kv_cache.layout import MAX_BLOCK_SIZE, KVCacheLayout, KVGroup
from kvferry.kv_transfer.connector import IncompatiblePeer, PeerInfo, TransferFailed
from kvferry.kv_transfer.memory import PoolMemory

Difference = tuple[str, object, object]  # field, the peer's value, our value


class LayoutMismatch(TransferFailed):
    """A pool's memory does not have the shape that its layout asks for; names both sizes."""


def check_compatible(ours: PeerInfo, theirs: PeerInfo, *, same_host: bool = True) -> None:
    """Raise IncompatiblePeer, naming each differing field and both values, unless blocks fit.

    ``same_host`` is whether the transport needs both workers on one host.
    """
    differences = list(_differences(ours, theirs, same_host))
    if differences:
        listed = "; ".join(
            f"{name} is {there!r} there, {here!r} here" for name, there, here in differences
        )
        raise IncompatiblePeer(
            f"worker {theirs.worker_id} (epoch {theirs.epoch}) cannot be read by worker "
            f"{ours.worker_id} (epoch {ours.epoch}): {listed}. Start both with the same values"
        )


def check_memory(memory: PoolMemory, layout: KVCacheLayout) -> None:
    """Raise LayoutMismatch unless a block of ``memory`` has the bytes of a block of ``layout``."""
    wanted = layout.block_bytes()
    if memory.block_bytes != wanted:
        raise LayoutMismatch(
            f"the pool's blocks have {memory.block_bytes} bytes, the layout wants {wanted}: "
            "allocate the pool with layout.block_bytes()"
        )


def check_identity(wanted: PeerInfo, found: PeerInfo) -> None:
    """Raise TransferFailed unless the source found is the life of the worker that was meant."""
    if (found.worker_id, found.epoch) != (wanted.worker_id, wanted.epoch):
        raise TransferFailed(
            f"the source at {wanted.address} is worker {found.worker_id} (epoch {found.epoch}), "
            f"wanted {wanted.worker_id} (epoch {wanted.epoch}): ask membership for its successor"
        )


def _differences(ours: PeerInfo, theirs: PeerInfo, same_host: bool) -> Iterator[Difference]:
    for name in ("connector", "host_id", "model") if same_host else ("connector", "model"):
        yield from _compare(name, getattr(theirs, name), getattr(ours, name))
    if not _can_reblock(ours.layout, theirs.layout):
        yield from _compare("block_size", theirs.layout.block_size, ours.layout.block_size)
    yield from _compare("match_unit", match_unit(theirs), match_unit(ours))
    for name in ("rank", "num_ranks"):
        yield from _compare(name, getattr(theirs.layout, name), getattr(ours.layout, name))
    their_groups, our_groups = theirs.layout.groups, ours.layout.groups
    yield from _compare("number of KV groups", len(their_groups), len(our_groups))
    for index, (there, here) in enumerate(zip(their_groups, our_groups, strict=False)):
        for field in fields(KVGroup):
            yield from _compare(
                f"groups[{index}].{field.name}",
                _group_value(there, field.name),
                _group_value(here, field.name),
            )


def match_unit(info: PeerInfo) -> int:
    """Tokens per value of a worker's hash chains."""
    return info.match_unit or info.layout.block_size


def _can_reblock(ours: KVCacheLayout, theirs: KVCacheLayout) -> bool:
    """Whether slots of the one pool's blocks can be put into those of the other's."""
    one_group = len(ours.groups) == len(theirs.groups) == 1
    return one_group and 1 <= theirs.block_size <= MAX_BLOCK_SIZE


def _compare(name: str, there: object, here: object) -> Iterator[Difference]:
    if there != here:
        yield name, there, here


def _group_value(group: KVGroup, name: str) -> object:
    """A field of ``group``; the model's heads are spelt out where the group leaves them implied."""
    if name == "total_kv_heads" and group.total_kv_heads == 0:
        return group.num_kv_heads
    value: object = getattr(group, name)
    return value
