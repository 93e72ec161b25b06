"""Either end of a TCP transfer played by hand, to say what no honest end would say."""

from __future__ import annotations

import fcntl
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvferry.kv_transfer.connector import Peer, PeerInfo
from kvferry.kv_transfer.tcp import TcpConnector
from kvferry.kv_transfer.tcp_wire import (
    HEADER,
    PREFIX,
    REQUEST,
    TRAILER,
    BlockStatus,
    Hello,
    Kind,
    Request,
    decode_reply,
    encode_hello,
    encode_welcome,
    parse_address,
)
from tests.kv_transfer.helpers import SOON_S, Worker


def soon(what: str, holds: Callable[[], bool]) -> None:
    """Wait until ``holds``; a bound that only a fault exceeds."""
    deadline = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {SOON_S} s"
        time.sleep(0)


def tcp_of(worker: Worker) -> TcpConnector:
    assert isinstance(worker.connector, TcpConnector)
    return worker.connector


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Exactly ``num_bytes``; fewer only if the other end hangs up."""
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            break
        data += part
    return data


def is_hung_up(connection: socket.socket) -> bool:
    """Wait for the other end to hang up; False if it says something instead."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def has_arrived(connection: socket.socket) -> bool:
    """Whether the other end's kernel has acknowledged every byte sent."""
    waiting = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(waiting, sys.byteorder) == 0


def receive_message(connection: socket.socket) -> bytes:
    """The body of the next message."""
    _, length = PREFIX.unpack(receive(connection, PREFIX.size))
    return receive(connection, length)


def dial(info: PeerInfo, buffer_bytes: int | None = None) -> socket.socket:
    """A plain connection to a source, its bytes the caller's to choose."""
    family, address = parse_address(info.address)
    connection = socket.socket(family, socket.SOCK_STREAM)
    if buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    connection.settimeout(SOON_S)
    connection.connect(address)
    return connection


def hello_for(info: PeerInfo) -> bytes:
    """A good hello to the source ``info``."""
    reader = replace(info, worker_id="by hand", epoch=1)
    return encode_hello(Hello((info.worker_id, info.epoch), reader))


class RawReader:
    """A greeted reader whose requests are written by hand."""

    def __init__(self, source: PeerInfo, buffer_bytes: int | None = None) -> None:
        self.source = source
        self.connection = dial(source, buffer_bytes)
        self.connection.sendall(hello_for(source))
        assert decode_reply(receive_message(self.connection)) == source

    def request(self, index: int, block_id: int, **changes: int) -> bytes:
        values = {"read_id": 1, "epoch": self.source.epoch, "generation": 3, **changes}
        return Request(kind=Kind.READ, index=index, block_id=block_id, **values).pack()

    def answer(self) -> tuple[BlockStatus, int, bytes]:
        """The next answer's last status, its index, and the block's bytes."""
        status, index, _, _, length, _ = HEADER.unpack(receive(self.connection, HEADER.size))
        data = receive(self.connection, length)
        if status == BlockStatus.VALID:
            status, index = TRAILER.unpack(receive(self.connection, TRAILER.size))
        return BlockStatus(status), index, data

    def close(self) -> None:
        self.connection.close()


class RawSource:
    """A source that greets every reader, and whose answers are written by hand."""

    def __init__(self, like: PeerInfo) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(SOON_S)
        self.info = replace(like, address=f"127.0.0.1:{self.listener.getsockname()[1]}")
        self.connections: list[socket.socket] = []

    def greet(self) -> socket.socket:
        """Accept and greet the next reader."""
        connection, _ = self.listener.accept()
        connection.settimeout(SOON_S)
        receive_message(connection)
        connection.sendall(encode_welcome(self.info))
        self.connections.append(connection)
        return connection

    def join(self, reader: Worker) -> tuple[Peer, socket.socket]:
        """Connect ``reader``: its peer, and this end of the connection."""
        thread = threading.Thread(target=self.greet)
        thread.start()
        peer = reader.connector.connect(self.info)
        thread.join()
        return peer, self.connections[-1]

    def close(self) -> None:
        self.listener.close()
        for connection in self.connections:
            connection.close()


def read_requests(connection: socket.socket, count: int) -> list[Request]:
    """The next ``count`` requests of a reader."""
    data = receive(connection, count * REQUEST.size)
    return [Request(Kind(kind), *rest) for kind, *rest in REQUEST.iter_unpack(data)]


def answer(
    request: Request,
    block: bytes | NDArray[np.uint8],
    *,
    digest: int = 0,
    last: BlockStatus = BlockStatus.VALID,
) -> bytes:
    """A whole answer with ``block`` in it."""
    data = bytes(block)
    head = HEADER.pack(
        BlockStatus.VALID,
        request.index,
        request.read_id,
        request.generation,
        len(data),
        digest,
    )
    return head + data + TRAILER.pack(last, request.index)
