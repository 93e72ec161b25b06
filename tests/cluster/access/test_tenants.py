"""Caches that no choice of salt makes common, and rates that hold in the long run."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.cluster.access.gate import ANYBODY, Caller
from kvferry.cluster.access.tenants import BURST_S, Tenant, Tenants, TokenBucket
from kvferry.cluster.errors import InvalidRequest, Overloaded, PermissionDenied

A, B = Caller("a", "a"), Caller("b", "b")
salts = st.text(alphabet=st.sampled_from("ab:01"), min_size=1, max_size=6)
own_salts = st.text(alphabet=st.sampled_from("ab:01"), max_size=8)


@example(salt_a="a", salt_b="a:b", own_a="b:x", own_b="x")
@example(salt_a="a", salt_b="aa", own_a="a", own_b="")
@given(salt_a=salts, salt_b=salts, own_a=own_salts, own_b=own_salts)
def test_no_choice_of_salts_makes_one_tenant_s_cache_another_s(
    salt_a: str, salt_b: str, own_a: str, own_b: str
) -> None:
    tenants = Tenants([Tenant("a", salt_a), Tenant("b", salt_b)])
    if salt_a != salt_b:
        assert tenants.salt(A, own_a) != tenants.salt(B, own_b)
    assert tenants.salt(A, own_a) != tenants.salt(ANYBODY, own_b)
    assert (tenants.salt(A, own_a) == tenants.salt(A, own_b)) is (own_a == own_b)


def test_without_tenants_a_salt_is_the_client_s() -> None:
    assert Tenants().salt(ANYBODY, "own") == "own"


def test_a_request_is_of_its_key_s_tenant_whether_it_says_so_or_not() -> None:
    tenants = Tenants([Tenant("a", "a"), Tenant("b", "b")])
    tenants.check(A, "", 0.0)
    tenants.check(A, "a", 0.0)
    for caller, named in ((A, "b"), (A, "c"), (ANYBODY, "a")):
        with pytest.raises(PermissionDenied, match=f"tenant: got '{named}'"):
            tenants.check(caller, named, 0.0)
    with pytest.raises(InvalidRequest, match="there are no tenants"):
        Tenants().check(ANYBODY, "a", 0.0)


def test_a_tenant_beyond_its_rate_is_told_when_to_come_again() -> None:
    tenants = Tenants([Tenant("a", "a", 100.0), Tenant("b", "b")])
    tenants.check(A, "", 0.0)
    tenants.used(A, 1500, 0.0)  # 1000 in the bucket, so 500 in debt
    tenants.used(B, 10**9, 0.0)
    with pytest.raises(Overloaded) as caught:
        tenants.check(A, "", 1.0)
    assert caught.value.retry_after_s == pytest.approx(4.01)
    tenants.check(B, "", 1.0)
    tenants.check(A, "", 1.0 + 4.01)


@given(
    rate=st.floats(0.1, 1e6),
    steps=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10**5)), max_size=60),
)
def test_in_the_long_run_no_more_is_used_than_the_rate_and_one_debt(
    rate: float, steps: list[tuple[float, int]]
) -> None:
    bucket = TokenBucket(rate)
    now, used, largest = 0.0, 0, 0
    for gap, tokens in steps:
        now += gap
        if bucket.wait_s(now) == 0:
            bucket.use(tokens, now)
            used += tokens
            largest = max(largest, tokens)
    assert used <= rate * (BURST_S + now) + largest + 1e-6 * used + 1


@given(rate=st.floats(0.1, 1e6), debt=st.integers(1, 10**7))
def test_after_the_wait_that_it_told_a_bucket_lets_in(rate: float, debt: int) -> None:
    bucket = TokenBucket(rate)
    bucket.use(debt, 5.0)
    wait_s = bucket.wait_s(5.0)
    assert bucket.wait_s(5.0 + wait_s * (1 + 1e-9) + 1e-9) == 0.0


def test_a_clock_that_stands_or_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(10.0)
    bucket.use(200, 50.0)
    waits = [bucket.wait_s(now) for now in (50.0, 40.0, 50.0)]
    assert all(one == other for one, other in pairwise(waits))


def test_an_idle_tenant_saves_up_no_more_than_a_burst() -> None:
    bucket = TokenBucket(10.0)
    assert bucket.wait_s(0.0) == 0.0
    bucket.use(int(10.0 * BURST_S), 1e6)
    assert bucket.wait_s(1e6) > 0.0
