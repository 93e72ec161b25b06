"""Messages as a broken or malicious peer would send them: of the right types, of the wrong values.

A message that was really sent is changed in one to three places, each kept within its type, so
that the codec lets most of it pass and the parties behind it have to judge the values.
"""

from __future__ import annotations

import dataclasses
from enum import Enum
from random import Random
from typing import Any

from kvferry.worker.messages import Envelope, NodeRef

INTEGERS = (-(2**63), -(2**31), -1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 1e308, 1e-308)
TEXTS = (
    "",
    "\0",
    "x" * 5000,
    "\u202ené",
    "tcp://",
    "tcp://127.0.0.1:1",
    "no://where",
    "stop",
    "@x",
)
LONG_LIST = 300


def hostile(envelope: Envelope, random: Random) -> Envelope:
    """The envelope with something changed in it."""
    body: Any = envelope.body
    for _ in range(random.randint(1, 3)):
        body = changed(body, random)
    sender, receiver = envelope.sender, envelope.receiver
    seq, heard = envelope.seq, envelope.heard
    match random.randrange(12):
        case 0:
            sender = other_life(sender, random)
        case 1:
            receiver = other_life(receiver, random)
        case 2:
            seq, heard = random.choice(INTEGERS), random.choice(INTEGERS)
        case 3:
            sender = NodeRef("nobody", random.choice(INTEGERS))
    return Envelope(sender, receiver, seq, heard, body)


def other_life(ref: NodeRef, random: Random) -> NodeRef:
    """The same name in another epoch."""
    return NodeRef(ref.node_id, random.choice([ref.epoch - 1, ref.epoch + 1, *INTEGERS]))


def changed(value: Any, random: Random) -> Any:
    """A value of the same type that differs in one place."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        if not names:
            return value
        name = random.choice(names)
        return dataclasses.replace(value, **{name: changed(getattr(value, name), random)})
    if isinstance(value, Enum):
        return random.choice(list(type(value)))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        other = random.choice([*INTEGERS, value + 1, value - 1, value * 1000 + 1])
        return min(max(other, INTEGERS[0]), INTEGERS[-1])  # what the format can say
    if isinstance(value, float):
        return random.choice(FLOATS)
    if isinstance(value, str):
        return random.choice([*TEXTS, value[:-1], value + "x"])
    if isinstance(value, bytes):
        return random.choice([b"", b"\0", value[:-1], value + b"\0", bytes(reversed(value))])
    if isinstance(value, tuple):
        return changed_tuple(value, random)
    return value


def changed_tuple(value: tuple[Any, ...], random: Random) -> Any:
    """One item changed, or a list with items too many, too few, twice or in another order."""
    make = getattr(value, "_make", None)  # a named tuple keeps its length
    if not value:
        return tuple(random.choices(INTEGERS, k=random.randint(0, 3)))
    index = random.randrange(len(value))
    items = [*value[:index], changed(value[index], random), *value[index + 1 :]]
    match random.randrange(6):
        case _ if make is not None:
            return make(items)
        case 0:
            return tuple(items)
        case 1:
            return value[:index]
        case 2:
            return ()
        case 3:
            return (*value, value[index])
        case 4:
            return value * (1 + LONG_LIST // len(value))
        case _:
            return tuple(reversed(value))


def damaged(data: bytes, random: Random) -> bytes:
    """Bytes with a few of them changed, cut off, doubled or added."""
    found = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(found) + 1)
        match random.randrange(5):
            case 0 if found:
                found[at % len(found)] = random.randrange(256)
            case 1 if found:
                found[at % len(found)] ^= 1 << random.randrange(8)
            case 2:
                del found[at:]
            case 3:
                found[at:at] = random.randbytes(random.randint(1, 8))
            case _:
                found[at:at] = found[at : at + random.randint(1, 16)]
    return bytes(found)
