"""Who may send us messages: CURVE on a listening socket, its door-keeper, and its refusals.

ZeroMQ asks a socket of its own context (the ZAP, its RFC 27) about every peer that has completed
a CURVE handshake; here the peer must have the cluster's own key, and where nobody answers the
question nobody gets in. What fails before that (other mechanisms, bytes that are no ZeroMQ at all,
a wrong server key, a handshake that takes too long) the socket's monitor tells: as a handshake that
failed, or only as a connection that ended without one. Both sockets are polled on the network
thread. Knows no messages.
"""

from __future__ import annotations

import functools
import hmac
import logging
import operator
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from kvferry.kv_cache.line_limit import LineLimit
from kvferry.worker.cluster_key import CurveKeys

logger = logging.getLogger(__name__)

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"kvferry"
HANDSHAKE_S = 2.0
"""A handshake that takes longer is ended, and what it has sent is forgotten."""

UNKNOWN = "an unknown address"

_FAILURES = {
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "malformed",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "failed",
}
_EVENTS = (
    zmq.Event.ACCEPTED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.DISCONNECTED,
    *_FAILURES,
)


@dataclass(slots=True)
class _Caller:
    """A connection: where it comes from, when it came, whether it may still shake hands."""

    address: str
    came_at: float
    is_undecided: bool = True


class Callers:
    """Whose connection an event is of: pure book-keeping of a socket monitor's events.

    The monitor names a connection, by its descriptor, where it begins and where it ends, and a
    handshake that fails ends its connection at once. Of one that is decided by the cluster's key
    it says only that there is one. That is taken to be the youngest undecided: honest handshakes
    take a few milliseconds. If it was another, that one is known to have been decided once it has
    stayed for longer than a handshake may take. So a wrong guess hides one refusal at most, and
    takes a member for refused only if that leaves within those seconds.
    """

    def __init__(self, handshake_s: float = HANDSHAKE_S) -> None:
        self._handshake_s = handshake_s
        self._open: dict[int, _Caller] = {}
        self._failure: str | None = None  # of the connection whose end comes next

    def came(self, descriptor: int, address: str, now: float) -> None:
        """A connection was accepted."""
        self._open[descriptor] = _Caller(address, now)

    def decided(self) -> None:
        """A handshake was completed: its peer is let in, or has been told that it is not."""
        for caller in reversed(self._open.values()):
            if caller.is_undecided:
                caller.is_undecided = False
                return

    def failed(self, reason: str) -> None:
        """The connection that ends next has failed to shake hands."""
        self._failure = reason

    def left(self, descriptor: int, now: float) -> tuple[str, str] | None:
        """A connection has ended. Reason and address if it was refused."""
        caller = self._open.pop(descriptor, None)
        reason, self._failure = self._failure, None
        if reason is not None:
            return reason, UNKNOWN if caller is None else caller.address
        if caller is None or not caller.is_undecided or now - caller.came_at > self._handshake_s:
            return None
        return "malformed", caller.address

    @property
    def num_open(self) -> int:
        """Connections that have not ended."""
        return len(self._open)


class DoorKeeper:
    """See the module. Poll ``sockets`` and call ``attend`` with those that are ready.

    Attributes:
        sockets: to be polled for input.
        refused: connections that were refused, by reason.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listener: zmq.Socket[bytes],
        keys: CurveKeys,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``listener`` must not be bound yet."""
        reasons = ("unauthenticated", *_FAILURES.values())
        self.refused: Counter[str] = Counter(dict.fromkeys(reasons, 0))
        self._lines = LineLimit(time.monotonic)
        self._wanted = z85.decode(keys.public)
        self._clock = clock
        self._callers = Callers()
        self._zap: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._zap.bind(ZAP_ADDRESS)
        listener.curve_server = True
        listener.curve_secretkey = keys.secret
        listener.curve_publickey = keys.public
        listener.zap_domain = ZAP_DOMAIN
        listener.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else without an answer all are let in
        wanted = functools.reduce(operator.or_, _EVENTS)
        self._listener = listener
        self._monitor: zmq.Socket[bytes] = listener.get_monitor_socket(wanted)
        self.sockets = (self._zap, self._monitor)

    def attend(self, ready: zmq.Socket[bytes]) -> None:
        """Answer a question, or note a refusal."""
        if ready is self._zap:
            self._answer(ready.recv_multipart())
        else:
            event = parse_monitor_message(ready.recv_multipart())
            self._note(zmq.Event(event["event"]), event["value"])

    def close(self) -> None:
        """Close the listener, and only then who would answer for it."""
        self._listener.disable_monitor()
        self._listener.close()
        self._monitor.close(linger=0)
        self._zap.close(linger=0)

    def _note(self, event: zmq.Event, value: int) -> None:
        if event == zmq.Event.ACCEPTED:
            self._callers.came(value, _peer_of(value), self._clock())
        elif event in (zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.HANDSHAKE_FAILED_AUTH):
            self._callers.decided()
        elif event in _FAILURES:
            self._callers.failed(_FAILURES[event])
        else:
            refused = self._callers.left(value, self._clock())
            if refused is not None:
                self._refuse(*refused)

    def _refuse(self, reason: str, address: str) -> None:
        """Count and log one; the only place where this port does either."""
        text = f"refused a connection for messages from {address} ({reason})"
        if (line := self._lines.line(reason, text)) is not None:
            logger.warning("%s", line)
        self.refused[reason] += 1

    def _answer(self, question: list[bytes]) -> None:
        """ZAP: version, request id, domain, address, identity, mechanism, credentials."""
        version, request_id = question[:2]
        mechanism, key = question[5], b"".join(question[6:7])
        allowed = mechanism == b"CURVE" and hmac.compare_digest(key, self._wanted)
        if not allowed:
            self._refuse("unauthenticated", question[3].decode("ascii", "replace"))
        status = (b"200", b"OK") if allowed else (b"400", b"not of this cluster")
        self._zap.send_multipart([version, request_id, *status, b"", b""])


def _peer_of(descriptor: int) -> str:
    """The other end of a connection that ZeroMQ has accepted, if it still has it.

    A duplicate is asked, so that ZeroMQ's own descriptor stays its own whatever happens here. If
    the connection has ended meanwhile, the number may stand for another: at worst the log names it.
    """
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        return UNKNOWN
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:  # it is no socket any more
        os.close(duplicate)
        return UNKNOWN
    try:
        with connection:
            host, port = connection.getpeername()[:2]
    except (OSError, ValueError, TypeError):
        return UNKNOWN
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def dress(sender: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Make a connecting socket speak CURVE as a member of the cluster to a member of it."""
    sender.curve_secretkey = keys.secret
    sender.curve_publickey = keys.public
    sender.curve_serverkey = keys.public
