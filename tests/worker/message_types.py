"""Values of every message class, drawn from its type hints, and a check of a value's type.

Both walk the hints by themselves and know nothing of the codec.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from kvferry.worker.messages import Body, Envelope

BODIES: tuple[type[Any], ...] = get_args(Body)

_LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 2),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=12),
    bytes: st.binary(max_size=12),
    type(None): st.none(),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type that messages are made of."""
    if isinstance(kind, typing.NewType):
        return values(kind.__supertype__)
    if kind in _LEAVES:
        return _LEAVES[kind]
    if get_origin(kind) in (types.UnionType, typing.Union):
        return st.one_of([values(option) for option in get_args(kind)])
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if kinds[-1] is Ellipsis:
            return st.lists(values(kinds[0]), max_size=3).map(tuple)
        return st.tuples(*(values(item) for item in kinds))
    if issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    return st.builds(kind, *(values(hint) for hint in field_types(kind).values()))


def envelopes(body: type[Any]) -> st.SearchStrategy[Envelope]:
    """Any envelope around a message of this class."""
    hints = {**get_type_hints(Envelope), "body": body}
    return st.builds(Envelope, *(values(hint) for hint in hints.values()))


def any_envelope() -> st.SearchStrategy[Envelope]:
    """Any envelope around any message."""
    return st.sampled_from(BODIES).flatmap(envelopes)


def field_types(kind: Any) -> dict[str, Any]:
    """Fields of a dataclass or named tuple, in declared order, and their types."""
    hints = get_type_hints(kind)
    if dataclasses.is_dataclass(kind):
        return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return {name: hints[name] for name in kind._fields}


def conforms(kind: Any, value: Any) -> bool:
    """Whether a value is exactly of a type, all the way down."""
    if isinstance(kind, typing.NewType):
        return conforms(kind.__supertype__, value)
    if kind in _LEAVES:
        return type(value) is kind
    if get_origin(kind) in (types.UnionType, typing.Union):
        return any(conforms(option, value) for option in get_args(kind))
    if get_origin(kind) is tuple:
        if type(value) is not tuple:
            return False
        kinds = get_args(kind)
        if kinds[-1] is Ellipsis:
            return all(conforms(kinds[0], item) for item in value)
        return len(kinds) == len(value) and all(map(conforms, kinds, value))
    if type(value) is not kind:
        return False
    if issubclass(kind, Enum):
        return True
    return all(conforms(hint, getattr(value, name)) for name, hint in field_types(kind).items())
