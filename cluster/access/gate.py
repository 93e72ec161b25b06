"""Bearer tokens: who a caller is, and what that caller may call.

Tokens are kept as SHA-256 digests and compared in constant time, each with every other. With no
tokens at all anybody may do everything. Pure; knows neither gRPC nor HTTP, but for the form of an
authorization header, which both share.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.cluster.access.secret_files import UnusableSecret, read_secret
from kvferry.cluster.errors import PermissionDenied, Unauthenticated

MIN_TOKEN_CHARS = 16
_NAME = re.compile(rf"[\w.@-]{{1,{MIN_TOKEN_CHARS - 1}}}")  # too short for a token: which is which


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. ``name`` is for people; ``tenant`` is empty for those who run the cluster."""

    name: str
    tenant: str = ""


ANYBODY = Caller("anybody")


@dataclass(frozen=True, slots=True)
class Key:
    """One token, as its digest, and whose it is."""

    digest: bytes
    caller: Caller


class Gate:
    """See the module."""

    def __init__(self, keys: Sequence[Key] = ()) -> None:
        """Raises UnusableSecret if two callers have the same token."""
        self._keys = tuple(keys)
        seen: dict[bytes, Caller] = {}
        for key in self._keys:
            other = seen.setdefault(key.digest, key.caller)
            if other is not key.caller:
                raise UnusableSecret(
                    f"{key.caller.name} and {other.name} have the same token: give each its own"
                )

    @property
    def is_open(self) -> bool:
        """Whether no token is asked for."""
        return not self._keys

    def caller(self, authorization: str | None) -> Caller:
        """Whose token an authorization header carries. Raises Unauthenticated."""
        if self.is_open:
            return ANYBODY
        if authorization is None:
            raise Unauthenticated(
                "no token came: send 'authorization: Bearer TOKEN'; kvferry's commands take it "
                "from KVFERRY_TOKEN or --token-env"
            )
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated("authorization: wanted 'Bearer TOKEN'")
        digest = _digest(token.strip().encode("utf-8", "surrogateescape"))
        found = None
        for key in self._keys:  # all of them: how long it takes tells nothing
            if hmac.compare_digest(key.digest, digest):
                found = key.caller
        if found is None:
            raise Unauthenticated("the token is not known here")
        return found

    def operator(self, authorization: str | None, what: str) -> Caller:
        """Like ``caller``, of those who run the cluster. Raises PermissionDenied for a tenant."""
        caller = self.caller(authorization)
        if caller.tenant:
            raise PermissionDenied(
                f"{what} is for a token of server.auth.tokens_file: it shows or changes what is "
                "everybody's, which a tenant's key may not"
            )
        return caller


def read_keys(key: str, path: str, tenant: str = "") -> list[Key]:
    """The tokens of a file: one a line, with a name before it if it shall have one.

    Empty lines and those that begin with ``#`` count for nothing. Raises UnusableSecret.
    """
    found = list(_keys(key, path, tenant))
    if not found:
        raise UnusableSecret(f"{key}: {path} holds no token, wanted one a line")
    return found


def _keys(key: str, path: str, tenant: str) -> Iterable[Key]:
    try:
        text = read_secret(key, path).decode()
    except UnicodeDecodeError as error:
        raise UnusableSecret(f"{key}: {path} is not UTF-8 text") from error
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{key}: line {number} of {path}"
        if len(words) > 2:
            raise UnusableSecret(f"{where}: wanted TOKEN or NAME TOKEN, got {len(words)} words")
        if len(words[-1]) < MIN_TOKEN_CHARS:
            raise UnusableSecret(
                f"{where}: a token of {len(words[-1])} characters can be guessed, wanted at least "
                f"{MIN_TOKEN_CHARS}; openssl rand -hex 32 makes one"
            )
        if len(words) == 2 and not _NAME.fullmatch(words[0]):  # a token, perhaps: not to be shown
            raise UnusableSecret(
                f"{where}: the name before the token is none, wanted at most "
                f"{MIN_TOKEN_CHARS - 1} letters, digits and . _ @ -; if the two stand the other "
                "way round, write NAME TOKEN"
            )
        name = words[0] if len(words) == 2 else f"line {number}"
        label = f"tenant {tenant} ({name})" if tenant else f"{name} of {key}"
        yield Key(_digest(words[-1].encode()), Caller(label, tenant))


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
