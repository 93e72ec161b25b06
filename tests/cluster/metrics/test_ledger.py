"""Workers' totals never fall and nothing is counted twice, whatever dies, comes late or returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.deaths import DeathCause
from kvferry.cluster.metrics import catalog
from kvferry.cluster.metrics.ledger import Ledger, Totals, counted
from kvferry.engine.histogram import STEP_SECONDS
from kvferry.worker import messages as m
from kvferry.worker.messages import NodeRef, Role

EVICTIONS = (catalog.EVICTIONS, ())
STEPS = (catalog.STEPS, ())
LOST = (catalog.TRANSFER_FAILURES, ("shm", "stale"))


def report(number: int, evictions: int = 0, steps: int = 0, lost: int = 0) -> m.LoadReport:
    buckets = (steps, *[0] * len(STEP_SECONDS))
    tally = m.TransferTally("shm", 0, 0, (("stale", lost),), m.HistogramReport())
    return m.LoadReport(
        cache=m.CacheCounters(num_evictions=evictions),
        tallies=m.WorkerTallies(
            number, m.HistogramReport(buckets, 0.5 * steps), transfers=(tally,) if lost else ()
        ),
    )


def totals(ledger: Ledger, name: str = "decode-0") -> Totals:
    (found,) = (totals for known, totals in ledger.totals() if known.ref.node_id == name)
    return found


def test_an_older_report_that_comes_late_changes_nothing() -> None:
    ledger, ref = Ledger(1), NodeRef("decode-0", 2)
    ledger.joined(ref, (Role.DECODE,))
    ledger.heard(ref, report(2, evictions=7, steps=3))
    ledger.heard(ref, report(2, evictions=7, steps=3))
    ledger.heard(ref, report(1, evictions=5, steps=1))
    found = totals(ledger)
    assert found.counters[EVICTIONS] == 7
    assert found.histograms[STEPS].counts[0] == 3


def test_a_next_life_adds_to_what_the_last_was_heard_to_have_counted() -> None:
    ledger, first, second = Ledger(1), NodeRef("decode-0", 2), NodeRef("decode-0", 5)
    ledger.joined(first, (Role.DECODE,))
    ledger.heard(first, report(9, evictions=7, steps=3, lost=2))
    ledger.died(first, DeathCause.SILENT)
    assert totals(ledger).counters[LOST] == 2
    ledger.joined(second, (Role.DECODE,))
    assert totals(ledger).counters[EVICTIONS] == 7
    ledger.heard(first, report(10, evictions=100))  # of the life that is over
    ledger.heard(second, report(1, evictions=1, steps=4))
    found = totals(ledger)
    assert (found.counters[EVICTIONS], found.counters[LOST]) == (8, 2)
    assert found.histograms[STEPS].counts[0] == 7
    assert found.histograms[STEPS].total == 3.5
    assert ledger.workers["decode-0"].deaths == {DeathCause.SILENT: 1}


def test_a_life_older_than_the_router_counts_from_its_first_report() -> None:
    ledger, ref = Ledger(9), NodeRef("decode-0", 2)
    ledger.joined(ref, (Role.DECODE,))
    ledger.heard(ref, report(50, evictions=100, steps=10))
    assert totals(ledger).counters[EVICTIONS] == 0
    ledger.heard(ref, report(51, evictions=103, steps=12))
    assert totals(ledger).counters[EVICTIONS] == 3
    assert totals(ledger).histograms[STEPS].counts[0] == 2
    ledger.joined(NodeRef("decode-0", 11), (Role.DECODE,))
    ledger.heard(NodeRef("decode-0", 11), report(1, evictions=2, steps=1))
    assert totals(ledger).counters[EVICTIONS] == 5, "that life is younger: all of it counts"
    assert totals(ledger).histograms[STEPS].counts[0] == 3


def test_who_registers_again_or_was_never_registered_is_not_counted_twice_or_at_all() -> None:
    ledger, ref = Ledger(1), NodeRef("decode-0", 2)
    ledger.heard(NodeRef("stranger", 3), report(1, evictions=1))
    ledger.joined(ref, (Role.DECODE,))
    ledger.heard(ref, report(1, evictions=4))
    ledger.joined(ref, (Role.DECODE,))
    ledger.joined(NodeRef("decode-0", 1), (Role.DECODE,))
    assert totals(ledger).counters[EVICTIONS] == 4
    assert len(ledger.workers) == 1


@dataclass
class Model:
    """What the worker really counted in each life, and what of it was told before its end."""

    told: list[int] = field(default_factory=lambda: [0])


@given(
    st.lists(
        st.tuples(st.sampled_from(["tell", "tell", "lose", "die", "late"]), st.integers(0, 9)),
        max_size=40,
    )
)
def test_totals_are_the_sum_of_what_each_life_last_told(steps: list[tuple[str, int]]) -> None:
    ledger, epoch, number, own = Ledger(1), 2, 0, 0
    model, sent, last = Model(), [], 0
    ledger.joined(NodeRef("decode-0", epoch), (Role.DECODE,))
    for what, amount in steps:
        ref = NodeRef("decode-0", epoch)
        if what in ("tell", "lose"):
            number, own = number + 1, own + amount
        if what == "tell":
            sent.append((ref, report(number, evictions=own, steps=own)))
            ledger.heard(*sent[-1])
            model.told[-1] = own
        elif what == "late" and sent:
            ledger.heard(*sent[amount % len(sent)])
        elif what == "die":
            epoch, number, own = epoch + 1, 0, 0
            model.told.append(0)
            ledger.joined(NodeRef("decode-0", epoch), (Role.DECODE,))
        found = totals(ledger)
        assert found.counters[EVICTIONS] == sum(model.told) >= last
        last = sum(model.told)
        if last:
            assert found.histograms[STEPS].num_observed == last


def test_a_report_without_tallies_counts_nothing() -> None:
    found = counted(m.LoadReport())
    assert not +found.counters
    assert found.histograms == {}
