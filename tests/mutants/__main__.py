"""``make mutants``: every mutant under the machine, and a line for each."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.patching import MOST_STEPS, read_mutants, try_mutant, try_seeds


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 if one survives."""
    parser = argparse.ArgumentParser(prog="make mutants")
    parser.add_argument("--steps", type=int, default=MOST_STEPS, help="of the machine, each")
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    args = parser.parse_args(arguments)
    survived = 0
    for mutant in [None, *read_mutants()]:
        if args.only and (mutant is None or mutant.name not in args.only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder).resolve()
            if mutant is None or args.seed is not None:
                found = try_mutant(place, mutant, args.steps, args.seed or 0)
            else:
                found = try_seeds(place, mutant, args.steps)
        caught = found.failed_at is not None
        survived += caught != (mutant is not None)
        name = "no patch" if mutant is None else mutant.name
        what = (
            f"seed {found.seed} step {found.failed_at}: {found.error}"
            if caught
            else f"{found.num_steps} steps"
        )
        print(f"{name:32} {what[:100]}", flush=True)
    print(f"{survived} not as wanted")
    return 1 if survived else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
