"""The Triton kernels in Triton's interpreter, on CPU tensors.

The interpreter is chosen when a kernel is defined, for the whole process, so these tests have one
of their own: ``tests/kernels/test_triton.py`` starts it. By hand:

    TRITON_INTERPRET=1 python -m pytest -n0 tests/kernels/interpreted
"""

from __future__ import annotations

import os

from hypothesis import Phase, settings

# Shrinking would take minutes of interpreted kernels; the cases are small as they are.
settings.register_profile("interpreted", settings(), phases=(Phase.explicit, Phase.generate))

if os.environ.get("TRITON_INTERPRET") == "1":
    settings.load_profile("interpreted")
collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
