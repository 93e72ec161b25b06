"""A stepped cluster among whose messages hostile ones are strewn.

A prefill, a decode and a colocated worker serve requests by the protocol; beside their own messages
arrive others. Whatever comes, ``deliver`` and the timers raise nothing, the pools agree with their
owners after every step, no listener hears an index twice, and when the requests have been let go
nothing is held.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random

from kvferry.cluster import wire
from kvferry.cluster.router_config import RouterConfig
from kvferry.cluster.token_run import TokenRun
from kvferry.engine.request import RequestId
from kvferry.worker.codec import BadMessage, decode, encode
from kvferry.worker.messages import Envelope
from tests.fakes import RecordingListener, stub_spec
from tests.fuzz.hostile import damaged, hostile
from tests.sim.cluster import SimCluster

SETTLE_S = 8.0  # virtual: silence ends everything within it


@dataclass
class StrictListener(RecordingListener):
    """Keeps what must not happen, for the router takes a listener's error for the request's."""

    violations: list[str] = field(default_factory=list)

    def on_tokens(self, run: TokenRun, now: float) -> None:
        """Keep the tokens, and what is wrong with their coming."""
        tokens = self.branches.setdefault(run.branch, [])
        if run.first_index != len(tokens) or self.ends or run.branch in self.branch_ends:
            self.violations.append(f"index {run.first_index} after {len(tokens)}, {self.ends}")
        tokens.extend(run.token_ids)


class Arena:
    """One cluster and what has been sent in it."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.outcomes: Counter[str] = Counter()
        self.recent: deque[Envelope] = deque(maxlen=300)
        self.cluster = SimCluster(
            num_colocated=1, decode_blocks=24, router_config=RouterConfig(max_attempts=100)
        )
        self.cluster.filter = self._remember
        self._listeners: list[StrictListener] = []
        self._until_ready()

    def _remember(self, envelope: Envelope) -> tuple[int, ...]:
        self.recent.append(envelope)
        return (0,)

    def _until_ready(self) -> None:
        router = self.cluster.router
        assert router is not None
        assert self.cluster.run(10.0, lambda: not router.workers.not_ready_reasons())

    def submit(self) -> None:
        """Keep a few requests alive."""
        router = self.cluster.router
        assert router is not None
        while len(router.requests) < 4:
            name = f"r{len(self._listeners)}"
            length = self.random.randint(1, 40)
            listener = StrictListener()
            self._listeners.append(listener)
            spec = stub_spec(name, range(length), self.random.randint(1, 12))
            router.submit(spec, listener, self.cluster.clock.now)

    def strike(self, as_bytes: bool) -> None:
        """One hostile message arrives, by way of the codec."""
        envelope = self.random.choice(self.recent)
        try:
            if as_bytes:
                envelope = decode(damaged(encode(envelope), self.random))
            else:
                envelope = decode(encode(hostile(envelope, self.random)))
        except (BadMessage, OverflowError, UnicodeEncodeError):
            self.outcomes["refused by the codec"] += 1
            return
        self.outcomes["delivered"] += 1
        self.cluster._arrive(envelope, self.cluster.clock.now)

    def play(self, num_messages: int, as_bytes: bool = False) -> None:
        """So many hostile messages, a few between any two ticks; then everything is let go."""
        for count in range(num_messages):
            if count % 5 == 0:
                self.submit()
                self.cluster.advance()
                self._report()
            self.strike(as_bytes)
        self.settle()

    def _report(self) -> None:
        """What status would show must be sayable in protobuf."""
        router = self.cluster.router
        assert router is not None
        wire.counters(router).SerializeToString()
        for record in router.workers:
            assert record.view().capacity_tokens >= 0

    def settle(self) -> None:
        """Cancel every request; soon nobody holds anything."""
        router = self.cluster.router
        assert router is not None
        for name in list(router.requests):
            router.cancel(RequestId(name), self.cluster.clock.now)
        self.cluster.run(SETTLE_S)
        assert self.cluster.leftovers() == []
        for listener in self._listeners:
            assert listener.violations == []
            assert len(listener.ends) == 1
        refused = router.channels.refused.total() + router.counters["stale_refused"]
        refused += sum(w.worker.channels.refused.total() for w in self.cluster.workers)
        self.outcomes["refused by receivers, honest ones to a party misled among them"] += refused
