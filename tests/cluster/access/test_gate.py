"""Tokens: files that others can read are refused, and nobody passes without one that is known."""

from __future__ import annotations

import contextlib
import hmac
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.access import gate as gate_module
from kvferry.cluster.access.gate import ANYBODY, MIN_TOKEN_CHARS, Gate, read_keys
from kvferry.cluster.access.secret_files import MAX_BYTES, UnusableSecret, read_public, read_secret
from kvferry.cluster.errors import PermissionDenied, Unauthenticated
from tests.certificates import secret_file

TOKEN, OTHER, KEY = ("t" * MIN_TOKEN_CHARS, "o" * MIN_TOKEN_CHARS, "k" * MIN_TOKEN_CHARS)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    tokens = secret_file(tmp_path / "tokens", f"# ours\n\nalice {TOKEN}\n{OTHER}\n".encode())
    keys = secret_file(tmp_path / "acme", KEY.encode())
    return Gate(
        [
            *read_keys("server.auth.tokens_file", tokens),
            *read_keys("tenants.acme.key_file", keys, "acme"),
        ]
    )


def test_a_known_token_names_its_caller(gate: Gate) -> None:
    assert gate.caller(f"Bearer {TOKEN}").name == "alice of server.auth.tokens_file"
    assert gate.caller(f"bearer  {OTHER} ").name == "line 4 of server.auth.tokens_file"
    tenant = gate.caller(f"Bearer {KEY}")
    assert (tenant.name, tenant.tenant) == ("tenant acme (line 1)", "acme")


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer alice",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN.upper()}",
        "Bearer \udcff",
    ],
)
def test_anything_else_is_refused(gate: Gate, header: str | None) -> None:
    with pytest.raises(Unauthenticated) as caught:
        gate.caller(header)
    assert TOKEN[:8] not in str(caught.value)


@given(token=st.text())
def test_no_text_is_a_token_by_chance(token: str) -> None:
    keys = [gate_module.Key(gate_module._digest(TOKEN.encode()), ANYBODY)]
    if token.strip() != TOKEN:
        with pytest.raises(Unauthenticated):
            Gate(keys).caller(f"Bearer {token}")


def test_a_tenant_is_no_operator(gate: Gate) -> None:
    assert not gate.operator(f"Bearer {TOKEN}", "it").tenant
    with pytest.raises(PermissionDenied, match="tenant's key may not"):
        gate.operator(f"Bearer {KEY}", "it")
    with pytest.raises(Unauthenticated):
        gate.operator(None, "it")


def test_without_tokens_anybody_may() -> None:
    assert Gate().is_open
    assert Gate().caller(None) == Gate().operator("nonsense", "it") == ANYBODY


def test_every_token_is_compared_whichever_is_right(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long the answer takes must not tell which one was nearest."""
    seen: list[int] = []
    inner = hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        seen[-1] += 1
        assert len(a) == len(b) == 32, "digests are compared, not tokens"
        return inner(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for token in (TOKEN, OTHER, KEY):
        seen.append(0)
        gate.caller(f"Bearer {token}")
    assert seen == [3, 3, 3]


def test_tokens_are_not_kept(gate: Gate) -> None:
    assert TOKEN not in repr(vars(gate)) and KEY not in repr(vars(gate))


def test_one_token_of_two_callers_is_refused(tmp_path: Path) -> None:
    path = secret_file(tmp_path / "one", TOKEN.encode())
    with pytest.raises(UnusableSecret, match="same token") as caught:
        Gate([*read_keys("server.auth.tokens_file", path), *read_keys("x", path, "acme")])
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644, 0o601, 0o666])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = secret_file(tmp_path / "tokens", TOKEN.encode())
    os.chmod(path, mode)
    with pytest.raises(UnusableSecret, match=f"mode {mode:04o}") as caught:
        read_secret("server.auth.tokens_file", path)
    assert path in str(caught.value) and "server.auth.tokens_file" in str(caught.value)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o755, 0o664, 0o600])
def test_what_is_public_others_may_read(tmp_path: Path, mode: int) -> None:
    path = secret_file(tmp_path / "ca.pem", b"public")
    os.chmod(path, mode)
    assert read_public("server.tls.client_ca", path) == b"public"


@pytest.mark.parametrize("mode", [0o646, 0o666, 0o602])
def test_but_not_change(tmp_path: Path, mode: int) -> None:
    """Who may write to a client CA may let in whom he likes."""
    path = secret_file(tmp_path / "ca.pem", b"public")
    os.chmod(path, mode)
    with pytest.raises(UnusableSecret, match=f"mode {mode:04o}: other users may change it"):
        read_public("server.tls.client_ca", path)


def test_a_secret_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who owns a file may change it, whatever its mode is."""
    path = secret_file(tmp_path / "tokens", TOKEN.encode())
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:  # the file stays, we are somebody else
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UnusableSecret, match=r"belongs to user \d+, wanted user \d+"):
        read_secret("server.auth.tokens_file", path)
    assert read_public("server.tls.cert", path) == TOKEN.encode()


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o660])
def test_owner_and_group_may(tmp_path: Path, mode: int) -> None:
    path = secret_file(tmp_path / "tokens", TOKEN.encode())
    os.chmod(path, mode)
    assert read_secret("x", path) == TOKEN.encode()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "holds no token"),
        (b"# nothing\n\n", "holds no token"),
        (b"short", "5 characters can be guessed"),
        (b"a b " + TOKEN.encode(), "3 words"),
        (b"\xff\xfe" + TOKEN.encode(), "not UTF-8"),
        (b"x" * (MAX_BYTES + 1), "more than"),
    ],
)
def test_a_file_that_holds_no_tokens_is_refused(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    path = secret_file(tmp_path / "tokens", content)
    with pytest.raises(UnusableSecret, match=problem):
        read_keys("server.auth.tokens_file", path)


@pytest.mark.parametrize(
    "name", ["n" * MIN_TOKEN_CHARS, "n" * 65, "a/b", "a:", "f" * 64, "3b1cf47e-9d1c-4d6f-8c55"]
)
def test_a_token_in_the_place_of_a_name_is_not_taken_for_one(tmp_path: Path, name: str) -> None:
    """It would be in every line of the log."""
    path = secret_file(tmp_path / "tokens", f"{name} {TOKEN}\n".encode())
    with pytest.raises(UnusableSecret, match=r"line 1 of .*write NAME TOKEN") as caught:
        read_keys("server.auth.tokens_file", path)
    assert name not in str(caught.value).replace(path, "")
    assert TOKEN not in str(caught.value)


@given(words=st.tuples(st.text("abc09-", min_size=1), st.text("xyz09-", min_size=16)))
def test_no_word_may_be_both_a_name_and_a_token(words: tuple[str, str]) -> None:
    """So that which is which cannot be mistaken, in either order."""
    taken = []
    with tempfile.TemporaryDirectory() as folder:
        for number, line in enumerate((words, words[::-1])):
            path = secret_file(Path(folder) / str(number), " ".join(line).encode())
            with contextlib.suppress(UnusableSecret):
                taken += read_keys("x", path)
    assert len(taken) <= 1


@pytest.mark.parametrize("name", ["alice", "al_ice-2", "a.b@c", "Zoë", "n" * (MIN_TOKEN_CHARS - 1)])
def test_names_are_short_words(tmp_path: Path, name: str) -> None:
    path = secret_file(tmp_path / "tokens", f"{name} {TOKEN}".encode())
    (key,) = read_keys("x", path)
    assert key.caller.name == f"{name} of x"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UnusableSecret, match="cannot read") as caught:
            read_keys("tenants.a.key_file", str(path))
        assert "tenants.a.key_file" in str(caught.value)
