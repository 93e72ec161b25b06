"""What is installed from a wheel or an sdist serves, with a compiler and without."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from kvferry.engine.weights.store import ModelFolder
from tests.house.distributions import NO_COMPILER, Installed, build_sdist, build_wheel, run

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sdist(tmp_path_factory.mktemp("sdist"))


def demo(installed: Installed, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run ``kvferry demo`` as it is installed."""
    config = folder / "kvferry.yaml"
    config.write_text("{model: {max_model_len: 1024}, cache: {num_blocks: 192}}", encoding="utf-8")
    where = "import kvferry.cluster.launcher as it; print(it.__file__)"
    assert str(installed.site) in run(installed.command("python"), "-c", where, cwd=folder).stdout
    return run(installed.command("kvferry"), "demo", "--config", config, *flags, cwd=folder)


def test_a_wheel_serves_with_its_compiled_kernels(
    default_model: ModelFolder, sdist: Path, tmp_path: Path
) -> None:
    wheel = build_wheel(sdist, tmp_path)
    installed = Installed(tmp_path / "venv")
    installed.install(wheel)
    (compiled,) = installed.site.glob("kvferry/kernels/cpu/_kernels*.so")
    assert str(tmp_path).encode() not in compiled.read_bytes()
    document = json.loads(demo(installed, tmp_path, "--json").stdout)
    assert document["ok"] is True
    assert {each["kernels"]["implementation"] for each in document["workers"]} == {"cpu"}
    assert document["totals"]["num_failed"] == 0
    assert document["totals"]["blocks_moved"] > 0


def test_without_a_compiler_the_reference_kernels_serve_and_it_says_so(
    default_model: ModelFolder, sdist: Path, tmp_path: Path
) -> None:
    installed = Installed(tmp_path / "venv")
    installed.install(sdist, NO_COMPILER)
    assert list(installed.site.glob("kvferry/kernels/cpu/_kernels*.so")) == []
    ran = demo(installed, tmp_path)  # with a document it would say nothing beside it
    assert re.search(
        "^warning: .* the reference kernels compute, which are slower$", ran.stderr, re.M
    )
    assert re.search(r"; [1-9]\d* blocks, \d+ bytes moved; ", ran.stdout)
