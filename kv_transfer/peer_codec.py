"""``PeerInfo`` as plain data for a handshake, and back, trusting nothing that is read.

Knows names and types of the fields; does not know sockets or msgpack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from kvferry.kv_cache.layout import DTYPE_BYTES, KVCacheLayout, KVGroup
from kvferry.kv_transfer.connector import Endpoint, PeerInfo, TransferFailed

MAX_GROUPS = 64
MAX_ENDPOINTS = 16
MAX_NUMBER = 1 << 62
_TYPES = {"str": str, "int": int, str: str, int: int}

T = TypeVar("T", PeerInfo, Endpoint, KVCacheLayout, KVGroup)


class MalformedPeerInfo(TransferFailed):
    """A peer described itself in a way that cannot be read; names the field."""


def encode_peer_info(info: PeerInfo) -> dict[str, object]:
    """``info`` as nested dictionaries and lists of text and integers."""
    encoded = asdict(info)
    encoded["layout"]["groups"] = [asdict(group) for group in info.layout.groups]
    encoded["endpoints"] = [asdict(endpoint) for endpoint in info.endpoints]
    return encoded


def decode_peer_info(data: object) -> PeerInfo:
    """The inverse of ``encode_peer_info``. Raises MalformedPeerInfo for anything else."""
    top = dict(_mapping(data, "peer"))
    layout = dict(_mapping(top.get("layout"), "layout"))
    groups = layout.get("groups")
    if not isinstance(groups, list) or not 1 <= len(groups) <= MAX_GROUPS:
        raise MalformedPeerInfo(f"layout.groups must be 1 to {MAX_GROUPS} groups, got {groups!r}")
    layout["groups"] = tuple(_group(group, index) for index, group in enumerate(groups))
    top["endpoints"] = _endpoints(top.get("endpoints"))
    top["layout"] = _build(KVCacheLayout, layout, "layout")
    info = _build(PeerInfo, top, "peer")
    if info.num_blocks < 1 or info.layout.block_bytes() < 1:
        raise MalformedPeerInfo(
            f"a pool needs at least one block of at least one byte, got {info.num_blocks} blocks "
            f"of {info.layout.block_bytes()} bytes"
        )
    return info


def _endpoints(data: object) -> tuple[Endpoint, ...]:
    if not isinstance(data, list) or len(data) > MAX_ENDPOINTS:
        raise MalformedPeerInfo(f"endpoints must be {MAX_ENDPOINTS} endpoints at most")
    named = [(f"endpoints[{index}]", item) for index, item in enumerate(data)]
    return tuple(_build(Endpoint, _mapping(item, where), where) for where, item in named)


def _group(data: object, index: int) -> KVGroup:
    group = _build(KVGroup, _mapping(data, f"groups[{index}]"), f"groups[{index}]")
    for name, known in (("dtype", [*DTYPE_BYTES]), ("scales", ["", *DTYPE_BYTES])):
        if getattr(group, name) not in known:
            raise MalformedPeerInfo(
                f"groups[{index}].{name} must be one of {sorted(known)}, "
                f"got {getattr(group, name)!r}"
            )
    return group


def _mapping(data: object, where: str) -> Mapping[str, Any]:
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise MalformedPeerInfo(f"{where} must be a map with text keys, got {type(data).__name__}")
    return data


def _build(kind: type[T], data: Mapping[str, Any], where: str) -> T:
    """A ``kind`` from exactly its fields, each of its declared type; integers not negative."""
    names = {field.name: field.type for field in fields(kind)}
    if set(data) != set(names):
        raise MalformedPeerInfo(f"{where} must have the fields {sorted(names)}, got {sorted(data)}")
    for name, declared in names.items():
        wanted = _TYPES.get(declared)
        value = data[name]
        if wanted is not None and type(value) is not wanted:
            raise MalformedPeerInfo(
                f"{where}.{name} must be {wanted.__name__}, got {type(value).__name__}"
            )
        if isinstance(value, int) and not 0 <= value <= MAX_NUMBER:
            raise MalformedPeerInfo(f"{where}.{name} must be 0 to {MAX_NUMBER}, got {value}")
    return kind(**data)
