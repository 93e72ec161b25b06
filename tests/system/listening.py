"""What a running cluster listens on, and what SECURITY.md says that it listens on."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvferry.protos import kvferry_pb2 as pb
from tests.system.processes import Served, abstract_sockets

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
