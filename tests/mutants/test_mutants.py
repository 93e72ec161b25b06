"""The cache machine notices every fault of the list, and nothing where there is none.

``make mutants`` prints the step in which each is noticed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.source import ROOT
from tests.mutants.patching import MOST_STEPS, Mutant, Rotten, read_mutants, try_mutant, try_seeds

MUTANTS = read_mutants()
LEAST_MUTANTS = 12


def test_the_list_is_long_enough_and_names_each_once() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= LEAST_MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    found = try_seeds(tmp_path.resolve(), mutant)
    assert found.failed_at is not None, f"{mutant.name} survived: {mutant.fault}"
    assert found.failed_at <= MOST_STEPS
    print(f"{mutant.name}: step {found.failed_at}, seed {found.seed}: {found.error}")


def test_the_copy_without_a_patch_passes(tmp_path: Path) -> None:
    found = try_mutant(tmp_path.resolve(), None, MOST_STEPS, seed=0)
    assert (found.failed_at, found.error, found.num_steps) == (None, "", MOST_STEPS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_line(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text("utf-8")
    lines, changed = source.splitlines(), mutant.apply(source).splitlines()
    different = [pair for pair in zip(lines, changed, strict=True) if pair[0] != pair[1]]
    ((before, after),) = different
    assert (before.strip(), after.strip()) == (mutant.line, mutant.becomes)
    compile("\n".join(changed), mutant.file, "exec")


@pytest.mark.parametrize(
    ("line", "after"), [("no such line", ""), ("return", "no such text"), ("return", "")]
)
def test_a_mutant_whose_line_is_gone_is_named(line: str, after: str) -> None:
    source = "def f():\n    return\n\ndef g():\n    return\n"
    mutant = Mutant("rotten", "", "x.py", line, "pass", after)
    with pytest.raises(Rotten, match="rotten: "):
        mutant.apply(source)
