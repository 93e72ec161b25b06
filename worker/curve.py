"""Who may send us messages: CURVE on a listening socket, its door-keeper, and its refusals.

ZeroMQ asks a socket of its own context (the ZAP, its RFC 27) about every peer that has completed
a CURVE handshake; here the peer must have the cluster's own key. What fails before that (other
mechanisms, bytes that are no ZeroMQ at all, a wrong server key) the socket's monitor tells: as a
handshake that failed, or only as a connection that ended without one. Both sockets are polled on
the network thread. Knows no messages.
"""

from __future__ import annotations

import functools
import hmac
import logging
import operator
from collections import Counter

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from kvferry.worker.cluster_key import CurveKeys

logger = logging.getLogger(__name__)

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"kvferry"

_FAILURES = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: "unauthenticated",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "malformed",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "failed",
}
_EVENTS = (
    zmq.Event.ACCEPTED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED,
    *_FAILURES,
)


class DoorKeeper:
    """See the module. Poll ``sockets`` and call ``attend`` with those that are ready.

    Attributes:
        sockets: to be polled for input.
        refused: connections that were refused, by reason.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], listener: zmq.Socket[bytes], keys: CurveKeys
    ) -> None:
        """``listener`` must not be bound yet."""
        self.refused: Counter[str] = Counter(dict.fromkeys(_FAILURES.values(), 0))
        self._wanted = z85.decode(keys.public)
        self._zap: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._zap.bind(ZAP_ADDRESS)
        listener.curve_server = True
        listener.curve_secretkey = keys.secret
        listener.curve_publickey = keys.public
        listener.zap_domain = ZAP_DOMAIN
        wanted = functools.reduce(operator.or_, _EVENTS)
        self._monitor: zmq.Socket[bytes] = listener.get_monitor_socket(wanted)
        self.sockets = (self._zap, self._monitor)
        self._num_handshaking = 0
        self._has_failed = False  # the connection that the next event is of, too

    def attend(self, ready: zmq.Socket[bytes]) -> None:
        """Answer a question, or note a refusal."""
        if ready is self._zap:
            self._answer(ready.recv_multipart())
        else:
            self._note(zmq.Event(parse_monitor_message(ready.recv_multipart())["event"]))

    def _note(self, event: zmq.Event) -> None:
        """Events of a connection follow each other in order, but do not say whose they are.

        If a member leaves while another shakes hands, the first is taken for refused; the second's
        success sets the number right for the next such end.
        """
        failed_before, self._has_failed = self._has_failed, event in _FAILURES
        if event == zmq.Event.ACCEPTED:
            self._num_handshaking += 1
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._num_handshaking -= 1
        elif event in _FAILURES:
            self._num_handshaking -= 1
            self._refuse(_FAILURES[event])
        elif self._num_handshaking > 0 and not failed_before:
            self._num_handshaking -= 1
            self._refuse("malformed")

    def _refuse(self, reason: str) -> None:
        self.refused[reason] += 1
        logger.warning("refused a connection for messages (%s)", reason)

    def _answer(self, question: list[bytes]) -> None:
        """ZAP: version, request id, domain, address, identity, mechanism, credentials."""
        version, request_id = question[:2]
        mechanism, key = question[5], b"".join(question[6:7])
        allowed = mechanism == b"CURVE" and hmac.compare_digest(key, self._wanted)
        status = (b"200", b"OK") if allowed else (b"400", b"not of this cluster")
        self._zap.send_multipart([version, request_id, *status, b"", b""])


def dress(sender: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Make a connecting socket speak CURVE as a member of the cluster to a member of it."""
    sender.curve_secretkey = keys.secret
    sender.curve_publickey = keys.public
    sender.curve_serverkey = keys.public
