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
    tenants.began(A, 1500, 0.0)  # 1000 in the bucket, so 500 in debt
    tenants.began(B, 10**9, 0.0)
    with pytest.raises(Overloaded) as caught:
        tenants.check(A, "", 1.0)
    assert caught.value.retry_after_s == pytest.approx(4.01)
    tenants.check(B, "", 1.0)
    tenants.check(A, "", 1.0 + 4.01)


def test_what_a_request_may_use_is_set_aside_and_comes_back_when_it_ends() -> None:
    tenants = Tenants([Tenant("a", "a", 10.0)])
    begun = 0
    with pytest.raises(Overloaded, match="set them aside"):
        for _ in range(100):
            tenants.check(A, "", 0.0)
            tenants.began(A, 60, 0.0)
            begun += 1
    assert begun == 2  # of 100 tokens in the bucket
    tenants.ended(A, 59, 0.0)
    tenants.check(A, "", 0.0)
    for _ in range(5):
        tenants.ended(A, 10**6, 0.0)
    tenants.began(A, 100, 0.0)  # no more than a burst comes back
    with pytest.raises(Overloaded):
        tenants.check(A, "", 0.0)


@given(
    rate=st.floats(0.1, 1e6),
    steps=st.lists(
        st.tuples(st.floats(0, 100), st.integers(0, 10**5), st.floats(0, 1), st.booleans()),
        max_size=60,
    ),
)
def test_at_any_time_no_more_is_used_than_the_rate_a_burst_and_one_request(
    rate: float, steps: list[tuple[float, int, float, bool]]
) -> None:
    bucket = TokenBucket(rate)
    now, used, largest = 0.0, 0, 0
    running: list[tuple[int, int]] = []  # set aside, and used of it in the end
    for gap, tokens, part, ends in steps:
        now += gap
        if ends and running:
            most, really = running.pop(0)
            bucket.give_back(most - really, now)
            used += really
        elif bucket.wait_s(now) == 0:
            bucket.take(tokens, now)
            running.append((tokens, int(tokens * part)))
            largest = max(largest, tokens)
        under_way = used + sum(most for most, _ in running)
        assert under_way <= rate * (BURST_S + now) + largest + 1e-6 * under_way + 1


@given(rate=st.floats(0.1, 1e6), debt=st.integers(1, 10**7))
def test_after_the_wait_that_it_told_a_bucket_lets_in(rate: float, debt: int) -> None:
    bucket = TokenBucket(rate)
    bucket.take(debt, 5.0)
    wait_s = bucket.wait_s(5.0)
    assert bucket.wait_s(5.0 + wait_s * (1 + 1e-9) + 1e-9) == 0.0


def test_a_clock_that_stands_or_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(10.0)
    bucket.take(200, 50.0)
    waits = [bucket.wait_s(now) for now in (50.0, 40.0, 50.0)]
    assert all(one == other for one, other in pairwise(waits))


def test_an_idle_tenant_saves_up_no_more_than_a_burst() -> None:
    bucket = TokenBucket(10.0)
    assert bucket.wait_s(0.0) == 0.0
    bucket.take(int(10.0 * BURST_S), 1e6)
    assert bucket.wait_s(1e6) > 0.0
