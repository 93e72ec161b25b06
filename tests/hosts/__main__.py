"""``make hosts``: a cluster on three machines of namespaces, tried and broken; prints figures.

With ``--sweep`` arrangements are measured there instead, and the report is kept.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.hosts import drill
from tests.hosts.machines import why_not
from tests.hosts.site import Site
from tests.hosts.sweep import sweep


def tell(step: str, figures: dict[str, Any]) -> None:
    print(f"{step}: {json.dumps(figures)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make hosts", description=__doc__)
    parser.add_argument(
        "--sweep", action="store_true", help="measure 1P+1D, 2P+1D and 1P+2D over TCP"
    )
    parser.add_argument(
        "--html", type=Path, default=Path("docs/experiments/hosts.html"), help="the sweep's report"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/hosts-sweep.json"), help="the sweep's document"
    )
    args = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or nothing would be put away
    began = time.monotonic()
    with Site() as site:
        if args.sweep:
            site.up()
            sweep(site, args.out, args.html)
        else:
            every_step(site)
    tell("all", {"duration_s": time.monotonic() - began})
    return 0


def every_step(site: Site) -> None:
    load = drill.Load()
    tell("ray up to first token", drill.up_to_first_token(site, site.up))
    tell("placement", drill.where_everything_is(site))
    reference = drill.undisturbed(site, load)
    two = site.lan.machines["two"]
    tell("link cut", drill.broken(site, "cut", load, reference, two.cut))
    tell("link mended", drill.mended(site))
    tell("scale", drill.scaled(site))
    tell("machine lost", drill.broken(site, "lost", load, reference, two.switch_off))
    del site.lan.machines["two"]
    tell("load", drill.loaded(site))
    drill.taken_down(site)
    tell("ray down", drill.ray_down(site))


if __name__ == "__main__":
    sys.exit(main())
