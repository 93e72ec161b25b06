"""Builds, checks and times everything on one GPU: see ``scripts/gpu_check``.

    python -m benchmarks.gpu [--json FILE] [--tune] [--skip-tests] [--skip-cluster]

1. The tests marked ``gpu``. 2. What the device does at best: a copy, a matrix product. 3. Attention
beside that. 4. Decode steps of a model beside the time of reading its weights and its KV once. 5. A
prefill and a decode worker that share the GPU, under load. With ``--tune`` the best tiles are
looked for first, and written into the table of the architecture. Ends with 2 where there is no GPU,
and with 1 where a test fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.resources import files
from itertools import chain
from pathlib import Path

import torch

from benchmarks.gpu.cluster import run_cluster
from benchmarks.gpu.work import Roofs, Row, table


def run_tests() -> int:
    """Exit code of the tests marked ``gpu``."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-m", "gpu", "tests"]
    return subprocess.run(command, check=False).returncode


def tune() -> Path:
    """Write the table of this device's architecture, row by row; where it lies."""
    from benchmarks.gpu.attention import tuned_tiles
    from benchmarks.gpu.timing import Timer
    from kvferry.kernels.triton.device import device_facts
    from kvferry.kernels.triton.tuning import table_json, tuned

    architecture = device_facts(torch.device("cuda", 0)).architecture
    assert architecture is not None
    place = Path(str(files("kvferry.kernels.triton").joinpath("tuned", f"{architecture}.json")))
    place.parent.mkdir(exist_ok=True)
    tiles = {}
    for key, tile in tuned_tiles(Timer(repeats=5)):
        print(f"  {key}: {tile}", flush=True)
        tiles[key] = tile
        document = table_json(
            architecture, torch.cuda.get_device_name(0), "scripts/gpu_check --tune", tiles
        )
        place.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    tuned.cache_clear()
    return place


def measure(found: Roofs, keep: Callable[[list[Row]], None]) -> list[Row]:
    """Every row, printed and kept as it comes."""
    from benchmarks.gpu.attention import measured
    from benchmarks.gpu.steps import decode_steps
    from benchmarks.gpu.timing import Timer

    rows: list[Row] = []
    for row in chain(measured(Timer(), found), decode_steps(found)):
        rows.append(row)
        keep(rows)
        print(f"  {row.what}: {row.took_s * 1e6:.0f} µs, {row.share:.2f} of the roof", flush=True)
    return rows


def measured_roofs() -> Roofs:
    """What the device does at best, printed."""
    from benchmarks.gpu.timing import Timer, roofs

    found = roofs(Timer())
    print(
        f"copy {found.copy_rate / 1e9:.0f} GB/s, bfloat16 product "
        f"{found.matrix_rate / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    return found


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    parser.add_argument("--tune", action="store_true", help="look for the best tiles first")
    parser.add_argument("--skip-tests", action="store_true", help="measure only")
    parser.add_argument("--skip-cluster", action="store_true", help="no workers that share the GPU")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing was checked", file=sys.stderr)
        return 2
    begun = time.monotonic()
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)
    code = 0 if options.skip_tests else run_tests()
    if options.tune:
        print(f"tiles are in {tune()}", flush=True)
    found = measured_roofs()
    cluster: list[str] = []

    def keep(rows: list[Row]) -> None:
        if options.json is not None:
            shown = [{**asdict(row), "share": row.share} for row in rows]
            document = {"roofs": asdict(found), "rows": shown, "cluster": cluster}
            options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    rows = measure(found, keep)
    print(table(rows))
    if not options.skip_cluster:
        torch.cuda.empty_cache()
        folder = Path("build", "gpu")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            cluster += run_cluster(folder)
        except subprocess.CalledProcessError as error:
            print(f"the cluster failed: {error}", file=sys.stderr)
            code = 1
        print("\n".join(cluster))
        keep(rows)
    print(f"{time.monotonic() - begun:.0f} s")
    return 1 if code else 0


if __name__ == "__main__":
    raise SystemExit(main())
