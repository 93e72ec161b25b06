"""The page of the load generator names every flag, workload and format."""

from __future__ import annotations

import argparse

import pytest

from kvferry.cluster.cli.loadgen_flags import configure_run
from kvferry.cluster.loadgen.lengths import parse_lengths
from kvferry.cluster.loadgen.settings import OF_WORKLOADS, WORKLOADS, Settings
from kvferry.cluster.loadgen.traces import FORMATS
from tests.house.source import ROOT

PAGE = (ROOT / "docs" / "loadgen.md").read_text(encoding="utf-8")


def flags() -> list[str]:
    parser = argparse.ArgumentParser()
    configure_run(parser)
    return [name for action in parser._actions for name in action.option_strings]


@pytest.mark.parametrize("flag", sorted({*flags()} - {"-h", "--help"}))
def test_every_flag_is_on_the_page(flag: str) -> None:
    assert f"{flag}`" in PAGE or f"{flag} " in PAGE


def test_every_setting_has_its_flag() -> None:
    known = {flag.removeprefix("--").replace("-", "_") for flag in flags()}
    assert set(Settings().to_json()) - known == {"slo_ttft", "slo_tpot"}
    assert known >= OF_WORKLOADS


@pytest.mark.parametrize("name", [*WORKLOADS, *FORMATS])
def test_every_workload_and_format_has_a_row(name: str) -> None:
    assert f"| `{name}` |" in PAGE


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_s_defaults_are_usable(name: str) -> None:
    file = {"trace": "x", "prompts": "x"}.get(name)
    settings = Settings(workload=name, **({name: file} if file else {})).resolved()  # type: ignore[arg-type]
    for length in ("input_tokens", "output_tokens", "opening_tokens", "turns"):
        value = getattr(settings, length)
        if value is not None:
            parse_lengths(value)
