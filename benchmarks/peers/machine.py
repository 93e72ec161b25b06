"""Whether the machine was the same before and after a run: a fixed product and a fixed read.

    python -m benchmarks.peers.machine THREADS

prints both as JSON. Runs in a process of its own, so that the load generator has no threads of
torch's and none of the memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

GEMM_SIZE = 2048
READ_BYTES = 512 << 20
BUDGET_S = 2.0  # of each
LIMIT = 0.15
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """Operations per second of a float32 product, and bytes per second of reading memory once."""

    gemm_flops: float
    read_bytes_per_s: float

    def __str__(self) -> str:
        return f"{self.gemm_flops / 1e9:.0f} GFLOP/s and {self.read_bytes_per_s / 1e9:.1f} GB/s"

    def differs(self, other: MachineSpeed) -> bool:
        """Whether one of the two is more than ``LIMIT`` slower on either side."""
        pairs = (
            (self.gemm_flops, other.gemm_flops),
            (self.read_bytes_per_s, other.read_bytes_per_s),
        )
        return any(min(pair) < (1 - LIMIT) * max(pair) for pair in pairs)


def measure(num_threads: int) -> MachineSpeed:
    """What the machine does now with so many threads."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers.machine", str(num_threads)],
        env={**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(num_threads)},
        stdout=subprocess.PIPE,
        timeout=TIMEOUT_S,
        check=True,
    )
    return MachineSpeed(**json.loads(done.stdout))


def main(num_threads: int) -> None:
    """Measure in this process and print."""
    from kvferry.cluster.bench import machine  # loads torch

    with machine.threads(num_threads):
        speed = {
            "gemm_flops": machine.gemm_rate(GEMM_SIZE, BUDGET_S),
            "read_bytes_per_s": machine.read_bandwidth(READ_BYTES, BUDGET_S),
        }
    print(json.dumps(speed))


if __name__ == "__main__":
    main(int(sys.argv[1]))
