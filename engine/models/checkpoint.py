"""The small files of a checkpoint: read whole, within bounds, and trusted in nothing.

Owns how a file is opened (a regular one, not larger than its limit: a pipe, a device or a folder in
its place neither blocks nor fills memory) and JSON is read (an object, no key twice, finite
numbers, no depth that exhausts the stack). Does not know what a key means. Raises DamagedModel.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from kvferry.engine.models.errors import DamagedModel

#: Limits in bytes, far above any file seen, far below what would hurt.
MAX_CONFIG_BYTES = 4 << 20
MAX_TOKENIZER_CONFIG_BYTES = 16 << 20
MAX_TOKENIZER_BYTES = 128 << 20
MAX_TEMPLATE_BYTES = 1 << 17

_SHOWN_CHARS = 80
_SHOWN_ITEMS = 8


def shown(value: object) -> str:
    """A value out of a checkpoint as an error may print it: one short line, nothing raw."""
    if isinstance(value, list | dict) and len(value) > _SHOWN_ITEMS:
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    text = ascii(value[:_SHOWN_CHARS] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def file_size(file: Path) -> int:
    """Bytes of a regular file. Raises DamagedModel for everything else, and never waits."""
    try:
        status = file.stat()
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise DamagedModel(f"{file}: not a regular file; a model folder needs this file")
    return status.st_size


def read_bytes(file: Path, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes. Raises DamagedModel."""
    file_size(file)
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as handle:
            if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
                raise DamagedModel(f"{file}: not a regular file")
            content = handle.read(limit + 1)
    except OSError as error:
        raise _unreadable(file, error) from error
    if len(content) > limit:
        raise DamagedModel(f"{file}: larger than {limit} bytes, the most that such a file may have")
    return content


def read_text(file: Path, limit: int) -> str:
    """The UTF-8 text of a regular file of at most ``limit`` bytes. Raises DamagedModel."""
    try:
        return read_bytes(file, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedModel(f"{file}: not UTF-8 ({error})") from error


def read_object(
    file: Path, limit: int = MAX_CONFIG_BYTES, optional: bool = False
) -> dict[str, Any]:
    """The JSON object in a file; of an ``optional`` file that is not there, an empty one."""
    if optional and not os.path.lexists(file):
        return {}
    return parse_object(read_bytes(file, limit), str(file))


def parse_object(content: bytes, place: str) -> dict[str, Any]:
    """A JSON object, read strictly. Raises DamagedModel that begins with ``place``."""
    try:
        value = strict_json(content)
    except (ValueError, RecursionError) as error:
        raise DamagedModel(f"{place}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise DamagedModel(f"{place}: holds {type(value).__name__}, wanted a JSON object")
    return value


def strict_json(content: str | bytes) -> Any:
    """JSON without keys that stand twice and numbers that are none.

    Raises ValueError, RecursionError.
    """
    return json.loads(
        content,
        object_pairs_hook=_without_doubles,
        parse_float=_finite,
        parse_constant=_no_constant,
    )


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {shown(twice)} stands twice")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text[:_SHOWN_CHARS]} is out of range")
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")


def _unreadable(file: Path, error: OSError | ValueError) -> DamagedModel:
    cause = getattr(error, "strerror", None) or str(error)
    return DamagedModel(f"{file}: {cause}; a model folder needs this file")
