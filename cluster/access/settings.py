"""From the configured paths to who may call, read in the router's process."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.cluster.access.gate import Gate, read_keys
from kvferry.cluster.access.tenants import Tenant, Tenants
from kvferry.cluster.access.tls import ServerTls, TlsFiles


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """A tenant and the file that holds its keys."""

    tenant: Tenant
    key_file: str


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Paths on the router's host, no secret itself, so that it can travel."""

    tls: TlsFiles | None = None
    tokens_file: str | None = None
    tenants: tuple[TenantSettings, ...] = ()


@dataclass(frozen=True, slots=True)
class Access:
    """What the doors of one router share. ``tls``: None for plaintext."""

    gate: Gate = field(default_factory=Gate)
    tenants: Tenants = field(default_factory=Tenants)
    tls: ServerTls | None = None


def load_access(settings: AccessSettings) -> Access:
    """Read every file. Raises UnusableSecret."""
    keys = []
    if settings.tokens_file is not None:
        keys += read_keys("server.auth.tokens_file", settings.tokens_file)
    for each in settings.tenants:
        name = each.tenant.name
        keys += read_keys(f"tenants.{name}.key_file", each.key_file, name)
    tls = None if settings.tls is None else ServerTls(settings.tls)
    return Access(Gate(keys), Tenants(each.tenant for each in settings.tenants), tls)
