"""``kvferry models`` and the flags that name a model, with a Hub on 127.0.0.1."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster.cli.flags import add_cluster, cluster_overrides
from kvferry.cluster.config import ConfigError, load_config
from tests.engine.fake_hub import FakeHub
from tests.engine.hub_folders import REPOSITORY, write_repository

KVFERRY = [sys.executable, "-m", "kvferry.cluster.cli", "models"]


def models(home: Path, *arguments: str, **environ: str) -> tuple[int, Any]:
    cleared = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    places = {"HF_HOME": str(home / "hf"), "KVFERRY_CACHE_DIR": str(home / "kvferry")}
    done = subprocess.run(
        [*KVFERRY, *arguments, "--json"],
        env=cleared | places | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


def test_a_model_of_the_hub_is_pulled_and_then_listed(tmp_path: Path) -> None:
    with FakeHub.of(write_repository(tmp_path / "source")) as hub:
        hub.branches = ("main", "next")
        pull = ("pull", REPOSITORY, "--revision", "next")
        code, document = models(tmp_path, *pull, HF_ENDPOINT=hub.endpoint)
    assert code == 0, document
    (pulled,) = document["models"]
    assert (pulled["name"], pulled["source"]) == (REPOSITORY, "Hugging Face, next")
    assert Path(pulled["path"]).is_dir()
    code, document = models(tmp_path, "list", HF_HUB_OFFLINE="1")
    assert document["models"][-1] == pulled


@pytest.mark.parametrize("name", [REPOSITORY, "nonsense", "../up", "org/name/x.bin"])
def test_what_cannot_be_pulled_ends_with_the_code_of_a_missing_model(
    name: str, tmp_path: Path
) -> None:
    code, document = models(tmp_path, "pull", name, HF_HUB_OFFLINE="1")
    assert code == 3
    assert name in document["error"]["message"]


def parsed(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_cluster(parser)
    return cluster_overrides(parser.parse_args(arguments))


def test_model_and_revision_of_the_flags_stand_before_the_files(tmp_path: Path) -> None:
    file = tmp_path / "kvferry.yaml"
    file.write_text("model: {name: a/b, revision: v1}\n")
    kept = load_config(file, parsed()).model
    assert (kept.name, kept.revision) == ("a/b", "v1")
    moved = load_config(file, parsed("--revision", "v2")).model
    assert (moved.name, moved.revision) == ("a/b", "v2")
    other = load_config(file, parsed("--model", "c/d")).model
    assert (other.name, other.revision) == ("c/d", None), "another model's revision was kept"
    both = load_config(file, parsed("--model", "c/d", "--revision", "v3")).model
    assert (both.name, both.revision) == ("c/d", "v3")


def test_a_revision_of_a_path_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.path and model\.revision"):
        load_config(None, {"model.path": "/models/a", "model.revision": "v1"})
