"""A reader's connection to one source: an ordered queue of blocks, read into the own pool.

Blocks pass through two queues, both in the order in which they were asked for::

    pending  --request-->  in flight  --header, bytes, trailer-->  ended

What is in flight is bounded in bytes. All receiving happens in ``step``, so between two calls no
byte is written anywhere, and a cancelled block's remaining bytes go to a scratch buffer.

A connection that breaks ends what is in flight FAILED; what is pending is asked for over a new
connection, tried once per read, so that a pair heals by itself. A closed peer stays closed.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable

from kvferry.kv_transfer.choosing import ONLY_ONE, TCP
from kvferry.kv_transfer.connector import Move, PeerInfo, ReadId, ReadStatus, TransferFailed
from kvferry.kv_transfer.tcp_dial import Dial
from kvferry.kv_transfer.tcp_receiver import Receiver, TargetPool, Wanted
from kvferry.kv_transfer.tcp_wire import (
    MAX_IN_FLIGHT_BLOCKS,
    WORD,
    BrokenStream,
    Kind,
    Request,
)


class TcpPeer:
    """See the module.

    Attributes:
        info: what the source said of itself.
        setup_s: seconds that ``connect`` took, kept apart from the reads' own time.
        error: why the connection broke last; empty if it did not.
        pool: what blocks are read into.
        block_bytes: bytes of the source's blocks.
        in_flight_bytes: bytes of blocks asked for that have not come whole.
    """

    connector = TCP
    reason = ONLY_ONE

    def __init__(
        self,
        info: PeerInfo,
        connection: socket.socket,
        setup_s: float,
        pool: TargetPool,
        dial: Callable[[], Dial],
        max_in_flight_bytes: int,
    ) -> None:
        self.info = info
        self.setup_s = setup_s
        self.error = ""
        self.block_bytes = info.layout.block_bytes()
        self.in_flight_bytes = 0
        self.pool = pool
        self._make_dial = dial
        self._max_in_flight_bytes = max_in_flight_bytes
        self._pending: deque[Wanted] = deque()
        self._in_flight: deque[Wanted] = deque()
        self._closed = False
        self._may_redial = False
        self._dial: Dial | None = None
        self._connection: socket.socket | None = None
        self._use(connection)

    @property
    def is_open(self) -> bool:
        """Whether, as far as is known, the source can be reached."""
        return self._connection is not None

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    @property
    def is_idle(self) -> bool:
        """Whether no block is queued, cancelled ones included."""
        return not self._pending and not self._in_flight

    def close(self) -> None:
        """Hang up; unfinished reads end FAILED at the next poll. Idempotent."""
        self._closed = True
        self._lose("closed by this worker")
        self._fail_pending()
        if self._dial is not None:
            self._dial.close()
            self._dial = None

    def queue(self, blocks: Iterable[Wanted]) -> None:
        """Ask for blocks, behind those asked for earlier."""
        self._pending.extend(blocks)
        self._may_redial = True
        if self._closed:
            self._fail_pending()

    def cancel(self, read_id: ReadId) -> None:
        """Write no more of a read's blocks, and report none of them."""
        self._pending = deque(w for w in self._pending if w.read_id != read_id)
        for wanted in self._in_flight:
            if wanted.read_id == read_id:
                wanted.cancelled = True

    def step(self) -> Wanted | None:
        """Go on until the next block has ended, and return it; None if nothing more has come."""
        while True:
            ended = self._pop_ended()
            if ended is not None:
                return ended
            if not self._receive() and not self._request():
                return None

    def _pop_ended(self) -> Wanted | None:
        while self._in_flight and self._in_flight[0].ended is not None:
            wanted = self._in_flight.popleft()
            if 2 * self.in_flight_bytes <= self._max_in_flight_bytes and self.is_open:
                self._request()  # before the source runs out of work
            if not wanted.cancelled:
                return wanted
        return None

    def _receive(self) -> bool:
        """Take what has come for the first block in flight; False if nothing has."""
        if not self._in_flight or self._receiver is None:
            return False
        wanted = self._in_flight[0]
        try:
            self._receiver.receive(wanted)
        except BlockingIOError:
            return False
        except (OSError, BrokenStream) as error:
            self._lose(str(error))
            return True
        if wanted.ended is not None:
            self.in_flight_bytes -= self.block_bytes
        return True

    def _request(self) -> bool:
        """Move pending blocks into flight; False if there are none, or no room or no connection
        for them yet.
        """
        if not self._pending:
            return self._flush()
        if self._connection is None:
            return self._redial()
        if not self._in_flight and self._has_hung_up(self._connection):
            self._lose("the source hung up")
            return True
        moved = False
        while self._pending and self._has_room():
            self._in_flight.append(self._ask(self._pending.popleft()))
            moved = True
        self._flush()
        return moved

    def _has_room(self) -> bool:
        if len(self._in_flight) >= MAX_IN_FLIGHT_BLOCKS:
            return False
        after = self.in_flight_bytes + self.block_bytes
        return after <= self._max_in_flight_bytes or self.in_flight_bytes == 0

    def _ask(self, wanted: Wanted) -> Wanted:
        """Put a block's request into the outgoing bytes, unless it is refused on our side."""
        move = wanted.move
        wanted.ended = self._refuse(move)
        if wanted.ended is None:
            kind = Kind.READ_WITH_DIGEST if self.pool.asks_digest(move) else Kind.READ
            source = move.source
            self._unsent += Request(
                kind,
                wanted.index,
                wanted.read_id,
                source.epoch,
                source.block_id,
                source.generation,
            ).pack()
            self.in_flight_bytes += self.block_bytes
        return wanted

    def _refuse(self, move: Move) -> ReadStatus | None:
        """How a move ends that no source needs to be asked about."""
        source = move.source
        if source.epoch != self.info.epoch or not 0 <= source.generation < WORD:
            return ReadStatus.STALE
        inside = 0 <= source.block_id < self.info.num_blocks
        if inside and self.pool.blocks.accepts(move, self.info.layout):
            return None
        return ReadStatus.FAILED

    def _flush(self) -> bool:
        """Send requests as far as the kernel takes them; always False: no block has ended."""
        try:
            while self._unsent and self._connection is not None:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass  # the rest goes at the next step
        except OSError as error:
            self._lose(str(error))
        return False

    def _has_hung_up(self, connection: socket.socket) -> bool:
        """Whether an idle connection has ended; a source says nothing unasked."""
        try:
            connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _use(self, connection: socket.socket) -> None:
        """Go on over a fresh, greeted connection."""
        self._connection = connection
        self._receiver: Receiver | None = Receiver(connection, self.pool, self.info.layout)
        self._unsent = bytearray()

    def _lose(self, error: str) -> None:
        """The connection is over: what is in flight has failed."""
        if self._connection is not None:
            self._connection.close()
            self.error = error
        self._connection = self._receiver = None
        self._unsent.clear()
        self.in_flight_bytes = 0
        for wanted in self._in_flight:
            if wanted.ended is None:
                wanted.ended = ReadStatus.FAILED

    def _redial(self) -> bool:
        """Reach the source anew; False while that is under way. Pending blocks fail with it."""
        try:
            if self._dial is None:
                self._dial = self._dial_again()
            if self._dial.advance() is None:
                return False
        except TransferFailed as error:
            self.error = str(error)
            self._dial = None
            self._fail_pending()
            return True
        self._use(self._dial.connection)
        self._dial = None
        return True

    def _dial_again(self) -> Dial:
        if not self._may_redial:
            raise TransferFailed(f"the connection broke twice: {self.error}")
        self._may_redial = False
        return self._make_dial()

    def _fail_pending(self) -> None:
        for wanted in self._pending:
            wanted.ended = ReadStatus.FAILED
        self._in_flight.extend(self._pending)
        self._pending.clear()
