"""The one codec of the internal messages: a version byte, then msgpack; never pickle.

Each message class has a tag, its name; fields travel as an array in declared order. Decoding
checks every value against the declared type, so that a message either decodes into exactly what
its class says or raises ``BadMessage`` and changes nothing.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from enum import Enum
from operator import attrgetter
from typing import Any, get_args, get_origin, get_type_hints

import msgpack

from kvferry.kv_cache.errors import KVFerryError
from kvferry.worker import messages
from kvferry.worker.messages import Body, Envelope

VERSION = 10
MAX_MESSAGE_BYTES = 64 << 20


class BadMessage(KVFerryError):
    """Bytes that are not a message of this version; says what is wrong, keeps no state."""


_BODIES: dict[str, type[Any]] = {cls.__name__: cls for cls in get_args(Body)}
_NUMBERS = frozenset({int, float})
_FIELDS: dict[type[Any], list[tuple[str, Any]]] = {}
_GETTERS: dict[type[Any], Callable[[Any], tuple[Any, ...]]] = {}


def encode(envelope: Envelope) -> bytes:
    """Bytes of one envelope."""
    tag = type(envelope.body).__name__
    fields = [envelope.sender, envelope.receiver, envelope.seq, envelope.heard, envelope.body]
    packed = msgpack.packb([tag, *fields], default=_plain, use_bin_type=True)
    return bytes([VERSION]) + bytes(packed)


def decode(data: bytes) -> Envelope:
    """The envelope in ``data``; raises BadMessage."""
    if not data or len(data) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"{len(data)} bytes, wanted 1 to {MAX_MESSAGE_BYTES}")
    if data[0] != VERSION:
        raise BadMessage(f"message version {data[0]}, this process speaks {VERSION}")
    try:
        parts = msgpack.unpackb(data[1:], raw=False, strict_map_key=True, use_list=True)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise BadMessage(f"not msgpack: {error}") from error
    if not isinstance(parts, list) or len(parts) != 6 or not isinstance(parts[0], str):
        raise BadMessage("not an envelope of six parts")
    body_type = _BODIES.get(parts[0])
    if body_type is None:
        raise BadMessage(f"unknown message {parts[0][:60]!r}")
    node = messages.NodeRef
    return Envelope(
        _typed(node, parts[1], "sender"),
        _typed(node, parts[2], "receiver"),
        _typed(int, parts[3], "seq"),
        _typed(int, parts[4], "heard"),
        _typed(body_type, parts[5], parts[0]),
    )


def _plain(value: Any) -> Any:
    """What msgpack does not know by itself: a record is the array of its fields."""
    if dataclasses.is_dataclass(value):
        getter = _GETTERS.get(type(value))
        if getter is None:
            getter = _GETTERS[type(value)] = _getter([name for name, _ in _fields(type(value))])
        return getter(value)
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """All of an object's attributes of these names at once."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _fields(cls: type[Any]) -> list[tuple[str, Any]]:
    found = _FIELDS.get(cls)
    if found is None:
        hints = get_type_hints(cls)
        is_record = dataclasses.is_dataclass(cls)
        names = [f.name for f in dataclasses.fields(cls)] if is_record else list(hints)
        found = _FIELDS[cls] = [(name, hints[name]) for name in names]
    return found


def _typed(kind: Any, value: Any, path: str) -> Any:
    """``value`` as ``kind``, or BadMessage naming ``path``."""
    if isinstance(kind, typing.NewType):
        return _typed(kind.__supertype__, value, path)
    origin = get_origin(kind)
    if origin is types.UnionType or origin is typing.Union:
        return _typed_union(get_args(kind), value, path)
    if origin is tuple:
        return _typed_tuple(get_args(kind), value, path)
    if dataclasses.is_dataclass(kind):
        return _typed_record(kind, _fields(typing.cast(type[Any], kind)), value, path)
    if isinstance(kind, type) and issubclass(kind, tuple):  # NamedTuple
        return _typed_record(kind, _fields(kind), value, path)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value)
        except (ValueError, TypeError) as error:
            raise BadMessage(f"{path}: {error}") from error
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise BadMessage(
            f"{path}: {type(value).__name__}, wanted {getattr(kind, '__name__', kind)}"
        )
    return value


def _typed_union(options: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in options:
        return None
    last: BadMessage | None = None
    for option in options:
        if option is type(None):
            continue
        try:
            return _typed(option, value, path)
        except BadMessage as error:
            last = error
    raise last or BadMessage(f"{path}: no such option")


def _typed_tuple(kinds: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise BadMessage(f"{path}: {type(value).__name__}, wanted an array")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        if kinds[0] in _NUMBERS:  # token ids: the long arrays
            if not all(type(item) is kinds[0] for item in value):
                raise BadMessage(f"{path}: not all of type {kinds[0].__name__}")
            return tuple(value)
        return tuple(_typed(kinds[0], item, path) for item in value)
    if len(kinds) != len(value):
        raise BadMessage(f"{path}: {len(value)} items, wanted {len(kinds)}")
    return tuple(_typed(kind, item, path) for kind, item in zip(kinds, value, strict=True))


def _typed_record(cls: Any, fields: list[tuple[str, Any]], value: Any, path: str) -> Any:
    if not isinstance(value, list) or len(value) != len(fields):
        size = len(value) if isinstance(value, list) else type(value).__name__
        raise BadMessage(f"{path}: {size}, wanted {len(fields)} fields")
    return cls(
        *(
            _typed(kind, item, f"{path}.{name}")
            for (name, kind), item in zip(fields, value, strict=True)
        )
    )
