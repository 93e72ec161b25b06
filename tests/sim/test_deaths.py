"""Deaths under the virtual clock: the router or a worker is killed after each message in turn."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvferry.worker.messages import Envelope, Role
from tests.fakes import stub_output, stub_spec
from tests.sim.cluster import SimCluster
from tests.sim.test_protocol import submit_mix


class KillAfter:
    """Kills after the n-th message since it was set."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.fired = False

    def __call__(self, envelope: Envelope) -> Sequence[int]:
        self.left -= 1
        return (0,)


def started() -> SimCluster:
    cluster = SimCluster(blocks_per_poll=1)
    cluster.run(1.5)
    return cluster


def messages_of_a_whole_run() -> int:
    cluster = started()
    before = sum(cluster.sent.values())
    submit_mix(cluster)
    cluster.run_until_ended()
    return sum(cluster.sent.values()) - before


NUM_MESSAGES = messages_of_a_whole_run()


@pytest.mark.parametrize("count", range(1, NUM_MESSAGES + 1))
def test_workers_are_clean_two_periods_after_the_router_is_killed(count: int) -> None:
    cluster = started()
    kill = KillAfter(count)
    cluster.filter = kill
    submit_mix(cluster)
    cluster.run(30, lambda: kill.left <= 0)
    cluster.kill_router()
    for name in cluster.listeners:
        cluster.assert_prefixes(name)
    cluster.run(2 * cluster.times.list_period)
    assert cluster.leftovers() == []


def test_a_new_router_serves_with_the_same_workers() -> None:
    cluster = started()
    submit_mix(cluster)
    cluster.run(0.2)
    cluster.kill_router()
    cluster.listeners.clear()
    cluster.start_router()
    cluster.run(2.0)
    submit_mix(cluster)
    cluster.run_until_ended()
    cluster.assert_exact()
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("count", range(1, NUM_MESSAGES + 1, 3))
def test_streams_survive_the_death_of_one_of_two_workers(role: str, count: int) -> None:
    cluster = SimCluster(num_prefill=2, num_decode=2, blocks_per_poll=1)
    cluster.run(1.5)
    kill = KillAfter(count)
    cluster.filter = kill
    submit_mix(cluster)
    cluster.run(30, lambda: kill.left <= 0)
    cluster.kill(cluster.named(f"{role}-0"))
    cluster.run_until_ended(30)
    cluster.assert_exact()
    assert cluster.run(4, lambda: not cluster.leftovers()), cluster.leftovers()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_requests_wait_for_a_successor_of_the_only_worker(role: Role) -> None:
    cluster = started()
    submit_mix(cluster)
    cluster.run(0.15)
    victim = cluster.named(f"{role.value}-0")
    cluster.kill(victim)
    cluster.run(3.0)
    assert cluster.router is not None
    assert cluster.router.workers.not_ready_reasons()
    cluster.start_worker(f"{role.value}-0", (role,))
    cluster.run_until_ended(30)
    cluster.assert_exact()
    assert cluster.run(4, lambda: not cluster.leftovers()), cluster.leftovers()


def test_without_a_successor_requests_end_in_one_clear_error() -> None:
    cluster = started()
    cluster.kill(cluster.named("decode-0"))
    listener = cluster.submit(stub_spec("r", range(9), 4))
    cluster.run_until_ended(60)
    (end,) = listener.ends
    assert type(end.error).__name__ == "WorkerLost"
    assert "no live decode worker" in str(end.error)
    assert cluster.run(4, lambda: not cluster.leftovers()), cluster.leftovers()


def test_prefill_killed_after_token_one_leaves_the_delivered_token_standing() -> None:
    """The hand-off record and its announcements never arrive; the router has token 1."""
    cluster = SimCluster(num_prefill=2)
    cluster.run(1.5)
    handed_off = []

    def lose_hand_off(envelope: Envelope) -> Sequence[int]:
        body = envelope.body
        if getattr(body, "hand_off", None) is not None and type(body).__name__ == "Announce":
            handed_off.append(envelope.sender)
            return ()
        return (0,)

    cluster.filter = lose_hand_off
    listener = cluster.submit(stub_spec("r", range(30, 53), 8))
    assert cluster.run(10, lambda: bool(listener.tokens) and bool(handed_off))
    delivered = list(listener.tokens)
    cluster.kill(next(w for w in cluster.workers if w.ref == handed_off[0]))
    cluster.filter = lambda envelope: (0,)
    cluster.run_until_ended(30)
    cluster.assert_exact()
    assert listener.tokens[: len(delivered)] == delivered
    assert cluster.run(4, lambda: not cluster.leftovers()), cluster.leftovers()


def test_delivered_tokens_stand_even_when_the_retry_would_sample_another() -> None:
    """Token 1 delivered, its workers killed, the logits of those that remain perturbed."""
    cluster = SimCluster(num_prefill=2, num_decode=2)
    cluster.run(1.5)
    prompt = list(range(30, 53))
    listener = cluster.submit(stub_spec("r", prompt, 8))
    assert cluster.run(10, lambda: len(listener.tokens) == 1)
    for sim in cluster.workers:
        if sim.ref.node_id.endswith("-0"):
            cluster.kill(sim)
        else:
            sim.runner.shift = 1
    cluster.run(0.3)  # what was on its way still arrives
    delivered = list(listener.tokens)
    assert 1 <= len(delivered) < 8
    cluster.run_until_ended(30)
    assert stub_output(prompt, 1, shift=1) != delivered[:1], "the retry samples another token 1"
    rest = stub_output([*prompt, *delivered], 8 - len(delivered), shift=1)
    assert listener.tokens == delivered + rest
    assert [end.error for end in listener.ends] == [None]


def test_prefill_killed_when_its_only_announcement_was_lost_is_found_out() -> None:
    """A prompt of one chunk: token 1 is delivered, decode has never heard of its source."""
    cluster = SimCluster(num_prefill=2)
    cluster.run(1.5)
    lost = []

    def lose_announcements(envelope: Envelope) -> Sequence[int]:
        if type(envelope.body).__name__ == "Announce":
            lost.append(envelope.sender)
            return ()
        return (0,)

    cluster.filter = lose_announcements
    listener = cluster.submit(stub_spec("r", range(30, 35), 6))
    assert cluster.run(5, lambda: bool(listener.tokens) and bool(lost))
    cluster.kill(next(w for w in cluster.workers if w.ref == lost[0]))
    cluster.filter = lambda envelope: (0,)
    cluster.run_until_ended(30)
    cluster.assert_exact()
    assert cluster.run(4, lambda: not cluster.leftovers()), cluster.leftovers()
