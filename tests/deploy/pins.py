"""The versions of ``constraints.txt``."""

from __future__ import annotations

import re

from tests.house.source import ROOT


def pinned(name: str) -> str:
    """The version of a package that is tested."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (version,) = re.findall(rf"^{re.escape(name)}==(\S+)$", text, re.MULTILINE)
    return str(version)
