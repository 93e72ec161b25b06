"""Whether Triton's interpreter runs the kernels, and what is different then.

TRITON_INTERPRET is Triton's own switch; it is read when a kernel is defined.
"""

from __future__ import annotations

import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Its matrix products of bfloat16 are wrong, so tiles are widened before them; and it cuts float32
off to bfloat16, so numbers are rounded before that."""
