"""TLS, tokens and tenants in the configuration: what makes no sense is refused with its key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.cluster.config import Config, ConfigError, load_config
from kvferry.cluster.settings import absolute_paths, access_settings
from tests.cluster.test_config import load_text, refusal


def write_tenants(tmp_path: Path, tenants: str) -> Config:
    return load_text(tmp_path, f"tenants: {tenants}")


def test_tenants_are_named_by_the_user(tmp_path: Path) -> None:
    config = write_tenants(tmp_path, "{a: {key_file: k, tokens_per_s: 5.0}, b: {key_file: l}}")
    settings = access_settings(config)
    found = [
        (each.tenant.name, each.tenant.salt, each.tenant.tokens_per_s) for each in settings.tenants
    ]
    assert found == [("a", "a", 5.0), ("b", "b", None)]
    assert [each.key_file for each in settings.tenants] == [os.path.abspath(n) for n in "kl"]
    assert settings.tls is None and settings.tokens_file is None


def test_whoever_starts_the_router_in_another_folder_finds_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"server.tls.{name}": name for name in ("cert", "key")}
    files |= {"server.auth.tokens_file": "tokens", "tenants.a.key_file": "a.key"}
    config = load_config(None, files)
    here = access_settings(config)
    moved = absolute_paths(config)
    monkeypatch.chdir(tmp_path)
    assert access_settings(moved) == here != access_settings(config)
    assert moved.server.grpc == config.server.grpc
    assert absolute_paths(load_config()) == load_config()


@pytest.mark.parametrize(
    ("tenants", "problem"),
    [
        ("{a: {}}", "tenants.a.key_file"),
        ("{a: {key_fil: k}}", "tenants.a.key_fil: unknown key; did you mean tenants.a.key_file?"),
        ("{a: {key_file: k, weight: 2}}", "tenants.a.weight: not supported yet"),
        ("{a: {key_file: k, tokens_per_s: 0}}", "tenants.a.tokens_per_s"),
        ("{a: {key_file: k, salt: b}, b: {key_file: l}}", "a and b have the same salt"),
        ("{'a b': {key_file: k}}", "wanted a name of letters"),
        ("{a: k}", "tenants.a: got 'k': wanted a mapping"),
        ("[a]", "tenants: got ['a']"),
    ],
)
def test_a_tenant_that_makes_no_sense_is_refused(
    tmp_path: Path, tenants: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        write_tenants(tmp_path, tenants)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("tls", "problem"),
    [
        ({"cert": "c"}, "cert and key: one is given without the other"),
        ({"key": "k"}, "cert and key: one is given without the other"),
        ({"client_ca": "a"}, "client_ca is given without cert and key"),
    ],
)
def test_tls_needs_a_certificate_and_its_key(tls: dict[str, str], problem: str) -> None:
    assert problem in refusal({f"server.tls.{name}": path for name, path in tls.items()})


def test_files_of_tls_are_found_whatever_folder_the_router_runs_in() -> None:
    overrides = {"server.tls.cert": "c", "server.tls.key": "~/k", "server.tls.client_ca": "/a"}
    tls = access_settings(load_config(None, overrides)).tls
    assert tls is not None
    assert tls.cert == os.path.abspath("c") and tls.client_ca == "/a"
    assert tls.key == os.path.expanduser("~/k")
