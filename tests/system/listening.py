"""What a running cluster listens on, and what SECURITY.md says that it listens on."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kvferry.protos import kvferry_pb2 as pb
from tests.system.processes import SOON_S, Served, abstract_sockets

PAGE = Path(__file__).parents[2] / "SECURITY.md"


@dataclass(frozen=True)
class Listener:
    """One listening socket: which port of the page it is, of what kind of process, and where."""

    name: str
    process: str
    address: str
    is_loopback: bool


@dataclass(frozen=True)
class Row:
    """A row of the page's list: whose processes may have such a port, and how far it is seen.

    ``may_be_node``: on a Ray that was joined it is at its node's address.
    """

    processes: frozenset[str]
    is_loopback: bool
    may_be_node: bool


def listed_ports() -> dict[str, Row]:
    """The list of ports in SECURITY.md: ``| `name` | processes | address | ...``."""
    section = PAGE.read_text(encoding="utf-8").partition("## Ports")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]+) \| ([^|]+) \|", section, re.MULTILINE)
    return {
        name: Row(
            frozenset(re.findall(r"\w+", processes)) - {"and", "each"},
            "every address" not in address,
            "the node's address" in address,
        )
        for name, processes, address in rows
    }


def classify(served: Served, status: pb.StatusResponse) -> list[Listener]:
    """Every listening socket of every process of a cluster on this host."""
    doors = {
        address: name for name in ("grpc", "http", "metrics") if (address := served.ready[name])
    }
    control = {entry.worker.address.removeprefix("tcp://") for entry in status.workers}
    ours = {entry.worker.pid: "worker" for entry in status.workers}
    ours |= {router.pid: "router" for router in status.routers}
    found = []
    for process in served.family():
        kind = ours.get(process.pid, "ray" if process.pid != served.process.pid else "serve")
        try:
            sockets = process.net_connections("inet")
            unix = abstract_sockets(process)
        except psutil.Error:
            continue  # it has ended
        for each in sockets:
            if each.status != psutil.CONN_LISTEN:
                continue
            ip = ipaddress.ip_address(each.laddr.ip)
            if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
                ip = ip.ipv4_mapped
            address = f"{ip}:{each.laddr.port}"
            if address in doors:
                name = doors[address]
            elif kind not in ("worker", "router") or ip.is_unspecified:
                name = "ray"
            elif kind == "router" or address in control:
                name = "control"
            else:
                name = "kv"
            found.append(Listener(name, kind, address, ip.is_loopback))
        if kind == "worker":
            found += [Listener("kv-shm", kind, name, True) for name in unix if "kvferry" in name]
    return found


@dataclass(frozen=True)
class Sockets:
    """What a process has open beyond what the page has a row for, how many or which of each kind.

    ``wildcard``: TCP, listening on every address. ``named``: Unix sockets with a file.
    """

    wildcard: int
    udp: int
    named: frozenset[str]


def sockets_of(pid: int) -> Sockets:
    """Now."""
    process = psutil.Process(pid)
    found: list[Any] = process.net_connections("inet")
    names = {str(each.laddr) for each in process.net_connections("unix")}
    return Sockets(
        sum(
            each.status == psutil.CONN_LISTEN and ipaddress.ip_address(each.laddr.ip).is_unspecified
            for each in found
        ),
        sum(each.type == socket.SOCK_DGRAM for each in found),
        frozenset(name for name in names if name.startswith("/")),
    )


@contextlib.contextmanager
def empty_actor(ray_address: str) -> Iterator[int]:
    """The process id of an actor that has nothing of ours, on the same Ray."""
    command = [sys.executable, "-m", "tests.system.empty_actor", ray_address]
    with subprocess.Popen(
        command,
        env={**os.environ, "RAY_AUTH_MODE": "token"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdin is not None and driver.stdout is not None
        try:
            yield int(driver.stdout.readline())
        finally:
            driver.stdin.close()
            driver.wait(SOON_S)
