"""Models of the Hugging Face Hub: from a cache laid by hand, and from a Hub on 127.0.0.1."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from kvferry.engine.models.identity import content_revision
from kvferry.engine.models.loading import load_model
from kvferry.engine.models.refusals import SUPPORTED_ARCHITECTURES
from kvferry.engine.weights.hub import parse_name
from kvferry.engine.weights.hub_snapshot import HubModel
from tests.engine.fake_hub import FakeHub
from tests.engine.hub_folders import (
    COMMIT,
    INDEX,
    OTHER_COMMIT,
    REPOSITORY,
    RESOLVE,
    SHARDS,
    lay_cache,
    write_repository,
)
from tests.engine.tiny_gguf import LAYERS, write_tiny_gguf


def resolve(
    home: Path, environ: dict[str, str] | None = None, name: str = REPOSITORY, **arguments: Any
) -> dict[str, Any]:
    """What a process of its own says about a model, with its Hugging Face home at ``home``."""
    cleared = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    done = subprocess.run(
        [*RESOLVE, str(home / "store"), json.dumps({"name": name} | arguments)],
        env=cleared | {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"} | (environ or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def offline(home: Path, **arguments: Any) -> dict[str, Any]:
    return resolve(home, {"HF_HUB_OFFLINE": "1"}, **arguments)


def online(home: Path, hub: FakeHub, **arguments: Any) -> dict[str, Any]:
    return resolve(home, {"HF_ENDPOINT": hub.endpoint}, **arguments)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("org/name", HubModel("org/name")),
        ("Org-1/na.me_2", HubModel("Org-1/na.me_2")),
        ("org/name/m.Q4_0.gguf", HubModel("org/name", "m.Q4_0.gguf")),
        ("org/name/sub/m.gguf", HubModel("org/name", "sub/m.gguf")),
        ("name", None),
        ("/org/name", None),
        ("./name", None),
        ("~/name", None),
        ("org/name/", None),
        ("org/name/file.bin", None),
        ("org/name/../../m.gguf", None),
        ("or--g/name", None),
        ("org/na me", None),
        ("org/name.git", None),
        ("", None),
    ],
)
def test_a_name_is_a_repository_by_the_rules_of_the_hub(name: str, wanted: HubModel | None) -> None:
    assert parse_name(name) == wanted


@pytest.mark.parametrize("sharded", [False, True])
def test_a_cache_laid_by_hand_loads_offline(sharded: bool, tmp_path: Path) -> None:
    source = write_repository(tmp_path / "source", sharded=sharded)
    snapshot = lay_cache(tmp_path, source)
    said = offline(tmp_path)
    assert (said["path"], said["name"]) == (str(snapshot), REPOSITORY)
    assert said["revision"] == f"hub:{COMMIT}+{content_revision(source)}"
    assert said["heavy"] == []
    assert load_model(snapshot, "float32").config.num_layers == LAYERS


def test_a_revision_is_a_branch_a_tag_or_a_commit(tmp_path: Path) -> None:
    first = lay_cache(tmp_path, write_repository(tmp_path / "one"))
    second = lay_cache(
        tmp_path, write_repository(tmp_path / "two", seed=1), OTHER_COMMIT, "team/next"
    )
    said = offline(tmp_path, revision="team/next")
    assert said["path"] == str(second)
    assert offline(tmp_path, revision=COMMIT)["path"] == str(first)
    assert {m["name"]: m["source"] for m in said["listed"]}[REPOSITORY].startswith("Hugging Face")
    listed = [m["folder"] for m in said["listed"] if m["name"] == REPOSITORY]
    assert sorted(listed) == sorted([str(first), str(second)])
    absent = offline(tmp_path, revision="absent")
    assert absent["error"] == "ModelMissing"
    assert f"kvferry models pull {REPOSITORY} --revision absent" in absent["message"]
    assert offline(tmp_path, revision="../../main")["error"] == "ModelMissing"


def test_a_local_folder_of_the_same_name_stands_before_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_cache(tmp_path, write_repository(tmp_path / "source"))
    local = write_repository(tmp_path / "here" / REPOSITORY)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    done = subprocess.run(
        [*RESOLVE, str(tmp_path / "store"), json.dumps({"name": REPOSITORY})],
        cwd=tmp_path / "here",
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout)["path"] == REPOSITORY
    assert local.is_dir()


def test_what_is_broken_in_the_cache_hides_no_other_model(tmp_path: Path) -> None:
    whole = lay_cache(tmp_path, write_repository(tmp_path / "source"))
    cache = tmp_path / "hub"
    for place, name in enumerate(("a--loop", "b--file", "c--empty", "z--ref")):
        (cache / f"models--{name}" / "snapshots").mkdir(parents=True)
        if place == 0:
            loop = cache / f"models--{name}" / "snapshots" / OTHER_COMMIT
            loop.symlink_to(loop)
    (cache / "models--b--file" / "snapshots" / OTHER_COMMIT).touch()
    os.mkfifo(cache / "models--c--empty" / "refs")
    (whole.parent.parent / "refs" / "odd").write_bytes(bytes(5000))
    listed = offline(tmp_path)["listed"]
    assert [m["folder"] for m in listed if m["source"].startswith("Hugging")] == [str(whole)]


@pytest.mark.parametrize("how", [{"allow_download": False}, {"pull": True}, {}])
def test_what_is_not_cached_says_what_to_run(how: dict[str, bool], tmp_path: Path) -> None:
    said = offline(tmp_path, **how)
    assert said["error"] == "ModelMissing"
    assert f"run 'kvferry models pull {REPOSITORY}'" in said["message"]
    assert "\n" not in said["message"]


def damaged(home: Path, snapshot: Path, file: str) -> None:
    said = offline(home)
    assert said["error"] == "DamagedModel", said
    assert file in said["message"]
    assert f"kvferry models pull {REPOSITORY}" in said["message"]
    assert "\n" not in said["message"]


def test_a_snapshot_without_a_shard_is_damaged(tmp_path: Path) -> None:
    snapshot = lay_cache(tmp_path, write_repository(tmp_path / "source", sharded=True))
    (snapshot / SHARDS[1]).unlink()
    damaged(tmp_path, snapshot, SHARDS[1])


def test_a_link_to_nothing_is_damaged(tmp_path: Path) -> None:
    snapshot = lay_cache(tmp_path, write_repository(tmp_path / "source"))
    (snapshot / "model.safetensors").resolve().unlink()
    damaged(tmp_path, snapshot, "model.safetensors")


def test_a_link_to_itself_is_damaged(tmp_path: Path) -> None:
    snapshot = lay_cache(tmp_path, write_repository(tmp_path / "source"))
    (snapshot / "generation_config.json").unlink()
    (snapshot / "generation_config.json").symlink_to("generation_config.json")
    damaged(tmp_path, snapshot, "generation_config.json")


def test_a_blob_whose_download_did_not_end_is_damaged(tmp_path: Path) -> None:
    snapshot = lay_cache(tmp_path, write_repository(tmp_path / "source"))
    link = snapshot / "model.safetensors"
    blob = link.resolve()
    blob.rename(blob.with_name(f"{blob.name}.incomplete"))
    link.unlink()
    link.symlink_to(f"../../blobs/{blob.name}.incomplete")
    damaged(tmp_path, snapshot, ".incomplete")


def test_a_truncated_blob_is_damaged_and_pulling_mends_it(tmp_path: Path) -> None:
    source = write_repository(tmp_path / "source")
    snapshot = lay_cache(tmp_path, source)
    blob = (snapshot / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-5])
    damaged(tmp_path, snapshot, "model.safetensors")
    with FakeHub.of(source) as hub:
        assert online(tmp_path, hub)["path"] == str(snapshot)
    assert offline(tmp_path)["path"] == str(snapshot)


@pytest.mark.parametrize("sharded", [False, True])
def test_only_what_is_needed_is_fetched_with_its_bytes_counted(
    sharded: bool, tmp_path: Path
) -> None:
    source = write_repository(tmp_path / "source", sharded=sharded)
    with FakeHub.of(source) as hub:
        hub.files["consolidated.safetensors"] = b"the same weights again"
        said = online(tmp_path, hub)
        assert said["name"] == REPOSITORY, said
        assert hub.fetched[0] == "config.json"
        weights = {*SHARDS, INDEX} if sharded else {"model.safetensors"}
        assert set(hub.fetched) == weights | {
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
        }
        assert len(hub.fetched) == len(set(hub.fetched)), "fetched twice"
        total = sum(len(hub.files[name]) for name in set(hub.fetched))
        reports = said["reports"]
        assert reports[-1] == ["download", total, total]
        assert [r[1] for r in reports] == sorted(r[1] for r in reports)
        assert len(reports) > 3
        num_asked = len(hub.asked)
        assert online(tmp_path, hub)["path"] == said["path"]
        assert len(hub.asked) == num_asked, "what is present was asked for again"
    assert offline(tmp_path)["path"] == said["path"]
    assert load_model(Path(said["path"]), "float32").config.num_layers == LAYERS


def test_refresh_follows_a_branch_and_a_commit_stays(tmp_path: Path) -> None:
    with FakeHub.of(write_repository(tmp_path / "one")) as hub:
        first = online(tmp_path, hub)
        hub.commit = OTHER_COMMIT
        hub.files["model.safetensors"] = (
            write_repository(tmp_path / "two", seed=1) / "model.safetensors"
        ).read_bytes()
        assert online(tmp_path, hub)["path"] == first["path"]
        moved = online(tmp_path, hub, pull=True)
        assert OTHER_COMMIT in moved["path"]
        assert moved["revision"] != first["revision"]
        assert online(tmp_path, hub, revision=COMMIT)["path"] == first["path"]


def test_a_model_that_cannot_run_is_refused_before_its_weights(tmp_path: Path) -> None:
    source = write_repository(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (source / "config.json").write_text(json.dumps(config))
    with FakeHub.of(source) as hub:
        said = online(tmp_path, hub)
        assert said["error"] == "UnsupportedModel"
        assert "MambaForCausalLM" in said["message"]
        assert all(name in said["message"] for name in SUPPORTED_ARCHITECTURES)
        assert set(hub.fetched) <= {"config.json", "generation_config.json"}


def test_what_a_repository_lacks_is_named_before_anything_is_fetched(tmp_path: Path) -> None:
    with FakeHub.of(write_repository(tmp_path / "source")) as hub:
        del hub.files["model.safetensors"]
        said = online(tmp_path, hub)
        assert said["error"] == "UnsupportedModel"
        assert "pytorch_model.bin may hold code and is never opened" in said["message"]
        hub.files |= {"tiny.Q8_0.gguf": b"", "model.safetensors": b""}
        del hub.files["tokenizer.json"]
        said = online(tmp_path, hub)
        assert (
            f"no tokenizer.json; it has GGUF files: tiny.Q8_0.gguf; give one as {REPOSITORY}/"
            in (said["message"])
        )
        assert hub.fetched == []


def test_one_gguf_file_of_a_repository_is_converted(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    with FakeHub({"tiny.gguf": (tmp_path / "tiny.gguf").read_bytes()}) as hub:
        said = online(tmp_path, hub, name=f"{REPOSITORY}/tiny.gguf")
        assert said["name"] == f"{REPOSITORY}/tiny.gguf"
        assert hub.fetched == ["tiny.gguf"]
        assert {"download", "convert"} <= {r[0] for r in said["reports"]}
        other = online(tmp_path, hub, name=f"{REPOSITORY}/other.gguf")
        assert "no other.gguf; it has tiny.gguf" in other["message"]
    assert offline(tmp_path, name=f"{REPOSITORY}/tiny.gguf")["path"] == said["path"]


def test_the_token_is_sent_and_its_absence_explained(tmp_path: Path) -> None:
    with FakeHub.of(write_repository(tmp_path / "source")) as hub:
        hub.token = "hf_secret"
        said = online(tmp_path, hub)
        assert said["error"] == "HubUnavailable"
        assert "private" in said["message"]
        assert "HF_TOKEN" in said["message"]
        assert "hf auth login" in said["message"]
        found = resolve(tmp_path, {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_secret"})
        assert found["name"] == REPOSITORY, found


@pytest.mark.parametrize(
    ("change", "arguments", "named"),
    [
        ({"gated": True}, {}, "is gated: ask for access at"),
        ({"repository": "other/one"}, {}, "check the name"),
        ({}, {"revision": "v9"}, "has no revision 'v9'"),
        ({"failing": 403}, {}, "answered 403"),
        ({"failing": 500}, {}, "try again later"),
    ],
)
def test_a_refusal_of_the_hub_says_what_to_do(
    change: dict[str, Any], arguments: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with FakeHub.of(write_repository(tmp_path / "source")) as hub:
        for key, value in change.items():
            setattr(hub, key, value)
        said = online(tmp_path, hub, **arguments)
    assert said["error"] == "HubUnavailable", said
    assert named in said["message"]
    assert "\n" not in said["message"]
    assert "hf_secret" not in said["message"]


def test_a_hub_that_is_not_there_is_explained(tmp_path: Path) -> None:
    said = resolve(tmp_path, {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert said["error"] == "HubUnavailable"
    assert "check the network" in said["message"]
    assert "\n" not in said["message"]


def test_an_interrupted_transfer_goes_on_where_it_broke(tmp_path: Path) -> None:
    with FakeHub.of(write_repository(tmp_path / "source")) as hub:
        large = load_file(tmp_path / "source" / "model.safetensors") | {"x": torch.zeros(4 << 20)}
        hub.files["model.safetensors"] = save(large)  # more than one piece of a transfer
        hub.break_once = {"model.safetensors": 12 << 20}
        said = online(tmp_path, hub)
        assert said["name"] == REPOSITORY, said
        ranges = [r for _, path, r in hub.asked if path.endswith("model.safetensors") and r]
        assert len(ranges) == 1
        assert ranges[0] > "bytes=1000000-"
        content = (Path(said["path"]) / "model.safetensors").read_bytes()
        assert content == hub.files["model.safetensors"]
