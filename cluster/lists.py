"""What the router wants of a worker against what the worker says it holds. Pure.

The lists are the retransmission: whatever single message was lost, the next pair of lists shows
it as a difference, and the difference says what to send.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvferry.cluster.routed_request import RoutedRequest, Ticket
from kvferry.engine.request import RequestId
from kvferry.worker.messages import (
    HeldItem,
    Leg,
    LegState,
    NodeRef,
    Received,
    ReserveOutcome,
    WantedItem,
)


@dataclass(slots=True)
class Difference:
    """What a held list shows.

    Attributes:
        unwanted: held there, wanted no longer: to be cancelled.
        answers: (request, what became of its reservation, positions it need not prefill): its place
            is kept while the pool is full, or it has its blocks, or that worker computes its prompt
            unasked; the reply may have been lost.
        decoding: requests whose prompt is whole there: the word of it may have been lost.
        unstarted: reserved there while the router holds the hand-off: its record was lost.
        lost: wanted there, asked for before the list was written, not held: to be asked again.
    """

    unwanted: list[HeldItem] = field(default_factory=list)
    answers: list[tuple[RoutedRequest, ReserveOutcome, int]] = field(default_factory=list)
    decoding: list[RoutedRequest] = field(default_factory=list)
    unstarted: list[RoutedRequest] = field(default_factory=list)
    lost: list[Ticket] = field(default_factory=list)


def compare(
    worker: NodeRef,
    items: Iterable[HeldItem],
    heard: int,
    requests: Mapping[RequestId, RoutedRequest],
) -> Difference:
    """Compare a worker's list with the live requests.

    Args:
        worker: who sent the list.
        items: what it holds for this router.
        heard: number of the newest message of ours that the list knows of; it says nothing of
            what is newer.
        requests: the live requests.
    """
    found = Difference()
    held = set()
    for item in items:
        request = requests.get(item.request_id)
        ticket = None
        if request is not None and request.attempt == item.attempt:
            ticket = request.decode if item.leg is Leg.DECODE else request.prefill
        if request is None or ticket is None or ticket.worker != worker:
            found.unwanted.append(item)
            continue
        held.add((item.request_id, item.leg))
        if item.leg is Leg.DECODE and item.state is LegState.FULL:
            found.answers.append((request, ReserveOutcome.FULL, 0))
        elif item.leg is Leg.DECODE and item.computes and not request.prefill_here:
            found.answers.append((request, ReserveOutcome.COMPUTING, 0))
        elif item.leg is Leg.DECODE and ticket.seq <= heard:
            found.answers.append((request, ReserveOutcome.GRANTED, item.missing_from))
            if item.state is LegState.RUNNING and request.prefill is not None:
                found.decoding.append(request)
            if item.state is LegState.RESERVED and request.holds_hand_off:
                found.unstarted.append(request)
    for request, leg, ticket in _placed(worker, requests.values()):
        if (request.request_id, leg) not in held and ticket.seq <= heard:
            found.lost.append(ticket)
    return found


def wanted_on(worker: NodeRef, requests: Iterable[RoutedRequest]) -> tuple[WantedItem, ...]:
    """Everything that is wanted of a worker, with how far each branch has come."""
    return tuple(
        WantedItem(
            request.request_id,
            request.attempt,
            leg,
            tuple(Received(branch.number, len(branch.delivered)) for branch in request.live),
        )
        for request, leg, _ in _placed(worker, requests)
    )


def _placed(
    worker: NodeRef, requests: Iterable[RoutedRequest]
) -> Iterator[tuple[RoutedRequest, Leg, Ticket]]:
    for request in requests:
        if request.decode is not None and request.decode.worker == worker:
            yield request, Leg.DECODE, request.decode
        if request.prefill is not None and request.prefill.worker == worker:
            yield request, Leg.PREFILL, request.prefill
