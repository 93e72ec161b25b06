"""Builds a worker's connector: every transport that its settings allow, over one pool."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.kv_cache.layout import KVCacheLayout
from kvferry.kv_transfer.authentication import NoKey
from kvferry.kv_transfer.choosing import AUTO, SHM, TCP
from kvferry.kv_transfer.connector import KVConnector
from kvferry.kv_transfer.faults import FaultPlan, FaultyConnector, TamperableConnector
from kvferry.kv_transfer.memory import SharedPoolMemory
from kvferry.kv_transfer.multi import MultiConnector
from kvferry.kv_transfer.shm import ShmConnector
from kvferry.kv_transfer.tcp import TcpConnector
from kvferry.worker.messages import NodeRef

CONNECT_TIMEOUT_S = 0.5
"""The engine waits for a source's handshake: a source that stands still must not hold it long."""


def make_connector(
    memory: SharedPoolMemory,
    layout: KVCacheLayout,
    ref: NodeRef,
    model: str,
    *,
    configured: str = AUTO,
    host: str = "127.0.0.1",
    checksum: bool = True,
    max_in_flight_blocks: int = 64,
    faults: FaultPlan | None = None,
    match_unit: int = 0,
    key: bytes | NoKey,
) -> KVConnector:
    """Shared memory for peers on this host, TCP for others; or the one that is ``configured``.

    Args:
        memory: the worker's pool; owned by the connector from now on.
        layout: the pool's layout.
        ref: the worker's id and epoch.
        model: model name and revision.
        configured: ``auto``, ``shm`` or ``tcp``.
        host: address to serve TCP on.
        checksum: verify every block moved.
        max_in_flight_blocks: blocks copied per poll, and asked for at once per TCP peer; of
            another size, as many as have their bytes.
        faults: what to inject into reads, for trials.
        match_unit: tokens per value of the worker's hash chains; 0 means the block size.
        key: what TCP peers must know. On one host the kernel vouches for them.
    """
    in_flight_bytes = max_in_flight_blocks * layout.block_bytes()

    def shm() -> TamperableConnector:
        return ShmConnector(
            memory,
            worker_id=ref.node_id,
            epoch=ref.epoch,
            model=model,
            layout=layout,
            match_unit=match_unit,
            owns_memory=False,
            bytes_per_poll=in_flight_bytes,
            connect_timeout_s=CONNECT_TIMEOUT_S,
        )

    def tcp() -> TamperableConnector:
        return TcpConnector(
            memory,
            worker_id=ref.node_id,
            epoch=ref.epoch,
            model=model,
            layout=layout,
            match_unit=match_unit,
            owns_memory=False,
            host=host,
            checksum=checksum,
            bytes_per_poll=in_flight_bytes,
            max_in_flight_bytes=in_flight_bytes,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            key=key,
        )

    kinds: dict[str, tuple[Callable[[], TamperableConnector], ...]] = {
        AUTO: (shm, tcp),
        SHM: (shm,),
        TCP: (tcp,),
    }
    connector = MultiConnector(memory, [make() for make in kinds[configured]], configured)
    return connector if faults is None else FaultyConnector(connector, faults)
