"""The GPU's kernels take what the device's runner gives them, padding included."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("triton") is None or find_spec("kvferry.kernels.triton") is None,
    reason="needs triton and the kernels written in it",
)
def test_the_runner_computes_the_cpu_s_tokens_with_interpreted_gpu_kernels() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.engine.device.interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
