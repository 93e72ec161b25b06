"""The protocol under message faults: streams stay exact, and nothing is left behind.

Each message type is lost once and twice, doubled, delayed past later ones; then all at random.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from kvferry.engine.scheduler import SchedulerConfig
from kvferry.worker.messages import Envelope
from tests.fakes import stub_spec
from tests.sim.cluster import SimCluster, body_name

MESSAGES = [
    "Membership",
    "RouterHeartbeat",
    "WorkerHeartbeat",
    "PrefillRequest",
    "CancelLeg",
    "PrefillDone",
    "Reserve",
    "ReserveReply",
    "TokenEvents",
    "WantedList",
    "HeldList",
    "Announce",
    "Acknowledge",
    "PullList",
    "KVEvents",
]
# LegFailed, HandOffRecord, Replay, PullRefused and LeaseEnded are sent only after something has
# gone wrong; they are dropped in the scenarios that cause them.


def submit_mix(cluster: SimCluster) -> None:
    """Prompts of awkward lengths: 1, block − 1, block, block + 1, three chunks; branches, beams."""
    for name, length, num_tokens in (
        ("one", 1, 5),
        ("short", 3, 1),
        ("block", 4, 6),
        ("over", 5, 2),
        ("chunks", 23, 9),
    ):
        prompt = [(7 * i + length) % 900 for i in range(length)]
        cluster.submit(stub_spec(name, prompt, num_tokens))
    stops = range(0, 997, 5)  # so that branches end one by one
    cluster.submit(stub_spec("three", range(600, 606), 6, num_branches=3, stop_token_ids=stops))
    cluster.submit(stub_spec("two", range(700, 708), 5, num_branches=2))
    cluster.submit(stub_spec("beams", range(800, 806), 6, stop_token_ids=stops[::8], num_beams=3))


class FirstOf:
    """Applies a fault to the first ``count`` messages of one type."""

    def __init__(self, kind: str, count: int, deliveries: Sequence[int]) -> None:
        self.kind = kind
        self.left = count
        self.deliveries = deliveries
        self.applied = 0

    def __call__(self, envelope: Envelope) -> Sequence[int]:
        if body_name(envelope.body) == self.kind and self.left:
            self.left -= 1
            self.applied += 1
            return self.deliveries
        return (0,)


FAULTS = {
    "dropped once": (1, ()),
    "dropped twice": (2, ()),
    "doubled": (3, (0, 0)),
    "doubled late": (3, (0, 25)),
    "late": (2, (7,)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", MESSAGES)
def test_streams_stay_exact_when_a_message_is(kind: str, fault: str) -> None:
    cluster = SimCluster(blocks_per_poll=1)
    if kind != "Membership":
        cluster.run(1.5)  # let the cluster come up without faults
    faults = FirstOf(kind, *FAULTS[fault])
    cluster.filter = faults
    submit_mix(cluster)
    if kind in ("WantedList", "HeldList", "PullList"):  # keep something alive past a period
        cluster.submit(stub_spec("long", range(40, 60), 60))
    cluster.run_until_ended(30)
    cluster.assert_exact()
    assert cluster.run(2 * cluster.times.list_period + 0.5, lambda: not cluster.leftovers()), (
        cluster.leftovers()
    )
    if kind not in ("PullList", "HeldList", "WantedList"):
        assert faults.applied, f"no {kind} was sent: the test shows nothing"


def test_no_message_type_goes_untested() -> None:
    """Every body that an undisturbed run sends is in the list above."""
    cluster = SimCluster()
    cluster.run(1.5)
    submit_mix(cluster)
    cluster.submit(stub_spec("long", range(40, 60), 60))
    cluster.run_until_ended()
    cluster.run(3)
    assert set(cluster.sent) <= {*MESSAGES, "PullRefused", "LeaseEnded"}


@pytest.mark.parametrize("seed", range(60))
def test_streams_stay_exact_under_random_faults(seed: int) -> None:
    rng = random.Random(seed)
    cluster = SimCluster(
        num_prefill=rng.choice((1, 2)),
        num_decode=rng.choice((1, 2)),
        decode_blocks=rng.choice((10, 16, 32)),
        prefill_blocks=rng.choice((8, 16, 32)),
        blocks_per_poll=rng.choice((1, 2, 8)),
        scheduler=SchedulerConfig(
            max_num_seqs=rng.choice((2, 8)),
            max_num_batched_tokens=rng.choice((8, 32)),
            chunk_tokens=rng.choice((3, 8)),
            watermark=rng.choice((0.0, 0.1)),
        ),
    )
    cluster.run(1.5)
    seen: Counter[str] = Counter()

    def faults(envelope: Envelope) -> Sequence[int]:
        kind = body_name(envelope.body)
        seen[kind] += 1
        if kind in ("WorkerHeartbeat", "RouterHeartbeat"):
            return (0,)
        draw = rng.random()
        if draw < 0.05:
            return ()
        if draw < 0.1:
            return (0, rng.randrange(30))
        if draw < 0.15:
            return (rng.randrange(10),)
        return (0,)

    cluster.filter = faults
    for i in range(12):
        length = rng.randrange(1, 25)
        prompt = [rng.randrange(900) for _ in range(length)]
        branches, stops = rng.choice((1, 1, 2, 4)), range(0, 997, 7)
        tokens = rng.randrange(1, 12)
        cluster.submit(
            stub_spec(f"r{i}", prompt, tokens, num_branches=branches, stop_token_ids=stops)
        )
        cluster.run(rng.random())
    cluster.run_until_ended(120)
    for name, listener in cluster.listeners.items():
        assert len(listener.ends) == 1
        if listener.ends[0].error is None:
            cluster.assert_whole(name)
        else:  # the retry budget may run out; what was delivered is right all the same
            cluster.assert_prefixes(name)
    cluster.filter = lambda envelope: (0,)
    assert cluster.run(3.5, lambda: not cluster.leftovers()), cluster.leftovers()
