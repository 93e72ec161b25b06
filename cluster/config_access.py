"""Who may use the cluster, as sections of the configuration file: TLS, tokens, tenants.

Files are named here and read where the router runs (``cluster.access``).
"""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from kvferry.cluster.config_types import Section, Text

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class TlsConfig(Section):
    """Certificate and key of the doors, PEM files; neither: plaintext.

    With ``client_ca`` clients need a certificate that one of its own has signed.
    """

    cert: Text | None = None
    key: Text | None = None
    client_ca: Text | None = None

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key: one is given without the other")
        if self.client_ca is not None and self.cert is None:
            raise ValueError("client_ca is given without cert and key: clients are asked over TLS")
        return self


class AuthConfig(Section):
    """Who may call: ``tokens_file`` holds the tokens of those who run the cluster."""

    tokens_file: Text | None = None


class TenantConfig(Section):
    """One tenant: the keys in ``key_file`` are its own.

    ``salt`` keeps its cached KV apart, and is its name where not given; ``tokens_per_s``, prompts
    and outputs together, is what it may use in the long run.
    """

    key_file: Text
    salt: Annotated[Text, Field(max_length=256)] | None = None
    tokens_per_s: Annotated[float, Field(gt=0, le=1e9)] | None = None


def salt_of(name: str, tenant: TenantConfig) -> str:
    """The salt of a tenant."""
    return name if tenant.salt is None else tenant.salt


def _tenants(tenants: dict[str, TenantConfig]) -> dict[str, TenantConfig]:
    seen: dict[str, str] = {}
    for name, tenant in tenants.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r}: wanted a name of letters, digits, '.', '_' and '-'")
        other = seen.setdefault(salt_of(name, tenant), name)
        if other != name:
            raise ValueError(f"{other} and {name} have the same salt: they would share their cache")
    return tenants


TenantConfigs = Annotated[dict[str, TenantConfig], AfterValidator(_tenants)]
