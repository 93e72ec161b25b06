"""Addresses to listen on: whether one is free, and the error where it is not."""

from __future__ import annotations

import socket

from kvferry.cluster.errors import PortUnavailable


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
