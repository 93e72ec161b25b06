"""Rows as Markdown or JSON, and their place in ``docs/models.md``."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from tests.house.source import ROOT
from tests.parity.measure import LENGTHS, NUM_TOKENS
from tests.parity.subjects import Likelihood, Row

BEGIN, END = "<!-- parity: begin -->", "<!-- parity: end -->"
_BLOCK = re.compile(f"{re.escape(BEGIN)}\n(.*?)\n?{re.escape(END)}", re.DOTALL)


def markdown(rows: Sequence[Row], likelihoods: Sequence[Likelihood]) -> str:
    """Both tables and where they come from."""
    lines = [
        f"{len(LENGTHS)} prompts × {NUM_TOKENS} greedy tokens per model, float32.",
        "",
        "| model | max abs Δ logit | largest logit | tokens | equal, colocated | "
        "equal, disaggregated | prompts passed over |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        logits, tokens = row.logits, row.tokens
        lines.append(
            f"| {row.title} | {logits.difference:.1e} | {logits.largest:.1f} | {tokens.compared} | "
            f"{tokens.colocated} | {tokens.disaggregated} | {tokens.passed_over} |"
        )
    lines += ["", "| nats per token | transformers | KVFerry | difference |", "|---|--:|--:|--:|"]
    for each in likelihoods:
        difference = each.ours - each.theirs
        lines.append(f"| {each.dtype} | {each.theirs:.6f} | {each.ours:.6f} | {difference:+.1e} |")
    return "\n".join([*lines, "", _origin()])


def as_json(rows: Sequence[Row], likelihoods: Sequence[Likelihood]) -> str:
    """The same numbers for programs."""
    found = {
        "rows": [asdict(row) for row in rows],
        "likelihoods": [asdict(each) for each in likelihoods],
        "origin": _origin(),
    }
    return json.dumps(found, indent=2, ensure_ascii=False)


def block(page: str) -> str:
    """What stands between the marks. Raises ValueError without them."""
    found = _BLOCK.search(page)
    if found is None:
        raise ValueError(f"the page lacks the lines {BEGIN} and {END}")
    return found[1]


def replaced(page: str, content: str) -> str:
    """The page with other content between the marks. Raises ValueError without them."""
    block(page)
    return _BLOCK.sub(lambda _: f"{BEGIN}\n{content}\n{END}", page)


def titles_of(content: str) -> list[str]:
    """The models of the first table."""
    lines = content.split("\n| nats")[0].splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| model |")]
    return [line.split(" | ")[0].removeprefix("| ") for line in rows]


def write(content: str, path: Path = ROOT / "docs" / "models.md") -> None:
    """Put the tables into the page."""
    page = path.read_text(encoding="utf-8")
    path.write_text(replaced(page, content), encoding="utf-8")


def _origin() -> str:
    """Commit, machine and libraries, in one line."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--untracked-files=no"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    return (
        f"Commit {commit}{' with changes' if changed else ''}; {_processor()}, {os.cpu_count()} "
        f"cores; Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}."
    )


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()
