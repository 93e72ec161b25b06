"""Ray's actors and its key-value store, as the launcher and the supervision use them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.experimental import internal_kv

from kvferry.kv_cache.errors import KVFerryError

START_TIMEOUT_S = 300.0
EPOCH_NAMESPACE = b"kvferry"


def next_epoch() -> int:
    """A number never given before in this Ray cluster: its store decides who was first."""
    epoch = int(internal_kv._internal_kv_get(b"epoch", namespace=EPOCH_NAMESPACE) or 0)
    while True:
        epoch += 1
        key = f"epoch/{epoch}".encode()
        taken = internal_kv._internal_kv_put(key, b"", overwrite=False, namespace=EPOCH_NAMESPACE)
        if not taken:
            break
    internal_kv._internal_kv_put(
        b"epoch", str(epoch).encode(), overwrite=True, namespace=EPOCH_NAMESPACE
    )
    return epoch


def remote_actor(cls: type, threads: int, options: Mapping[str, Any]) -> Any:
    """``cls`` as a Ray actor with its share of the cores; OpenMP must know it before it loads."""
    env = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return ray.remote(cls).options(
        max_concurrency=4, max_restarts=0, runtime_env={"env_vars": env}, **options
    )


def node_id(_actor: object) -> str:
    """Ray's id of the node that an actor was placed on; runs in the actor's process."""
    found: str = ray.get_runtime_context().get_node_id()
    return found


def node_address(_actor: object) -> str:
    """The address by which other nodes know the one that an actor was placed on; runs there."""
    here = node_id(_actor)
    found: str = next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == here)
    return found


def get(ref: Any) -> Any:
    """A remote call's result; an error of ours is raised as itself."""
    try:
        return ray.get(ref, timeout=START_TIMEOUT_S)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, KVFerryError):
            raise cause from None
        raise


def end(refs: Sequence[Any], timeout_s: float) -> None:
    """Wait for calls that end something, all together; one that is dead already has ended."""
    with contextlib.suppress(ray.exceptions.RayError):
        ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
