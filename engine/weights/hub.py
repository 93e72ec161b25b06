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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvferry.engine.models.checkpoint import read_text
from kvferry.engine.models.errors import DamagedModel, ModelError
from kvferry.engine.models.identity import hub_repository
from kvferry.engine.weights.files import ModelMissing, Progress, folder_bytes
from kvferry.engine.weights.hub_download import download
from kvferry.engine.weights.hub_snapshot import (
    DEFAULT_REVISION,
    SMALL_FILES,
    HubModel,
    check_config,
    check_snapshot,
    pull_command,
)

_REF_BYTES = 256  # a reference holds a commit
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
    """Snapshots in the cache that we could run, by repository; reads small files only.

    What cannot be read is passed over, and hides nothing else.
    """
    from huggingface_hub import constants

    for repository in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        with suppress(OSError):
            yield from _cached_snapshots(repository)


def _cached_snapshots(repository: Path) -> Iterator[CachedModel]:
    """Those of one repository's folder, newest first. Raises OSError."""
    snapshots = sorted(
        (repository / "snapshots").iterdir(), key=lambda it: (-it.stat().st_mtime, it.name)
    )
    for snapshot in snapshots:
        name = hub_repository(snapshot)
        if name is None:
            continue
        try:
            check_config(name, snapshot)
            check_snapshot(name, snapshot)
        except ModelError:
            continue
        names = tuple(sorted(_refs(repository, snapshot.name))) or (snapshot.name,)
        yield CachedModel(name, snapshot, names, folder_bytes(snapshot))


def _refs(repository: Path, commit: str) -> Iterator[str]:
    """Branches and tags that stand for a commit in the cache."""
    root = repository / "refs"
    for file in root.rglob("*"):
        with suppress(DamagedModel):
            if file.is_file() and read_text(file, _REF_BYTES).strip() == commit:
                yield str(file.relative_to(root))


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
