"""An actor that does nothing, on a Ray that runs: what every process of Ray's has, ours too.

``python -m tests.system.empty_actor ADDRESS`` prints its process id, and ends with its input.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import ray


class Empty:
    """Holds nothing."""

    def pid(self) -> int:
        """Its process."""
        return os.getpid()


def main(address: str) -> None:
    """See the module."""
    ray.init(address=address, namespace="empty", log_to_driver=False, logging_level=logging.ERROR)
    actor: Any = ray.remote(num_cpus=0)(Empty).remote()
    print(ray.get(actor.pid.remote()), flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
