"""Which block size ``cache.block_size: auto`` means: a rule over the model and the connector.

Small blocks waste little: a request leaves half of its last block empty, and finds beginnings that
end where a block does. But each block has a descriptor, a generation word, a digest and an entry in
tables and index, whatever its bytes. So the least size is taken whose blocks have so many bytes
that this costs little beside moving them; over TCP, where a block is also asked for, twice as many
as in shared memory.

Pure. A size is of one pool; that of a peer may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.kv_transfer.choosing import AUTO, SHM, TCP

SIZES = (16, 32, 64, 128)
"""What is chosen from."""

ENOUGH_BYTES = {SHM: 64 << 10, TCP: 128 << 10, AUTO: 128 << 10}  # auto may find a peer elsewhere


@dataclass(frozen=True, slots=True)
class ChosenBlockSize:
    """The result: positions per block, and one line that says how they came about."""

    block_size: int
    arithmetic: str


def auto_block_size(block_bytes: Callable[[int], int], connector: str) -> ChosenBlockSize:
    """The least of ``SIZES`` whose blocks are large enough for a connector, or the largest.

    Args:
        block_bytes: bytes of a block of so many positions.
        connector: ``auto``, ``shm`` or ``tcp``.
    """
    enough = ENOUGH_BYTES[connector]
    size = next((size for size in SIZES if block_bytes(size) >= enough), SIZES[-1])
    names = ", ".join(map(str, SIZES))
    return ChosenBlockSize(
        size,
        f"block size: {size} positions of {block_bytes(1):,} bytes (auto: the least of {names} "
        f"whose blocks have {enough:,} bytes, for connector {connector})",
    )
