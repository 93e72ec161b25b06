"""Prompts as people wrote them, from JSON lines. Pure but for reading a file.

A line is one session, in any of the shapes that public collections have:

    {"prompt": TEXT}                             one turn; {"text": TEXT} likewise
    {"turns": [TEXT, ...]}                       several turns
    {"instruction": TEXT, "instances": [{"input": TEXT}]}     one turn of both
    {"question": [[{"role": ..., "content": TEXT}, ...], ...], "function": [...]}    turns, tools

and any may have "tools" (a list of tool definitions) and "output_tokens".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.lengths import Lengths
from kvferry.cluster.loadgen.sessions import Session, Turn
from kvferry.cluster.loadgen.workloads import Cancels, Source

Json = Mapping[str, Any]


def read_prompts(path: Path) -> list[Json]:
    """The file's objects. Raises BadLoad, naming file and line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadLoad(f"prompts {path}: cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            turns_of(row)
            tools_of(row)
            output_tokens_of(row)
        except BadShape as error:
            raise BadLoad(f"prompts {path}, line {number}: {error}") from error
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise BadLoad(
                f"prompts {path}, line {number}: {line!r:.60} is in no known shape, "
                'wanted {"prompt": TEXT} or {"turns": [TEXT, ...]}'
            ) from error
        found.append(row)
    if not found:
        raise BadLoad(f"prompts {path}: holds no prompt")
    return found


class BadShape(ValueError):
    """A line's field is of another kind than it should be; the words name it."""


def turns_of(row: Json) -> list[str]:
    """What is said in each turn. Raises KeyError, TypeError, ValueError."""
    if "turns" in row:
        turns = [_text(turn) for turn in row["turns"]]
    elif "question" in row:
        # A turn that says nothing is one in which the collection adds a tool.
        turns = ["\n".join(_text(said["content"]) for said in turn) for turn in row["question"]]
        turns = [turn for turn in turns if turn]
    elif "instruction" in row:
        instances = row.get("instances") or [{}]
        turns = ["\n".join(filter(None, (row["instruction"], instances[0].get("input", ""))))]
    else:
        turns = [_text(row["prompt"] if "prompt" in row else row["text"])]
    if not turns or not all(turns):
        raise ValueError("an empty turn")
    return turns


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no text")
    return value


def tools_of(row: Json) -> tuple[Json, ...]:
    """Tool definitions as OpenAI writes them. Raises BadShape."""
    name = "tools" if row.get("tools") else "function"
    tools: Sequence[Json] = row.get(name) or ()
    if not isinstance(tools, list | tuple) or not all(isinstance(each, dict) for each in tools):
        raise BadShape(f"{name}: got {tools!r:.60}, wanted a list of objects")
    return tuple(
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
    )


def output_tokens_of(row: Json) -> int | None:
    """The length that the line asks for; None: it does not say. Raises BadShape."""
    found = row.get("output_tokens")
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise BadShape(f"output_tokens: got {found!r:.60}, wanted a number of at least 1")
    return found


def sessions(
    rows: Sequence[Json],
    count: int,
    source: Source,
    output_tokens: Lengths,
    think_s: float,
    cancels: Cancels,
) -> list[Session]:
    """``count`` sessions of the file's prompts, in its order, from the beginning again if need be.

    ``output_tokens`` holds where a line does not say.
    """
    made = []
    for number in range(count):
        row, rng = rows[number % len(rows)], source.rng("session", number)
        turns = tuple(
            Turn(
                text=text,
                output_tokens=output_tokens_of(row) or output_tokens.draw(rng),
                think_s=think_s if place else 0.0,
                cancel_after_s=cancels.draw(rng),
            )
            for place, text in enumerate(turns_of(row))
        )
        made.append(Session(number, turns, tools=tools_of(row)))
    return made
