"""One prefill and one decode worker that share a GPU, measured with the load generator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CONFIG = """\
prefill: {replicas: 1, device: cuda, gpus: 0.5}
decode: {replicas: 1, device: cuda, gpus: 0.5}
cache: {memory: 4GiB}
"""
LOAD = (
    "--input-tokens 512 --output-tokens 128 --concurrency 32 --num-requests 128 --warm-up 32 "
    "--repeats 3 --slo ttft=0.5,tpot=0.02"
)


def sweep_command(folder: Path) -> list[str]:
    """The sweep of one point, which starts the cluster and ends it."""
    own = ["loadgen", "sweep", "--arrangements", "1P+1D"]
    files = ["--config", str(folder / "gpu.yaml"), "--out", str(folder / "cluster.json")]
    return [sys.executable, "-m", "kvferry.cluster.cli", *own, *files, *LOAD.split()]


def run_cluster(folder: Path) -> list[str]:
    """Lines for people: what the sweep found. Raises CalledProcessError where it failed."""
    (folder / "gpu.yaml").write_text(CONFIG, encoding="utf-8")
    document = folder / "cluster.json"
    document.unlink(missing_ok=True)
    subprocess.run(sweep_command(folder), check=True)
    return summary(json.loads(document.read_text(encoding="utf-8")))


def summary(document: dict[str, Any]) -> list[str]:
    """The figures of the sweep's points."""
    lines = []
    for point in document["points"]:
        results = point["run"]["results"]
        lines.append(
            f"{point['label']}: {results['output_tokens_per_s']:.0f} output tokens/s, "
            f"TTFT {results['ttft_s']['p50'] * 1000:.1f} ms, "
            f"TPOT {results['tpot_s']['p50'] * 1000:.2f} ms at the median"
        )
    return lines
