"""How long requests are: drawn from a seed, or read from public traces.

Of a trace only the lengths are used. Three formats are known by their columns: ``input_length``
and ``output_length`` (JSON lines), ``ContextTokens`` and ``GeneratedTokens``,
``num_prefill_tokens`` and ``num_decode_tokens`` (comma-separated, with a header).
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvferry.kv_cache.errors import KVFerryError

_COLUMNS = (
    ("input_length", "output_length"),
    ("ContextTokens", "GeneratedTokens"),
    ("num_prefill_tokens", "num_decode_tokens"),
)


class NotATrace(KVFerryError):
    """A file of lengths is in none of the known formats; names it."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Lengths:
    """One request: prompt and output tokens, at least one of each."""

    num_input: int
    num_output: int

    @property
    def total(self) -> int:
        """Positions of prompt and output together."""
        return self.num_input + self.num_output


@dataclass(frozen=True, slots=True)
class Distribution:
    """Requests in order of arrival; ``num_left_out`` were too long for the memory."""

    name: str
    requests: tuple[Lengths, ...]
    num_left_out: int = 0

    @property
    def max_len(self) -> int:
        """Positions that a contiguous reservation has: the power of two that holds the longest."""
        return 1 << (max(request.total for request in self.requests) - 1).bit_length()


def lognormal(count: int, seed: int, most: int = 2048) -> Distribution:
    """Prompts of a median of 256 tokens and outputs of 128, long tails cut at ``most`` together."""
    draw = random.Random(seed)
    requests: list[Lengths] = []
    while len(requests) < count:
        num_input = max(1, round(draw.lognormvariate(5.545, 0.9)))
        num_output = max(1, round(draw.lognormvariate(4.852, 0.7)))
        if num_input + num_output <= most:
            requests.append(Lengths(num_input, num_output))
    return Distribution("lognormal", tuple(requests))


def trace(path: Path, count: int, most: int) -> Distribution:
    """The first ``count`` requests of a trace that take at most ``most`` positions.

    Raises NotATrace.
    """
    found, left_out = [], 0
    for row in _rows(path):
        lengths = _lengths(row, path)
        if lengths.num_input < 1 or lengths.num_output < 1:
            continue
        if lengths.total > most:
            left_out += 1
            continue
        found.append(lengths)
        if len(found) == count:
            break
    if not found:
        raise NotATrace(f"{path.name}: no request of at most {most} tokens")
    return Distribution(path.name.partition(".")[0], tuple(found), left_out)


def traces(folder: Path, count: int, most: int) -> list[Distribution]:
    """Every trace in a folder or its ``traces``, by name; of several cuts of one the largest."""
    inner = folder / "traces"
    files = [*(inner if inner.is_dir() else folder).iterdir()]
    files = [path for path in files if path.suffix in (".jsonl", ".csv")]
    largest: dict[str, Path] = {}
    for path in sorted(files, key=lambda path: path.stat().st_size):
        largest[path.name.partition(".")[0]] = path
    return [trace(largest[name], count, most) for name in sorted(largest)]


def _rows(path: Path) -> Iterable[Mapping[str, object]]:
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".jsonl":
            for line in file:
                yield json.loads(line)
        else:
            yield from csv.DictReader(file)


def _lengths(row: Mapping[str, object], path: Path) -> Lengths:
    for prompt, output in _COLUMNS:
        if prompt in row and output in row:
            return Lengths(int(str(row[prompt])), int(str(row[output])))
    raise NotATrace(f"{path.name} has the columns {', '.join(map(str, row))}, wanted lengths")
