"""The kinds of values in the configuration file, and what every section of it is.

Durations are written as ``1s``, ``500ms`` or a number of seconds and read as seconds (float); sizes
are written as ``512MiB``, ``1GB`` or a number of bytes and read as bytes (int). Knows no key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
)

from kvferry.kv_cache.layout import MAX_BLOCK_SIZE

_DURATION_UNITS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_SIZE_UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
AUTO_SIZE: Final = "auto"
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*")


def _quantity(value: object, units: Mapping[str, float], example: str) -> float:
    """``value`` in the base unit; raises ValueError naming the units that are understood."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        known = ", ".join(unit for unit in units if unit)
        raise ValueError(f"wanted a number, or one with a unit such as {example} ({known})")
    return float(match[1]) * units[match[2]]


def parse_duration(value: object) -> float:
    """Seconds in ``1s``, ``500ms`` or a number of seconds; finite and not negative."""
    seconds = _quantity(value, _DURATION_UNITS, "500ms")
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError("wanted a finite duration, not negative")
    return seconds


def parse_size(value: object) -> int:
    """Bytes in ``512MiB``, ``1GB`` or a number of bytes; a whole number, not negative."""
    size = _quantity(value, _SIZE_UNITS, "512MiB")
    if not math.isfinite(size) or size < 0 or size != int(size):
        raise ValueError("wanted a whole number of bytes, not negative")
    return int(size)


def _host_port(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError("wanted HOST:PORT, such as 127.0.0.1:50051 (port 0 picks a free one)")
    return value


def _block_size(value: object) -> int | str:
    if value == AUTO_SIZE:
        return AUTO_SIZE
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_BLOCK_SIZE:
        return value
    raise ValueError(f"wanted 1 to {MAX_BLOCK_SIZE} token positions, or {AUTO_SIZE}")


def _block_size_or_none(value: object) -> int | str | None:
    return None if value is None else _block_size(value)


def _resources(value: dict[str, float]) -> dict[str, float]:
    wrong = [name for name, amount in value.items() if not name.strip() or not 0 <= amount < 1e9]
    if wrong:
        raise ValueError(f"wanted Ray's resources with amounts of 0 or more, not {wrong[0]!r}")
    return value


Duration = Annotated[float, BeforeValidator(parse_duration)]
Size = Annotated[int, BeforeValidator(parse_size)]
HostPort = Annotated[str, AfterValidator(_host_port)]
RayAddress = Annotated[str, AfterValidator(lambda it: it if it == "auto" else _host_port(it))]
Probability = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=2**31)]
Text = Annotated[str, Field(min_length=1)]
BlockSize = Annotated[int | Literal["auto"], PlainValidator(_block_size)]
RoleBlockSize = Annotated[int | Literal["auto"] | None, PlainValidator(_block_size_or_none)]
Resources = Annotated[dict[str, float], AfterValidator(_resources)]


class Section(BaseModel):
    """A mapping of the file: frozen, of exact types, without unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
