"""Log-probabilities belong to their tokens, and those of the prompt come once, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.worker.messages import Envelope, PrefillDone, TokenEvents
from tests.fakes import stub_logprobs, stub_spec
from tests.sim.cluster import SimCluster

NAMES = ("a", "b", "c", "d")


def submit_all(cluster: SimCluster, length: int = 19, max_tokens: int = 9) -> None:
    """Requests that want log-probabilities, and one that wants none."""
    cluster.run(1.5)
    for place, name in enumerate(NAMES):
        cluster.submit(stub_spec(name, range(place, length + place), max_tokens, logprobs=1))
    cluster.submit(stub_spec("none", range(length), max_tokens))


def assert_exact(cluster: SimCluster) -> None:
    """Every stream has its tokens, each with its own log-probabilities, the prompt's once."""
    cluster.run_until_ended()
    cluster.assert_exact()
    for name, listener in cluster.listeners.items():
        prompt = cluster.specs[name].prompt_token_ids
        own = [stub_logprobs(t, p) for p, t in enumerate(listener.tokens, len(prompt))]
        of_prompt = [stub_logprobs(t, p) for p, t in enumerate(prompt)][1:]
        assert listener.logprobs == ([] if name == "none" else own), name
        assert listener.prompt_logprobs == ([] if name == "none" else of_prompt), name
    assert cluster.run(5, lambda: not cluster.leftovers()), cluster.leftovers()


@pytest.mark.parametrize(
    "counts", [{}, {"num_prefill": 0, "num_decode": 0, "num_colocated": 1}], ids=["1+1", "1"]
)
def test_they_come_with_their_tokens(counts: dict[str, Any]) -> None:
    cluster = SimCluster(**counts)
    submit_all(cluster)
    assert_exact(cluster)


def test_the_prompt_s_come_although_decode_s_first_event_overtakes_prefill() -> None:
    cluster = SimCluster()
    late = lambda envelope: (40,) if isinstance(envelope.body, PrefillDone) else (0,)  # noqa: E731
    cluster.filter = late
    submit_all(cluster)
    assert_exact(cluster)


@pytest.mark.parametrize("kind", [PrefillDone, TokenEvents])
def test_lost_and_doubled_messages_repeat_and_lose_none(kind: type[Any]) -> None:
    cluster = SimCluster()
    seen: list[Envelope] = []

    def unreliable(envelope: Envelope) -> tuple[int, ...]:
        if not isinstance(envelope.body, kind):
            return (0,)
        seen.append(envelope)
        return [(), (0, 0), (3, 1)][len(seen) % 3]

    cluster.filter = unreliable
    submit_all(cluster)
    assert_exact(cluster)
    assert len(seen) > 3


def test_preemption_computes_the_prompt_again_and_tells_of_it_once() -> None:
    counts: dict[str, Any] = {"num_prefill": 0, "num_decode": 0, "num_colocated": 1}
    cluster = SimCluster(**counts, decode_blocks=16)
    submit_all(cluster, max_tokens=24)
    assert_exact(cluster)
    assert cluster.router is not None and cluster.router.counters["preempted"]


def test_a_preempted_sequence_with_output_asks_for_the_prompt_s_no_more() -> None:
    cluster = SimCluster(decode_blocks=16)
    asked: list[int] = []
    execute = cluster.named("decode").runner.execute

    def watched(output: Any) -> Any:
        asked.extend(len(share.prompt_targets) for share in output.sequences)
        return execute(output)

    cluster.named("decode").runner.execute = watched
    submit_all(cluster, max_tokens=24)
    assert_exact(cluster)
    assert cluster.router is not None and cluster.router.counters["preempted"]
    assert set(asked) == {0}


@pytest.mark.parametrize("num_tokens", [0, 1, 4])
def test_the_death_of_a_decode_worker_goes_on_with_the_next_one(num_tokens: int) -> None:
    cluster = SimCluster(num_decode=2)
    submit_all(cluster)
    assert cluster.run(20, lambda: len(cluster.listeners["a"].tokens) >= num_tokens)
    assert cluster.router is not None
    request = cluster.router.requests[cluster.specs["a"].request_id]
    cluster.run(2, lambda: request.decode_ref is not None)
    cluster.kill(next(sim for sim in cluster.workers if sim.ref == request.decode_ref))
    assert_exact(cluster)
    assert request.num_attempts > 1
