"""Tenants: whose cache a request may share, and how many tokens a tenant may use.

Pure: the clock is an argument. Knows callers and requests' names and salts; does not know where a
tenant's key came from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.cluster.access.gate import Caller
from kvferry.cluster.errors import InvalidRequest, Overloaded, PermissionDenied

BURST_S = 10.0
"""A tenant that has been idle may use the tokens of so many seconds at once."""


class TokenBucket:
    """Refills at ``rate`` per second up to ``BURST_S`` seconds' worth; begins full.

    What a request may use at most is taken when it begins, and what it has left over is given back
    when it ends. The bucket may go below zero by that; nothing may begin before it is above zero
    again. So what is under way is bounded too: at any time no more than ``rate`` per second, the
    burst, and one request have been used.
    """

    def __init__(self, rate: float, now: float = float("-inf")) -> None:
        self._rate = rate
        self._most = rate * BURST_S
        self._level = self._most
        self._at = now

    def wait_s(self, now: float) -> float:
        """Seconds until something may begin; 0 for at once."""
        self._refill(now)
        return 0.0 if self._level > 0 else (1.0 - self._level) / self._rate

    def take(self, tokens: int, now: float) -> None:
        """Something begins that uses so many at most."""
        self._refill(now)
        self._level -= tokens

    def give_back(self, tokens: int, now: float) -> None:
        """It has ended, and so many of those taken were not used."""
        self._refill(now)
        self._level = min(self._most, self._level + tokens)

    def _refill(self, now: float) -> None:
        if now > self._at:
            self._level = min(self._most, self._level + (now - self._at) * self._rate)
            self._at = now


@dataclass(frozen=True, slots=True)
class Tenant:
    """``tokens_per_s``: prompt and output together; None: as many as come."""

    name: str
    salt: str
    tokens_per_s: float | None = None


class Tenants:
    """See the module. None at all: requests are what their clients make them."""

    def __init__(self, tenants: Iterable[Tenant] = ()) -> None:
        self._by_name = {tenant.name: tenant for tenant in tenants}
        self._buckets = {
            tenant.name: TokenBucket(tenant.tokens_per_s)
            for tenant in self._by_name.values()
            if tenant.tokens_per_s is not None
        }

    def check(self, caller: Caller, named: str, now: float) -> None:
        """Whether a request that names this tenant (empty: none) may come from this caller now.

        Raises PermissionDenied, InvalidRequest where there are no tenants, and Overloaded.
        """
        if named and not self._by_name:
            raise InvalidRequest(f"tenant: got {named!r}, but there are no tenants; leave it out")
        if named and named != caller.tenant:
            whose = f"tenant {caller.tenant!r}" if caller.tenant else "no tenant"
            raise PermissionDenied(f"tenant: got {named!r}, but the key is that of {whose}")
        bucket = self._buckets.get(caller.tenant)
        wait_s = 0.0 if bucket is None else bucket.wait_s(now)
        if wait_s > 0:
            rate = self._by_name[caller.tenant].tokens_per_s
            raise Overloaded(
                f"tenant {caller.tenant!r} has used its {rate:g} tokens per second, or has set "
                f"them aside for requests that run; try again in {wait_s:.1f} s",
                retry_after_s=wait_s,
            )

    def salt(self, caller: Caller, own: str) -> str:
        """The salt of the caller's block hashes, of which the client chooses ``own``.

        The tenant's part says how long it is, so that no choice makes one tenant's that of another,
        nor that of a caller without a tenant.
        """
        if not self._by_name:
            return own
        salt = self._by_name[caller.tenant].salt if caller.tenant else ""
        return f"{len(salt)}:{salt}:{own}"

    def began(self, caller: Caller, most: int, now: float) -> None:
        """A request of the caller begins: prompt and output have ``most`` tokens, set aside."""
        bucket = self._buckets.get(caller.tenant)
        if bucket is not None:
            bucket.take(most, now)

    def ended(self, caller: Caller, unused: int, now: float) -> None:
        """It has ended; so many of the tokens set aside were neither prompt nor delivered."""
        bucket = self._buckets.get(caller.tenant)
        if bucket is not None:
            bucket.give_back(unused, now)
