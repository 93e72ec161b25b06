"""Arrangements measured on a site: ``kvferry loadgen sweep`` from the head, over TCP."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import yaml

from tests.hosts.machines import REPOSITORY
from tests.hosts.site import CONFIG, Site

ARRANGEMENTS = "1P+1D,2P+1D,1P+2D"
LOAD = (
    *("--concurrencies", "2,8", "--num-requests", "16", "--repeats", "3", "--warm-up", "4"),
    *("--input-tokens", "192", "--output-tokens", "48", "--slo", "ttft=2,tpot=0.2"),
)


def sweep(site: Site, out: Path, html: Path) -> None:
    """Measure, with progress on standard error; what ``out`` holds is not measured again."""
    (REPOSITORY / out).parent.mkdir(parents=True, exist_ok=True)
    # Three machines and their load share this one's processors: silence there is no death.
    config = out.with_suffix(".yaml")  # the report names it, so not a folder that is gone then
    text = yaml.safe_dump({**CONFIG, "router": {"heartbeat_timeout": "15s"}})
    (REPOSITORY / config).write_text(text, encoding="utf-8")
    words = [sys.executable, "-m", "kvferry.cluster.cli", "loadgen", "sweep"]
    words += ["--arrangements", ARRANGEMENTS, *LOAD, "--config", str(config)]
    words += ["--out", str(out), "--html", str(html)]
    done = site.head.attached(words)
    assert done == 0, f"loadgen sweep ended with {done}"
    assert os.path.getsize(REPOSITORY / html)
