"""What the installer decides and changes."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from benchmarks.peers.install import (
    POLL_VARIABLE,
    InstallFailed,
    gpu_builds,
    main,
    with_settable_poll,
    write_alias,
)

API = """class nixl_agent:
    def __init__(self):
        agent_config.pthrDelay = 0
        agent_config.lthrDelay = 100000
"""


def report(*names: str) -> str:
    return json.dumps({"install": [{"metadata": {"name": name}} for name in names]})


def test_packages_for_gpus_are_found() -> None:
    assert gpu_builds(report("torch", "numpy", "triton")) == []
    found = gpu_builds(report("torch", "nvidia-cudnn-cu13", "NVIDIA-cublas", "cuda-toolkit"))
    assert found == ["cuda-toolkit", "nvidia-cublas", "nvidia-cudnn-cu13"]


@pytest.mark.parametrize(("variables", "delay"), [({}, 0), ({POLL_VARIABLE: "1000"}, 1000)])
def test_nixl_polls_as_the_variable_says_and_as_before_without_it(
    variables: dict[str, str], delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(POLL_VARIABLE, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    changed = with_settable_poll(API)
    line = next(line for line in changed.splitlines() if "pthrDelay" in line)
    assert changed.replace(line, "        agent_config.pthrDelay = 0") == API
    assert eval(line.partition(" = ")[2]) == delay


def test_a_changed_api_is_left_as_it_is() -> None:
    assert with_settable_poll(with_settable_poll(API)) == with_settable_poll(API)


def test_an_api_of_another_form_is_refused() -> None:
    with pytest.raises(InstallFailed, match="no single line"):
        with_settable_poll("agent_config.pthrDelay = 5\n")


def test_vllm_is_found_by_its_name(tmp_path: Path) -> None:
    write_alias(tmp_path)
    write_alias(tmp_path)
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert found.version == "0.32.0+cpu"


def test_the_environment_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "ENVIRONMENT" in capsys.readouterr().err
