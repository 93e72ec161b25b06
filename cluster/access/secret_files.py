"""Files that hold secrets, or say who is trusted: refused where others may read or change them.

Knows neither what a secret is good for nor where its path was configured, but for the name of the
key, which every error says.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvferry.kv_cache.errors import KVFerryError

MAX_BYTES = 1 << 20
_OTHERS = stat.S_IRWXO


class UnusableSecret(KVFerryError):
    """A file of keys or certificates cannot be used; names the configuration key and the path."""

    exit_code = 2


def read_secret(key: str, path: str) -> bytes:
    """A file, ours or root's, that only its owner and group may touch. Raises UnusableSecret."""
    return _read(key, path, secret=True)


def read_public(key: str, path: str) -> bytes:
    """A file that anybody may read, such as a certificate, and only owner and group may change.

    Raises UnusableSecret.
    """
    return _read(key, path, secret=False)


def _read(key: str, path: str, secret: bool) -> bytes:
    try:
        with Path(path).open("rb") as file:
            _check(key, path, os.fstat(file.fileno()), secret)
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UnusableSecret(f"{key}: cannot read {path}: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise UnusableSecret(f"{key}: {path} has more than {MAX_BYTES} bytes, wanted fewer")
    return data


def _check(key: str, path: str, status: os.stat_result, secret: bool) -> None:
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    if secret and status.st_mode & _OTHERS:
        raise UnusableSecret(
            f"{key}: {path} has mode {mode}: other users may get at it; chmod o-rwx, and make a "
            "new one if any could have"
        )
    if status.st_mode & stat.S_IWOTH:
        raise UnusableSecret(
            f"{key}: {path} has mode {mode}: other users may change it; chmod o-w, and see that it "
            "holds what it should"
        )
    if secret and status.st_uid not in (0, os.geteuid()):
        raise UnusableSecret(
            f"{key}: {path} belongs to user {status.st_uid}, wanted user {os.geteuid()}, who runs "
            "this, or root: chown it"
        )
