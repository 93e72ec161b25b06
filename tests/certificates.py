"""Certificates of a made-up authority, as files, for servers and clients of tests."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Pair:
    """Paths of a certificate and its key."""

    cert: str
    key: str


class Authority:
    """Signs certificates; ``ca`` is its own, which others trust."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._ca = trustme.CA()
        self._count = 0
        path = folder / f"{name}-ca.pem"
        self._ca.cert_pem.write_to_path(str(path))
        self.ca = str(path)

    def pair(self, identity: str, *, expired: bool = False) -> Pair:
        """A certificate of this name or address, and its key, which only its owner may read."""
        now = datetime.now(UTC)
        not_before, not_after = now - timedelta(days=2), now + timedelta(days=1)
        if expired:
            not_after = now - timedelta(days=1)
        made = self._ca.issue_cert(identity, not_before=not_before, not_after=not_after)
        self._count += 1
        stem = self._folder / f"{self._name}-{self._count}"
        made.cert_chain_pems[0].write_to_path(f"{stem}.pem")
        return Pair(f"{stem}.pem", secret_file(Path(f"{stem}.key"), made.private_key_pem.bytes()))


def secret_file(path: Path, content: bytes) -> str:
    """A file that only its owner may touch."""
    path.touch(mode=0o600)
    path.write_bytes(content)
    return str(path)
