"""Channels: stamping and checking envelopes, the pure half of messaging.

Owns the sequence numbers towards each peer and what has been heard from it, and refuses what is
meant for, or comes from, another life. Knows no sockets and no message meanings.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from kvferry.worker.messages import Body, Envelope, NodeRef
from kvferry.worker.validity import fault

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Channel:
    epoch: int
    sent: int = 0
    heard: int = 0
    is_open: bool = True


class Channels:
    """One node's channels to every peer it knows, keyed by node id.

    A peer is known in one life at a time: ``know`` with a newer epoch begins its channel anew; an
    older one stays refused. A forgotten life that is known again (its router was replaced, say)
    keeps its numbers, for the other side has not begun anew.
    """

    def __init__(self, own: NodeRef) -> None:
        self.own = own
        self.refused: Counter[str] = Counter()
        self._channels: dict[str, _Channel] = {}

    def know(self, peer: NodeRef) -> None:
        """Accept messages from this life of a peer, and no longer from an earlier one."""
        channel = self._channels.get(peer.node_id)
        if channel is None or channel.epoch < peer.epoch:
            self._channels[peer.node_id] = _Channel(peer.epoch)
        elif channel.epoch == peer.epoch:
            channel.is_open = True

    def forget(self, peer: NodeRef) -> None:
        """Refuse whatever still comes from this life of the peer until it is known again."""
        channel = self._channels.get(peer.node_id)
        if channel is not None and channel.epoch == peer.epoch:
            channel.is_open = False

    def stamp(self, receiver: NodeRef, body: Body) -> Envelope:
        """Number a message to a peer."""
        channel = self._channels.get(receiver.node_id)
        if channel is None or channel.epoch < receiver.epoch:
            channel = self._channels[receiver.node_id] = _Channel(receiver.epoch)
        if channel.epoch != receiver.epoch:  # to a life that is over: sent, refused over there
            return Envelope(self.own, receiver, 0, 0, body)
        channel.sent += 1
        return Envelope(self.own, receiver, channel.sent, channel.heard, body)

    def stamp_heartbeat(self, receiver: NodeRef, body: Body) -> Envelope:
        """A heartbeat: unnumbered, so that it may be sent by another thread."""
        return Envelope(self.own, receiver, 0, 0, body)

    def accept(self, envelope: Envelope, introduces: bool = False) -> bool:
        """Check an arriving envelope's ends and values; count and refuse what is stale, unknown or
        impossible. What is refused changes nothing.

        Args:
            envelope: what has arrived.
            introduces: the message may come from a sender not known yet.
        """
        if envelope.receiver != self.own:
            self.refused["receiver"] += 1
            return False
        problem = fault(envelope.body)
        if problem:
            self.refused["impossible"] += 1
            logger.warning("refused a message of %s: %s", envelope.sender, problem)
            return False
        if introduces:
            self.know(envelope.sender)
        channel = self._channels.get(envelope.sender.node_id)
        if channel is None or channel.epoch != envelope.sender.epoch or not channel.is_open:
            self.refused["sender"] += 1
            return False
        channel.heard = max(channel.heard, envelope.seq)
        return True
