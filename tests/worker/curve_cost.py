"""What the cluster's key costs: ``python -m tests.worker.curve_cost`` prints both sides by turns.

A round trip of a small message between two nodes of one process, and the process's CPU time per
message in bursts; without a key and with one.
"""

from __future__ import annotations

import statistics
import threading
import time

from kvferry.kv_transfer.authentication import NO_KEY, NoKey
from kvferry.worker import messages as m
from kvferry.worker.cluster_key import SECRET_BYTES, ClusterKey
from kvferry.worker.messages import Envelope, NodeRef
from kvferry.worker.network import Network

A, B = NodeRef("a", 1), NodeRef("b", 2)
REPEATS, ROUND_TRIPS, BURST = 5, 1500, 5000
BODY = m.AuditRequest(1)


class Pair:
    """A node that asks and one that answers."""

    def __init__(self, key: ClusterKey | NoKey) -> None:
        self._answered = threading.Semaphore(0)
        self._asks = Network("127.0.0.1", lambda _: self._answered.release(), key=key)
        self._answers = Network("127.0.0.1", self._answer, key=key)
        for each in (self._asks, self._answers):
            each.start()

    def _answer(self, envelope: Envelope) -> None:
        self._answers.send([(self._asks.address, Envelope(B, A, 0, 0, envelope.body))])

    def ask(self, count: int) -> None:
        """So many messages and answers, all at once."""
        self._asks.send([(self._answers.address, Envelope(A, B, 0, 0, BODY))] * count)
        for _ in range(count):
            self._answered.acquire()

    def round_trip_us(self) -> float:
        """Median of one at a time."""
        times = []
        for _ in range(ROUND_TRIPS):
            began = time.perf_counter()
            self.ask(1)
            times.append(time.perf_counter() - began)
        return statistics.median(times) * 1e6

    def cpu_us(self) -> float:
        """CPU time per message, in a burst."""
        began = time.process_time()
        self.ask(BURST)
        return (time.process_time() - began) / (2 * BURST) * 1e6

    def stop(self) -> None:
        """End both."""
        self._asks.stop()
        self._answers.stop()


def main() -> None:
    """Measure by turns, and print."""
    pairs = {"no key": Pair(NO_KEY), "key": Pair(ClusterKey(bytes(SECRET_BYTES)))}
    for pair in pairs.values():
        pair.ask(1)
    for _ in range(REPEATS):
        found = [
            f"{name}: round trip {pair.round_trip_us():.0f} us, CPU {pair.cpu_us():.0f} us each"
            for name, pair in pairs.items()
        ]
        print("; ".join(found))
    for pair in pairs.values():
        pair.stop()


if __name__ == "__main__":
    main()
