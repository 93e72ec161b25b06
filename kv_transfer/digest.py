"""The digest that a reader checks a received block with.

It guards against damage, not against a forger: block identity across tenants rests on the hash
chain of ``kv_cache``, not on this.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray


def block_digest(buffer: bytes | NDArray[np.uint8]) -> int:
    """64-bit XXH3 of the bytes of ``buffer`` (C-contiguous); releases the GIL while it computes."""
    view = buffer.data if isinstance(buffer, np.ndarray) else buffer
    return xxhash.xxh3_64_intdigest(view)
