"""Fetches a repository of the Hugging Face Hub into the Hub's own cache.

Owns that a model we cannot run is refused before its weights are fetched, that only what is needed
is asked for, and what each refusal of the Hub means to a user. Does not know the model store.
"""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvferry.engine.models.errors import DamagedModel, UnsupportedModel
from kvferry.engine.weights.files import ModelMissing, Progress
from kvferry.engine.weights.hub_snapshot import (
    PICKLE_SUFFIXES,
    SMALL_FILES,
    HubModel,
    check_config,
    check_snapshot,
    pull_command,
)
from kvferry.engine.weights.safetensors_header import INDEX_FILE, SINGLE_FILE, read_index

_SHOWN_FILES = 6


class HubUnavailable(ModelMissing):
    """The Hub refused, or could not be reached; says what it said and what to do."""


def download(model: HubModel, revision: str, progress: Progress) -> Path:
    """Fetch what is wanted of a revision; returns the snapshot's folder, or the GGUF file's path.

    Raises HubUnavailable, ModelMissing, UnsupportedModel or DamagedModel.
    """
    with _explained(model, revision):
        return _download(model, revision, progress)


def _download(model: HubModel, revision: str, progress: Progress) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    info = HfApi().model_info(model.repository, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    if model.file is not None:
        _require_gguf(model, sizes)
        bar = _bar(progress, sizes[model.file])
        return Path(
            hf_hub_download(model.repository, model.file, revision=revision, tqdm_class=bar)
        )
    _require_runnable(model.repository, sizes)
    commit = info.sha or revision
    first = [name for name in ("config.json", "generation_config.json") if name in sizes]
    for small in first:
        folder = Path(hf_hub_download(model.repository, small, revision=commit)).parent
    check_config(model.repository, folder)
    weights = [SINGLE_FILE]
    if INDEX_FILE in sizes:
        hf_hub_download(model.repository, INDEX_FILE, revision=commit)
        weights = [shard.name for shard in read_index(folder)]
    absent = [name for name in weights if name not in sizes]
    if absent:
        raise DamagedModel(
            f"model {model.repository!r}: its {INDEX_FILE} names {_listed(absent)}, which the "
            "repository does not hold; tell its owner"
        )
    patterns = [*SMALL_FILES, *weights]
    total = sum(size for name, size in sizes.items() if _matches(name, patterns))
    for name, size in sizes.items():
        kept = folder / name
        if _matches(name, patterns) and size and kept.exists() and kept.stat().st_size != size:
            kept.unlink()  # cut short on this machine; the library would take it for whole
            hf_hub_download(model.repository, name, revision=commit, force_download=True)
    found = snapshot_download(
        model.repository,
        revision=revision,
        allow_patterns=patterns,
        tqdm_class=_bar(progress, total),
    )
    progress("download", total, total)
    check_snapshot(model.repository, Path(found), pull_command(model, revision))
    check_config(model.repository, Path(found))  # a branch may have moved meanwhile
    return Path(found)


def _require_runnable(repository: str, names: dict[str, int]) -> None:
    """Raise UnsupportedModel if the repository lacks what we need, saying what it has instead."""
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    instead = (
        f"; it has GGUF files: {_listed(ggufs)}; give one as {repository}/{ggufs[0]}"
        if ggufs
        else ""
    )
    if SINGLE_FILE not in names and INDEX_FILE not in names:
        pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
        never = f"; {_listed(sorted(pickles))} may hold code and is never opened" if pickles else ""
        raise UnsupportedModel(
            f"model {repository!r} has no safetensors weights (wanted {SINGLE_FILE} or "
            f"{INDEX_FILE}){never}{instead}"
        )
    for needed in ("config.json", "tokenizer.json"):
        if needed not in names:
            raise UnsupportedModel(f"model {repository!r} has no {needed}{instead}")


def _require_gguf(model: HubModel, names: dict[str, int]) -> None:
    if model.file in names:
        return
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    has = f"has {_listed(ggufs)}" if ggufs else "has no GGUF file"
    raise ModelMissing(f"repository {model.repository!r} has no {model.file}; it {has}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_FILES} more" if len(names) > _SHOWN_FILES else ""
    return ", ".join(names[:_SHOWN_FILES]) + more


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@contextmanager
def _explained(model: HubModel, revision: str) -> Iterator[None]:
    """Turn what ``huggingface_hub`` raises into one line of ours that says what to do."""
    from httpx2 import HTTPError
    from huggingface_hub import constants, errors

    where = f"{constants.ENDPOINT}/{model.repository}"
    login = "set HF_TOKEN or run 'hf auth login'"
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubUnavailable(
            f"model {model.repository!r} is gated: ask for access at {where}, then {login}"
        ) from error
    except errors.DisabledRepoError as error:
        raise HubUnavailable(f"model {model.repository!r} was disabled by the Hub") from error
    except errors.RepositoryNotFoundError as error:
        raise HubUnavailable(
            f"model {model.repository!r} is not at {where}, or it is private: check the name; for "
            f"a private one {login}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubUnavailable(
            f"model {model.repository!r} has no revision {revision!r}; give a branch, a tag or a "
            "whole commit hash"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        todo = login if status in (401, 403) else "try again later"
        raise HubUnavailable(
            f"model {model.repository!r}: {constants.ENDPOINT} answered {status} "
            f"({_line(error)}); {todo}"
        ) from error
    except (HTTPError, errors.LocalEntryNotFoundError, errors.FileMetadataError) as error:
        raise HubUnavailable(
            f"model {model.repository!r} could not be fetched from {constants.ENDPOINT} "
            f"({_line(error)}); check the network and run '{pull_command(model, revision)}' "
            "again: what has arrived is kept"
        ) from error
    except OSError as error:
        raise HubUnavailable(
            f"model {model.repository!r} could not be kept in {constants.HF_HUB_CACHE} "
            f"({_line(error)}); free space there, or set HF_HOME to a folder that can be written"
        ) from error


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _bar(progress: Progress, total: int) -> Any:
    """A progress bar class for ``huggingface_hub`` that draws nothing and reports bytes."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    lock = threading.Lock()
    done = 0

    def add(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            progress("download", min(done, total), total)

    class Bar(tqdm):  # type: ignore[misc,unused-ignore]
        monitor_interval = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Of a snapshot there are three bars: of files, of bytes on the wire, of bytes kept.
            name = str(kwargs.get("name"))
            self._counts = kwargs.get("unit") == "B" and not name.endswith(".transfer")
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if self._counts:
                add(int(n or 0))

    return Bar
