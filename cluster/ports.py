"""Addresses to listen on: who can reach one, whether it is free, and the error where it is not."""

from __future__ import annotations

import ipaddress
import socket

from kvferry.cluster.errors import PortUnavailable


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT is reachable from this machine alone; a name counts as what it says."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_port(address: str) -> None:
    """Raise PortUnavailable if HOST:PORT is taken now, before a model is loaded for it."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            raise unavailable(address, error.strerror or str(error)) from error


def unavailable(address: str, why: str) -> PortUnavailable:
    """The error of an address that cannot be listened on."""
    return PortUnavailable(
        f"cannot listen on {address}: {why}; is another server using the port? Give another "
        "address, or port 0 to pick a free one"
    )
