"""The page of experiments names every flag of its commands, every recipe and every verdict."""

from __future__ import annotations

import argparse

import pytest

from kvferry.cluster.cli.loadgen_flags import add_load
from kvferry.cluster.cli.loadgen_report import configure_compare, configure_report
from kvferry.cluster.cli.loadgen_sweep import configure_sweep
from kvferry.cluster.loadgen.experiments.recipes import RECIPES
from tests.house.source import ROOT

PAGE = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")


def flags() -> set[str]:
    """Those that ``loadgen run`` does not have, whose page holds its own."""
    parser = argparse.ArgumentParser(conflict_handler="resolve")
    known = argparse.ArgumentParser()
    add_load(known)
    for configure in (configure_sweep, configure_compare, configure_report):
        configure(parser)
    return set(parser._option_string_actions) - set(known._option_string_actions)


@pytest.mark.parametrize("flag", sorted(flags()))
def test_every_flag_is_on_the_page(flag: str) -> None:
    assert f"{flag}`" in PAGE or f"{flag} " in PAGE


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_a_row_and_a_command(name: str) -> None:
    assert f"| `{name}` |" in PAGE
    made = (ROOT / "docs" / "experiments" / "README.md").read_text(encoding="utf-8")
    assert f"--recipe {name} " in made
    assert name in (ROOT / "Makefile").read_text(encoding="utf-8")
