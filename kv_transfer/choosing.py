"""Which connector a pair of workers uses, and why. Pure: compares two descriptions.

::

    configured shm or tcp                       that one
    auto, one host, both serve shared memory    shm: one copy, and the source does nothing
    auto, otherwise                             tcp: it reaches every host
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from kvferry.kv_transfer.connector import Endpoint, IncompatiblePeer, PeerInfo

AUTO = "auto"
SHM = "shm"
TCP = "tcp"
ONLY_ONE = "the worker has one connector"


@dataclass(frozen=True, slots=True)
class Choice:
    """A connector's name and, as a short sentence for people, why it was chosen."""

    connector: str
    reason: str


def endpoints_of(info: PeerInfo) -> tuple[Endpoint, ...]:
    """Every way to a pool, the preferred one first."""
    return info.endpoints or (Endpoint(info.connector, info.address),)


def choose(host_id: str, ours: Collection[str], configured: str, remote: PeerInfo) -> Choice:
    """The connector by which a worker on ``host_id`` that has ``ours`` reads ``remote``.

    Raises IncompatiblePeer, naming what either side has, if none fits.
    """
    theirs = [endpoint.connector for endpoint in endpoints_of(remote)]
    if configured == AUTO:
        choice = _choose_freely(host_id, ours, remote, theirs)
    else:
        choice = Choice(configured, f"transfer.connector is {configured}")
    if choice.connector not in ours or choice.connector not in theirs:
        raise IncompatiblePeer(
            f"no connector to worker {remote.worker_id} (epoch {remote.epoch}): "
            f"{choice.connector} is wanted ({choice.reason}), it serves {_list(theirs)}, "
            f"this worker has {_list(ours)}. Set transfer.connector alike on both"
        )
    return choice


def through(info: PeerInfo, connector: str) -> PeerInfo:
    """``info`` as one ``connector`` sees it: with that one's address only.

    ``info`` must have such an endpoint.
    """
    address = next(e.address for e in endpoints_of(info) if e.connector == connector)
    return replace(info, connector=connector, address=address, endpoints=())


def _choose_freely(
    host_id: str, ours: Collection[str], remote: PeerInfo, theirs: Collection[str]
) -> Choice:
    if remote.host_id != host_id:
        return Choice(TCP, "the worker is on another host")
    if SHM not in theirs:
        return Choice(TCP, "same host, but the worker does not serve shared memory")
    if SHM not in ours:
        return Choice(TCP, "same host, but this worker does not use shared memory")
    return Choice(SHM, "same host")


def _list(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
