"""``make fuzz``: the long form of the fuzz tests; prints what became of every message."""

from __future__ import annotations

import argparse
import logging
import time
from collections import Counter
from random import Random

from tests.fuzz.arena import Arena
from tests.fuzz.handshakes import knock_at_locked_tcp, knock_at_shared_memory, knock_at_tcp

EPISODE = 250  # messages per cluster
KINDS = ("values", "bytes")


def main() -> None:
    """Read the sizes, knock and strike, print the counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--handshakes", type=int, default=10_000, help="per transport")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what is changed")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # every refusal is a warning
    began = time.monotonic()
    doors = {"shm": knock_at_shared_memory, "tcp": knock_at_tcp, "tcp, key": knock_at_locked_tcp}
    for name, knock in doors.items():
        _say(f"handshakes, {name}", options.handshakes, knock(options.handshakes, Random(1)))
    for kind in options.kinds:
        outcomes: Counter[str] = Counter()
        count = options.messages // len(options.kinds)
        for episode in range(-(-count // EPISODE)):
            seed = options.seed * 1_000_000 + episode
            try:
                arena = Arena(Random(seed))
                arena.play(EPISODE, as_bytes=kind == "bytes")
            except BaseException:
                print(f"FAILED: {kind}, seed {seed}")
                raise
            outcomes += arena.outcomes
        _say(f"messages with changed {kind}", count, outcomes)
    print(f"no crash, no leak, no state left; {time.monotonic() - began:.0f} s")


def _say(what: str, count: int, outcomes: Counter[str]) -> None:
    counts = ", ".join(f"{name} {number}" for name, number in sorted(outcomes.items()))
    print(f"{what}: {count} ({counts})", flush=True)


if __name__ == "__main__":
    main()
