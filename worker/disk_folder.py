"""Blocks on a disk: one file each, written whole, verified when read.

A file is a digest and the block's bytes; the digest covers the key, too, so that a file of another
content is found out. It is written under another name and then renamed. Files mean nothing to any
other process: each has a folder of its own, which it holds locked, and removes when it ends. What a
dead one has left (its lock is gone) is removed by the next to start. What goes wrong with a file is
logged, and the caller computes the block again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvferry.kv_cache.errors import KVFerryError

logger = logging.getLogger(__name__)

MAGIC = b"KVFERRY1"
HEADER_BYTES = len(MAGIC) + 16
FOLDER_PREFIX = "kvferry-kv-"
LOCK = "lock"


class DiskUnavailable(KVFerryError):
    """The folder cannot be used; names it and what to change."""


class DiskFolder:
    """See the module.

    Args:
        path: where this process's folder is made; is made itself if it is not there.
        block_bytes: bytes of each block.
    """

    def __init__(self, path: Path, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        try:
            path.mkdir(parents=True, exist_ok=True)
            guard = os.open(path / f"{FOLDER_PREFIX}lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(guard, fcntl.LOCK_EX)  # nobody sweeps between the next two lines
                self.num_swept = _sweep(path)
                self.folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=path))
                self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            finally:
                os.close(guard)
        except OSError as error:
            raise DiskUnavailable(
                f"{path} cannot be used for blocks ({error}): make it a folder that can be "
                "written, or change cache.host_tier.disk_path"
            ) from error
        self._closed = False

    def write(self, number: int, key: bytes, block: NDArray[np.uint8]) -> bool:
        """Write a block (uint8 ``[block_bytes]``) as file ``number``; False if that failed."""
        path, temporary = self._path(number), self.folder / "writing"
        try:
            with temporary.open("wb") as file:
                file.write(MAGIC + _digest(key, block))
                file.write(block.data)
            temporary.replace(path)
        except OSError as error:
            logger.warning("a block could not be written to %s: %s", path, error)
            self.forget(number)  # what an earlier block has left there is not this one
            return False
        return True

    def read(self, number: int, key: bytes, block: NDArray[np.uint8]) -> bool:
        """Read file ``number`` into a block; False, and ``block`` is spoilt, if it is not whole."""
        path = self._path(number)
        try:
            with path.open("rb") as file:
                head = file.read(HEADER_BYTES)
                filled = file.readinto(block.data)
                whole = filled == self.block_bytes and not file.read(1)
        except OSError as error:
            logger.warning("a block could not be read from %s: %s", path, error)
            return False
        if not whole or head != MAGIC + _digest(key, block):
            logger.warning("%s is not the block that was written", path)
            return False
        return True

    def forget(self, number: int) -> None:
        """Remove a file; nothing if it is not there."""
        try:
            self._path(number).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s could not be removed: %s", self._path(number), error)

    def close(self) -> None:
        """Remove the folder; idempotent."""
        if not self._closed:
            self._closed = True
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.block"


def _digest(key: bytes, block: NDArray[np.uint8]) -> bytes:
    digest = xxhash.xxh3_128(key)
    digest.update(block.data)
    return bytes(digest.digest())


def _sweep(path: Path) -> int:
    """Remove the folders of dead processes; returns how many there were."""
    count = 0
    for folder in path.glob(f"{FOLDER_PREFIX}*"):
        if folder.is_symlink() or not folder.is_dir():
            continue
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:
            continue  # somebody else's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its process lives
        else:
            shutil.rmtree(folder, ignore_errors=True)
            count += 1
        finally:
            os.close(lock)
    return count
