"""Public traces, read into rows of moment, lengths and block ids. Pure but for reading a file.

======== ====================================================================================
mooncake JSON lines: timestamp (ms), input_length, output_length, hash_ids (one per 512 tokens)
bailian  JSON lines: timestamp (s), input_length, output_length, chat_id, parent_chat_id,
         hash_ids (one per 16 tokens)
azure    CSV: TIMESTAMP (date and time), ContextTokens, GeneratedTokens
burstgpt CSV: Timestamp (s), Request tokens, Response tokens; answers of 0 tokens failed there
         and are left out
jsonl    our own JSON lines: at_s, output_tokens and input_tokens, where they apply with
         hash_ids (one per 16 tokens), group and cancel_after_s
======== ====================================================================================

An equal hash id is an equal block, and all before it are equal, too. Moments count from the first
row that is taken. Knows nothing of tokens.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from kvferry.cluster.loadgen.errors import BadLoad

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace.

    Attributes:
        at_s: seconds from the trace's start.
        hash_ids: one per block of the prompt, the last one partial; None: the trace has none.
        group: what the trace says it belongs to.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    group: str | None = None
    cancel_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in order of arrival, and the tokens of one of their blocks (0: no blocks)."""

    format: str
    block_tokens: int
    rows: tuple[TraceRow, ...]

    def divided(self, by_input: int, by_output: int) -> Trace:
        """Shorter by these factors, lengths rounded up; a block by the first one, exactly."""
        for name, by in (("divide_input", by_input), ("divide_output", by_output)):
            if by < 1:
                raise BadLoad(f"{name}: got {by}, wanted at least 1")
        if self.block_tokens % by_input:
            raise BadLoad(
                f"divide_input: got {by_input}; blocks of {self.block_tokens} tokens stay whole "
                "only if they are divided by a number that divides them"
            )
        rows = tuple(
            replace(
                row,
                input_tokens=-(-row.input_tokens // by_input),
                output_tokens=-(-row.output_tokens // by_output),
            )
            for row in self.rows
        )
        return Trace(self.format, self.block_tokens // by_input, rows)


Row = Mapping[str, Any]


def _mooncake(rows: Iterable[Row]) -> Iterator[TraceRow]:
    for row in rows:
        yield TraceRow(
            at_s=float(row["timestamp"]) / 1000,
            input_tokens=int(row["input_length"]),
            output_tokens=int(row["output_length"]),
            hash_ids=_ids(row["hash_ids"]),
        )


def _bailian(rows: Iterable[Row]) -> Iterator[TraceRow]:
    roots: dict[int, int] = {}
    for row in rows:
        chat, parent = int(row["chat_id"]), int(row["parent_chat_id"])
        roots[chat] = roots.get(parent, chat)
        yield TraceRow(
            at_s=float(row["timestamp"]),
            input_tokens=int(row["input_length"]),
            output_tokens=int(row["output_length"]),
            hash_ids=_ids(row["hash_ids"]),
            group=f"chat-{roots[chat]}",
        )


def _azure(rows: Iterable[Row]) -> Iterator[TraceRow]:
    for row in rows:
        yield TraceRow(
            at_s=_moment(row["TIMESTAMP"]),
            input_tokens=int(row["ContextTokens"]),
            output_tokens=int(row["GeneratedTokens"]),
        )


_MOMENT = re.compile(r"(.*?)(\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})?", re.DOTALL)


def _moment(text: str) -> float:
    """Seconds of the epoch; without an offset from UTC it is UTC. Raises ValueError.

    Tenths of microseconds, which the traces of 2023 have, are one digit more than Python reads.
    """
    whole, fraction, offset = _MOMENT.fullmatch(text.strip()).groups()  # type: ignore[union-attr]
    moment = datetime.fromisoformat(whole + (offset or "Z"))
    return moment.timestamp() + float(fraction or 0)


def _burstgpt(rows: Iterable[Row]) -> Iterator[TraceRow]:
    for row in rows:
        if int(row["Response tokens"]) > 0:
            yield TraceRow(
                at_s=float(row["Timestamp"]),
                input_tokens=int(row["Request tokens"]),
                output_tokens=int(row["Response tokens"]),
            )


def _own(rows: Iterable[Row]) -> Iterator[TraceRow]:
    for row in rows:
        group, cancel = row.get("group"), row.get("cancel_after_s")
        yield TraceRow(
            at_s=float(row["at_s"]),
            input_tokens=int(row["input_tokens"]),
            output_tokens=int(row["output_tokens"]),
            hash_ids=_ids(row["hash_ids"]) if "hash_ids" in row else None,
            group=None if group is None else str(group),
            cancel_after_s=None if cancel is None else float(cancel),
        )


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(int(each) for each in value)


@dataclass(frozen=True, slots=True)
class _Format:
    """How a kind of trace is told from others, and read. ``columns`` it alone has, together."""

    columns: tuple[str, ...]
    is_csv: bool
    block_tokens: int
    read: Callable[[Iterable[Row]], Iterator[TraceRow]]


_READERS = {
    "azure": _Format(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), True, 0, _azure),
    "burstgpt": _Format(("Timestamp", "Request tokens", "Response tokens"), True, 0, _burstgpt),
    "bailian": _Format(("chat_id", "parent_chat_id", "hash_ids"), False, 16, _bailian),
    "mooncake": _Format(("timestamp", "input_length", "hash_ids"), False, 512, _mooncake),
    "jsonl": _Format(("at_s", "input_tokens", "output_tokens"), False, 16, _own),
}
FORMATS = tuple(_READERS)


def read_trace(path: Path, kind: str = AUTO, first: int | None = None) -> Trace:
    """A trace file, or its ``first`` requests. Raises BadLoad, naming file and row."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadLoad(f"trace {path}: cannot be read: {error}") from error
    return parse_trace(text, str(path), kind, first)


def parse_trace(text: str, name: str, kind: str = AUTO, first: int | None = None) -> Trace:
    """Likewise, of a file's ``text``; ``name`` is what errors call it."""
    chosen = _recognised(text, name) if kind == AUTO else kind
    if chosen not in _READERS:
        raise BadLoad(f"trace_format: got {kind!r}, wanted {', '.join((AUTO, *FORMATS))}")
    reader = _READERS[chosen]
    at = [0]  # the row that is being read, for the message
    rows: list[TraceRow] = []
    try:
        for row in reader.read(_numbered(_rows(text, reader.is_csv), at)):
            if first is not None and len(rows) == first:
                break
            rows.append(_checked(row))
    except (KeyError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise BadLoad(f"trace {name}, row {at[0]}: {what}; wanted {chosen}") from error
    if not rows:
        raise BadLoad(f"trace {name}: holds no request")
    start = rows[0].at_s
    return Trace(
        chosen, reader.block_tokens, tuple(replace(row, at_s=row.at_s - start) for row in rows)
    )


def _checked(row: TraceRow) -> TraceRow:
    if row.input_tokens < 1 or row.output_tokens < 1:
        raise ValueError(
            f"{row.input_tokens} input and {row.output_tokens} output tokens, wanted at least 1"
        )
    return row


def _recognised(text: str, name: str) -> str:
    """The format by the first row's names."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    try:
        names = set(json.loads(first)) if first.startswith("{") else set(first.split(","))
    except ValueError:
        names = set()
    found = [kind for kind, reader in _READERS.items() if names.issuperset(reader.columns)]
    if not found:
        raise BadLoad(f"trace {name}: begins with {first!r:.80}, wanted {', '.join(FORMATS)}")
    return found[0]


def _rows(text: str, is_csv: bool) -> Iterator[Row]:
    if is_csv:
        yield from csv.DictReader(text.splitlines())
        return
    for line in text.splitlines():
        if line.strip():
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"{line!r:.80} is no object")
            yield row


def _numbered(rows: Iterator[Row], at: list[int]) -> Iterator[Row]:
    for number, row in enumerate(rows, start=1):
        at[0] = number
        yield row
