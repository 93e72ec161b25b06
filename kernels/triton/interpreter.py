"""Whether Triton's interpreter runs the kernels, and what is different then.

TRITON_INTERPRET is Triton's own switch; it is read when a kernel is defined.
"""

from __future__ import annotations

import triton

COMPUTES_IN_FLOAT32 = bool(triton.knobs.runtime.interpret)
"""Its matrix products of bfloat16 are wrong, so tiles are widened before them."""
