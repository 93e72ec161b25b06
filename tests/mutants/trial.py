"""Runs the cache machine over whatever ``kvferry`` this process imports; prints JSON."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys

from hypothesis import Phase

import kvferry.kv_cache
from tests.engine.cache_house import CacheHouse
from tests.engine.cache_machine import run


def main(most_steps: int, seed: int) -> None:
    """Run until something does not hold, at most ``most_steps`` steps."""
    logging.disable()  # steps fail on purpose
    error = ""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            run(seed, most_steps, (Phase.generate,), most_steps)
        except Exception as caught:  # any: a broken product may raise what it likes
            error = f"{type(caught).__name__}: {caught}"
    found = {
        "package": kvferry.kv_cache.__file__,
        "num_steps": CacheHouse.num_steps,
        "failed_at": CacheHouse.failed_at,
        "error": error,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
