"""Damaged handshakes knock at the doors of both transports: each is refused and counted."""

from __future__ import annotations

import socket
from collections import Counter
from contextlib import closing
from random import Random

from kvferry.kv_transfer.authentication import NO_KEY, NONCE_BYTES, PROOF_BYTES, encode_knock
from kvferry.kv_transfer.memory import allocate_private, allocate_shared
from kvferry.kv_transfer.shm import ShmConnector
from kvferry.kv_transfer.shm_handshake import Hello as ShmHello
from kvferry.kv_transfer.shm_handshake import encode_hello as shm_hello
from kvferry.kv_transfer.tcp import TcpConnector
from kvferry.kv_transfer.tcp_wire import VERSION, frame, hello_packet, parse_address
from kvferry.kv_transfer.tcp_wire import Hello as TcpHello
from kvferry.kv_transfer.tcp_wire import encode_hello as tcp_hello
from tests.fakes import stub_layout
from tests.fuzz.hostile import damaged
from tests.kv_transfer.open_files import open_files

LAYOUT = stub_layout(4)
IDENTITY = {"worker_id": "source", "epoch": 7, "model": "stub@1", "layout": LAYOUT}
READER = ("reader", 8)
KEY = b"k" * 32
WAIT_S = 30.0


def knock_at_shared_memory(count: int, random: Random) -> Counter[str]:
    """So many handshakes; what became of them by the door's own count."""
    memory = allocate_shared(4, LAYOUT.block_bytes())
    with closing(ShmConnector(memory, **IDENTITY)) as connector:  # type: ignore[arg-type]
        server, info = connector.server, connector.local_info()
        hello = shm_hello(ShmHello(READER, ("source", 7)))
        before = open_files()
        for _ in range(count):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as knocker:
                knocker.settimeout(WAIT_S)
                knocker.connect("\0" + info.address[1:])
                said = damaged(hello, random)
                if said:
                    knocker.send(said)
                else:
                    knocker.shutdown(socket.SHUT_WR)
                _read_to_end(knocker)
        assert server.answered + server.refused.total() == count
        assert not server._deadlines
        assert open_files() == before
        outcomes = Counter({"answered": server.answered, **server.refused})
        connector.connect(info).close()
        return outcomes


def knock_at_tcp(count: int, random: Random) -> Counter[str]:
    """The same over TCP, where what follows the hello must be a request for a block."""
    memory = allocate_private(4, LAYOUT.block_bytes())
    with closing(TcpConnector(memory, key=NO_KEY, **IDENTITY)) as connector:  # type: ignore[arg-type]
        source, info = connector.source, connector.local_info()
        hello = tcp_hello(TcpHello(("source", 7), info))
        family, address = parse_address(info.address)
        for _ in range(count):
            with socket.socket(family, socket.SOCK_STREAM) as knocker:
                knocker.settimeout(WAIT_S)
                knocker.connect(address)
                try:
                    knocker.sendall(damaged(hello, random))
                    knocker.shutdown(socket.SHUT_WR)
                except OSError:
                    continue  # it has hung up already
                _read_to_end(knocker)
        peer = connector.connect(info)
        assert peer.is_open
        peer.close()
        assert source.answered + source.refused.total() > count
        return Counter({"answered": source.answered - 1, **source.refused})


def knock_at_locked_tcp(count: int, random: Random) -> Counter[str]:
    """Over TCP with a cluster key: damaged or not, nothing said without it is answered well."""
    memory = allocate_private(4, LAYOUT.block_bytes())
    with closing(TcpConnector(memory, key=KEY, **IDENTITY)) as connector:  # type: ignore[arg-type]
        source, info = connector.source, connector.local_info()
        good = [frame(encode_knock(VERSION, bytes(NONCE_BYTES), ("source", 7)))]
        good.append(tcp_hello(TcpHello(("source", 7), info)))
        good.append(
            good[0] + frame(bytes(PROOF_BYTES) + hello_packet(TcpHello(("source", 7), info)))
        )
        family, address = parse_address(info.address)
        for _ in range(count):
            with socket.socket(family, socket.SOCK_STREAM) as knocker:
                knocker.settimeout(WAIT_S)
                knocker.connect(address)
                try:
                    knocker.sendall(damaged(random.choice(good), random))
                    knocker.shutdown(socket.SHUT_WR)
                except OSError:
                    continue  # it has hung up already
                _read_to_end(knocker)
        assert source.answered == 0
        assert connector.served.blocks_sent == 0
        peer = connector.connect(info)
        assert peer.is_open
        peer.close()
        return Counter({"answered": source.answered - 1, **source.refused})


def _read_to_end(knocker: socket.socket) -> None:
    """Until the door hangs up; descriptors that come with an answer are dropped by the kernel."""
    try:
        while knocker.recv(1 << 16):
            pass
    except ConnectionError:
        return
