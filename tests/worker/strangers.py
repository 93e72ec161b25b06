"""What a stranger says to a ZeroMQ socket, byte by byte (ZMTP 3, its RFC 23)."""

from __future__ import annotations

import contextlib
import socket
import struct

BOUND_S = 20.0  # less than the 30 s that ZeroMQ itself gives a handshake
_COMMAND_WITH_LONG_SIZE = 0x06


def greeting(mechanism: bytes = b"CURVE", as_server: bool = False) -> bytes:
    """The 64 bytes with which every connection begins."""
    signature = b"\xff" + bytes(8) + b"\x7f"
    return signature + b"\x03\x01" + mechanism.ljust(20, b"\0") + bytes([as_server]) + bytes(31)


def begun_command(announced: int, name: bytes = b"HELLO") -> bytes:
    """The beginning of a command that says it is ``announced`` bytes long."""
    head = struct.pack(">BQ", _COMMAND_WITH_LONG_SIZE, announced)
    return head + bytes([len(name)]) + name


def call(address: str) -> socket.socket:
    """A plain connection to ``tcp://HOST:PORT``."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=BOUND_S)


def read_to_end(connection: socket.socket) -> bytes:
    """All that the other end says until it hangs up; TimeoutError if it does not."""
    heard = b""
    with contextlib.suppress(ConnectionError):
        while said := connection.recv(4096):
            heard += said
    return heard
