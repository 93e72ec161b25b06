"""A served cluster with everything locked: mutual TLS, tokens, tenants; and what opens it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cluster.access.settings import AccessSettings, TenantSettings
from kvferry.cluster.access.tenants import Tenant
from kvferry.cluster.access.tls import TlsFiles
from tests.certificates import Authority, secret_file
from tests.cluster.access.locked import (
    ACME,
    BROAD,
    HASTY,
    OPERATOR,
    QUICK,
    SLOW,
    THRIFTY,
    ZETA,
    Locked,
)
from tests.stack import Stack


@pytest.fixture(scope="session")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    """The cluster's, and a stranger's."""
    folder = tmp_path_factory.mktemp("authorities")
    return Authority(folder, "ours"), Authority(folder, "theirs")


@pytest.fixture(scope="module")
def locked(
    authorities: tuple[Authority, Authority], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Locked]:
    """One for each module; every test leaves it quiet."""
    ours, theirs = authorities
    folder: Path = tmp_path_factory.mktemp("locked")
    server = ours.pair("127.0.0.1")

    def tenant(name: str, key: str, rate: float | None = None) -> TenantSettings:
        key_file = secret_file(folder / f"{name}.key", key.encode())
        return TenantSettings(Tenant(name, name, rate), key_file)

    access = AccessSettings(
        TlsFiles(server.cert, server.key, ours.ca),
        secret_file(folder / "tokens", f"operator {OPERATOR}\n".encode()),
        (
            *(tenant("acme", ACME), tenant("zeta", ZETA), tenant("slow", SLOW, 1.0)),
            *(tenant("quick", QUICK, 1000.0), tenant("thrifty", THRIFTY, 1.0)),
            *(tenant("broad", BROAD, 1.0), tenant("hasty", HASTY, 1.0)),
        ),
    )
    with Stack(folder / "tiny", http=True, metrics=True, access=access) as stack:
        yield Locked(stack, ours, theirs, ours.pair("client"))
        stack.assert_quiet()
