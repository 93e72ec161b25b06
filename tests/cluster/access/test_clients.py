"""What clients show, and what they refuse to show: a token goes nowhere in the clear."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.cluster.access.secret_files import UnusableSecret
from kvferry.cluster.cli import main
from kvferry.cluster.cli.serve import warnings
from kvferry.cluster.client import Client
from kvferry.cluster.client_security import ClientSecurity, TokenInTheClear
from kvferry.cluster.config import load_config
from tests.certificates import Authority
from tests.cluster.access.locked import ACME, OPERATOR, Locked

TOKEN = "a-token-0123456789"


@pytest.mark.parametrize(
    "endpoint", ["192.0.2.1:50051", "kvferry.example:50051", "[2001:db8::1]:1"]
)
def test_a_token_goes_to_no_other_machine_without_tls(endpoint: str) -> None:
    with pytest.raises(TokenInTheClear) as caught:
        Client(endpoint, security=ClientSecurity(token=TOKEN))
    assert endpoint in str(caught.value) and TOKEN not in str(caught.value)
    Client(endpoint).close()


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "localhost:1", "[::1]:1"])
def test_on_this_machine_it_may(endpoint: str) -> None:
    Client(endpoint, security=ClientSecurity(token=TOKEN)).close()


def test_files_go_together(authorities: tuple[Authority, Authority], tmp_path: Path) -> None:
    ours, _ = authorities
    pair = ours.pair("client")
    for given in (
        {"tls_cert": pair.cert},
        {"tls_key": pair.key},
        {"tls_cert": pair.cert, "tls_key": pair.key},
    ):
        with pytest.raises(UnusableSecret):
            ClientSecurity(**given)
    for ca in (str(tmp_path / "none"), str(tmp_path)):
        with pytest.raises(UnusableSecret, match="tls-ca"):
            ClientSecurity(tls_ca=ca).channel_credentials("x:1")
        with pytest.raises(UnusableSecret, match="tls-ca"):
            ClientSecurity(tls_ca=ca).ssl_context()


def test_a_client_s_key_that_others_may_read_is_refused(
    authorities: tuple[Authority, Authority],
) -> None:
    ours, _ = authorities
    pair = ours.pair("client")
    Path(pair.key).chmod(0o644)
    security = ClientSecurity(ours.ca, pair.cert, pair.key)
    with pytest.raises(UnusableSecret, match="mode 0644"):
        security.channel_credentials("x:1")
    with pytest.raises(UnusableSecret, match="mode 0644"):
        security.ssl_context()


def test_a_token_is_shown_nowhere() -> None:
    assert TOKEN not in repr(ClientSecurity(token=TOKEN))


# --- the command line ---------------------------------------------------------------------------


def at(locked: Locked) -> tuple[str, ...]:
    files = ("--tls-ca", locked.ours.ca, "--tls-cert", locked.pair.cert)
    return ("--endpoint", locked.stack.endpoint, *files, "--tls-key", locked.pair.key, "--json")


def test_a_command_takes_its_token_from_the_environment(
    locked: Locked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFERRY_TOKEN", OPERATOR)
    assert main(("status", *at(locked))) == 0
    assert json.loads(capsys.readouterr().out)["ready"]
    monkeypatch.setenv("MINE", ACME)
    assert main(("status", *at(locked), "--token-env", "MINE")) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "PermissionDenied"
    monkeypatch.setenv("KVFERRY_TOKEN", "")
    assert main(("status", *at(locked))) == 1
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "Unauthenticated"


def test_files_may_come_from_the_environment(
    locked: Locked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFERRY_TOKEN", OPERATOR)
    monkeypatch.setenv("KVFERRY_TLS_CA", locked.ours.ca)
    monkeypatch.setenv("KVFERRY_TLS_CERT", locked.pair.cert)
    monkeypatch.setenv("KVFERRY_TLS_KEY", locked.pair.key)
    assert main(("status", "--endpoint", locked.stack.endpoint, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["ready"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--token-env", "NOT_SET"), "--token-env: got NOT_SET, which is not set"),
        (("--tls-cert", "x"), "tls-cert and tls-key"),
        (("--tls-ca", "missing"), "tls-ca: cannot read missing"),
    ],
)
def test_what_cannot_be_used_is_an_error_of_usage(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(("status", *flags)) == 2
    assert said in capsys.readouterr().err


def test_a_demo_has_no_use_for_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "kvferry.yaml"
    config.write_text("tenants: {a: {key_file: k}}\n", encoding="utf-8")
    assert main(("demo", "--config", str(config))) == 2
    assert "for kvferry serve" in capsys.readouterr().err


# --- what serve warns of ------------------------------------------------------------------------

TLS = {"server.tls.cert": "c", "server.tls.key": "k"}
AUTH = {"server.auth.tokens_file": "t"}
OPEN = {"server.grpc": "0.0.0.0:1"}


@pytest.mark.parametrize(
    ("given", "ray_auth_mode", "words"),
    [
        ({}, None, []),
        ({**OPEN, **TLS, **AUTH}, "token", []),
        ({**OPEN, **TLS, "server.tls.client_ca": "a"}, None, []),
        (OPEN, None, ["neither TLS nor authentication"]),
        ({**OPEN, **TLS}, None, ["no authentication"]),
        ({**OPEN, **AUTH}, None, ["no TLS"]),
        ({"server.metrics": "0.0.0.0:1"}, None, ["read the metrics"]),
        ({"server.metrics": "0.0.0.0:1", **AUTH}, None, []),
        ({"server.http": "[::]:1"}, None, ["neither TLS nor authentication"]),
        ({}, "disabled", ["run code here"]),
        ({"ray.address": "192.0.2.1:6379"}, "disabled", []),
    ],
)
def test_serve_warns_of_what_lets_in_more_than_one_may_think(
    given: dict[str, str], ray_auth_mode: str | None, words: list[str]
) -> None:
    said = list(warnings(load_config(None, given), ray_auth_mode))
    assert len(said) == len(words), said
    assert all(word in line for word, line in zip(words, said, strict=True))
