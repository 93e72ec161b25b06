"""Models of the Hugging Face Hub: their names, and what the Hub's cache on this machine holds.

Owns what a name means and what of the cache can be run; ``hub_download`` fetches. The cache, the
token, offline mode and the transfer are those of ``huggingface_hub``, which reads its own settings
(HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT); it is loaded when it is used. Does not know the
model store.

What is in the cache is used without the network; only ``refresh`` asks whether a branch moved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvferry.engine.models.errors import DamagedModel, ModelError
from kvferry.engine.weights.files import ModelMissing, Progress
from kvferry.engine.weights.hub_download import download
from kvferry.engine.weights.hub_snapshot import (
    DEFAULT_REVISION,
    SMALL_FILES,
    HubModel,
    check_config,
    check_snapshot,
    pull_command,
)

_REVISION = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9_.+/-]{0,200}")


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A whole snapshot in the cache, of an architecture that we run."""

    repository: str
    folder: Path
    revisions: tuple[str, ...]
    num_bytes: int


def parse_name(name: str) -> HubModel | None:
    """The Hub model that ``ORG/NAME`` or ``ORG/NAME/FILE.gguf`` means; None for other names."""
    org, _, rest = name.partition("/")
    model, _, file = rest.partition("/")
    if not org or not model or (file and not file.endswith(".gguf")) or name.endswith("/"):
        return None
    if ".." in PurePosixPath(file).parts or "//" in file or "\\" in name:
        return None
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(f"{org}/{model}")
    except HFValidationError:
        return None
    return HubModel(f"{org}/{model}", file or None)


def fetch(
    model: HubModel,
    revision: str | None,
    progress: Progress,
    allow_download: bool = True,
    refresh: bool = False,
) -> Path:
    """The folder of a snapshot, or the path of a GGUF file, in the cache.

    Args:
        model: what is wanted.
        revision: branch, tag or commit; None is ``main``.
        progress: told the bytes that have arrived.
        allow_download: False never touches the network.
        refresh: ask the Hub even if the revision is in the cache: a branch may have moved.

    Raises ModelMissing (HubUnavailable), UnsupportedModel or DamagedModel.
    """
    wanted = revision or DEFAULT_REVISION
    if not _REVISION.fullmatch(wanted) or ".." in wanted:
        raise ModelMissing(f"revision {wanted!r}: wanted a branch, a tag or a commit hash")
    may_download = allow_download and not _offline()
    try:
        if not (refresh and may_download):
            return _cached(model, wanted, may_download)
    except (ModelMissing, DamagedModel):
        if not may_download:
            raise
    return download(model, wanted, progress)


def cached_models() -> Iterator[CachedModel]:
    """Snapshots in the cache that we could run, by repository; reads small files only."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except (CacheNotFound, OSError, ValueError):
        return
    for repository in sorted(repositories, key=lambda it: it.repo_id):
        if repository.repo_type != "model":
            continue
        for snapshot in sorted(repository.revisions, key=lambda it: -it.last_modified):
            try:
                check_config(repository.repo_id, snapshot.snapshot_path)
                check_snapshot(repository.repo_id, snapshot.snapshot_path)
            except ModelError:
                continue
            names = tuple(sorted(snapshot.refs)) or (snapshot.commit_hash,)
            yield CachedModel(
                repository.repo_id, snapshot.snapshot_path, names, snapshot.size_on_disk
            )


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _cached(model: HubModel, revision: str, may_download: bool) -> Path:
    """What the cache has, whole. Raises ModelMissing or DamagedModel."""
    from huggingface_hub import constants, hf_hub_download, snapshot_download
    from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

    pull = pull_command(model, revision)
    try:
        if model.file is not None:
            path = hf_hub_download(
                model.repository, model.file, revision=revision, local_files_only=True
            )
            return Path(path)
        folder = Path(
            snapshot_download(
                model.repository,
                revision=revision,
                allow_patterns=list(SMALL_FILES),
                local_files_only=True,
            )
        )
    except IncompleteSnapshotError as error:
        raise DamagedModel(f"{error.snapshot_path}: {error}; run '{pull}'") from error
    except (LocalEntryNotFoundError, OSError, ValueError) as error:
        why = "" if may_download else " and fetching is switched off"
        raise ModelMissing(
            f"model {str(model)!r} at revision {revision!r} is not in the Hugging Face cache "
            f"{constants.HF_HUB_CACHE}{why}; run '{pull}' with a network"
        ) from error
    check_snapshot(model.repository, folder, pull)
    check_config(model.repository, folder)
    return folder
