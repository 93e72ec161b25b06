"""Channels: both ends are named, numbers only rise, and another life is refused and counted."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvferry.worker.channel import Channels
from kvferry.worker.messages import Envelope, NodeRef, RouterHeartbeat

OWN = NodeRef("decode-0", 5)
PEER = NodeRef("router", 2)
BODY = RouterHeartbeat()


def arriving(
    sender: NodeRef = PEER, receiver: NodeRef = OWN, seq: int = 1, heard: int = 0
) -> Envelope:
    return Envelope(sender, receiver, seq, heard, BODY)


def knowing(peer: NodeRef = PEER) -> Channels:
    channels = Channels(OWN)
    channels.know(peer)
    return channels


def test_a_known_peer_in_its_present_life_is_accepted() -> None:
    channels = knowing()
    assert channels.accept(arriving())
    assert not channels.refused


def test_a_message_to_another_life_of_this_node_is_refused_and_counted() -> None:
    channels = knowing()
    for epoch in (OWN.epoch - 1, OWN.epoch + 1):
        assert not channels.accept(arriving(receiver=NodeRef(OWN.node_id, epoch), seq=9))
    assert not channels.accept(arriving(receiver=NodeRef("decode-1", OWN.epoch), seq=9))
    assert channels.refused == {"receiver": 3}
    assert channels.stamp(PEER, BODY).heard == 0, "what was refused was not heard"


def test_a_message_to_another_life_introduces_nobody() -> None:
    channels = Channels(OWN)
    other = NodeRef(OWN.node_id, OWN.epoch - 1)
    assert not channels.accept(arriving(receiver=other), introduces=True)
    assert not channels.accept(arriving())
    assert channels.refused == {"receiver": 1, "sender": 1}


def test_an_unknown_sender_is_refused_and_counted_and_stays_unknown() -> None:
    channels = Channels(OWN)
    assert not channels.accept(arriving())
    assert not channels.accept(arriving())
    assert channels.refused == {"sender": 2}


def test_an_introduction_makes_its_sender_known() -> None:
    channels = Channels(OWN)
    assert channels.accept(arriving(seq=3), introduces=True)
    assert channels.accept(arriving(seq=4))
    assert channels.stamp(PEER, BODY).heard == 4


def test_an_older_life_is_refused_even_if_it_introduces_itself() -> None:
    channels = knowing()
    older = NodeRef(PEER.node_id, PEER.epoch - 1)
    assert not channels.accept(arriving(older), introduces=True)
    channels.know(older)
    assert not channels.accept(arriving(older))
    assert channels.accept(arriving())
    assert channels.refused == {"sender": 2}


def test_a_newer_life_begins_anew_and_ends_the_older_one() -> None:
    channels = knowing()
    channels.stamp(PEER, BODY)
    channels.accept(arriving(seq=8))
    newer = NodeRef(PEER.node_id, PEER.epoch + 1)
    channels.know(newer)
    assert not channels.accept(arriving(seq=9))
    first = channels.stamp(newer, BODY)
    assert (first.seq, first.heard) == (1, 0)


def test_a_life_that_is_over_is_still_sent_to_but_takes_no_number_of_the_present_one() -> None:
    channels = knowing(NodeRef(PEER.node_id, PEER.epoch + 1))
    late = channels.stamp(PEER, BODY)
    assert (late.receiver, late.seq, late.heard) == (PEER, 0, 0)
    assert channels.stamp(NodeRef(PEER.node_id, PEER.epoch + 1), BODY).seq == 1


def test_messages_to_a_peer_are_numbered_from_one_without_gap() -> None:
    channels = knowing()
    other = NodeRef("router-1", 1)
    channels.know(other)
    envelopes = [channels.stamp(PEER, BODY) for _ in range(3)]
    assert channels.stamp(other, BODY).seq == 1
    assert [e.seq for e in envelopes] == [1, 2, 3]
    assert all((e.sender, e.receiver) == (OWN, PEER) for e in envelopes)


def test_a_heartbeat_has_no_number_and_says_nothing_of_what_was_heard() -> None:
    channels = knowing()
    channels.accept(arriving(seq=4))
    beat = channels.stamp_heartbeat(PEER, BODY)
    assert (beat.sender, beat.receiver, beat.seq, beat.heard) == (OWN, PEER, 0, 0)
    assert channels.stamp(PEER, BODY).seq == 1
    channels.accept(replace(arriving(), seq=0))
    assert channels.stamp(PEER, BODY).heard == 4, "an arriving heartbeat takes nothing back"


@given(st.lists(st.integers(0, 20), min_size=1))
def test_heard_is_the_highest_number_whatever_the_order(seqs: list[int]) -> None:
    channels = knowing()
    for place, seq in enumerate(seqs):
        assert channels.accept(arriving(seq=seq))
        assert channels.stamp(PEER, BODY).heard == max(seqs[: place + 1])


def test_a_forgotten_peer_is_refused_until_it_is_known_again_with_its_old_numbers() -> None:
    """The other side has not begun anew: if our numbers did, its lists would judge wrongly."""
    channels = knowing()
    channels.accept(arriving(seq=7))
    channels.stamp(PEER, BODY)
    channels.forget(PEER)
    assert not channels.accept(arriving(seq=8))
    assert channels.refused == {"sender": 1}
    channels.know(PEER)
    assert channels.accept(arriving(seq=9))
    again = channels.stamp(PEER, BODY)
    assert (again.seq, again.heard) == (2, 9)


def test_forgetting_another_life_or_a_stranger_changes_nothing() -> None:
    channels = knowing()
    channels.forget(NodeRef(PEER.node_id, PEER.epoch - 1))
    channels.forget(NodeRef(PEER.node_id, PEER.epoch + 1))
    channels.forget(NodeRef("stranger", 1))
    assert channels.accept(arriving())
    assert not channels.accept(arriving(NodeRef("stranger", 1)))


def test_knowing_a_peer_twice_keeps_its_numbers() -> None:
    channels = knowing()
    channels.stamp(PEER, BODY)
    channels.accept(arriving(seq=3))
    channels.know(PEER)
    again = channels.stamp(PEER, BODY)
    assert (again.seq, again.heard) == (2, 3)
