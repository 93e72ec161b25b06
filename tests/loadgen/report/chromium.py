"""Opens a page in headless Chromium, where it is installed.

``KVFERRY_REQUIRE_CHROMIUM=1`` makes a missing browser a failure, not a skip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

WITHIN_S = 180.0
_QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb"),
    "--disable-features=NetworkTimeServiceQuerying",
)


@dataclass(frozen=True, slots=True)
class Opened:
    """A page as the browser saw it: what its console said, refused requests among it."""

    console: list[str]
    screenshot: Path


def chromium() -> str:
    """The browser's path; skips or fails the test where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        why = "headless Chromium is not installed (Debian's package chromium)"
        if os.environ.get("KVFERRY_REQUIRE_CHROMIUM") == "1":
            pytest.fail(why)
        pytest.skip(why)
    return found


def open_page(page: Path, folder: Path, width: int = 1200, height: int = 1800) -> Opened:
    """Load ``page`` from its file and take a screenshot."""
    screenshot = folder / "page.png"
    done = subprocess.run(
        [
            *(chromium(), *_QUIET, f"--user-data-dir={folder / 'profile'}"),
            *(f"--window-size={width},{height}", f"--screenshot={screenshot}"),
            *("--enable-logging=stderr", "--v=0"),
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Opened(console, screenshot)
