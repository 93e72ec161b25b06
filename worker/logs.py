"""How a process logs: to standard error, as lines of text or as one JSON object a line.

A record about a request carries its id and attempt as ``extra`` (``about``), which the text format
leaves to the message. Prompts and tokens are never logged.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TextIO

TEXT_FORMAT = "%(levelname)s %(name)s: %(message)s"
CONTEXT = ("request_id", "attempt", "requests")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """``logging`` of the configuration; ``level`` as Python names it."""

    level: str = "WARNING"
    format: Literal["text", "json"] = "text"


def about(request_id: str, attempt: int) -> dict[str, object]:
    """The ``extra`` of a record about a request in one of its attempts."""
    return {"request_id": request_id, "attempt": attempt}


class JsonFormatter(logging.Formatter):
    """A record as one JSON object: ``time`` (UTC), ``level``, ``logger``, ``message``, ``process``,
    and where known ``request_id`` and ``attempt`` (``requests``, a list of these, where it is about
    several) and ``exception`` (the traceback).

    ``process`` names the router or worker.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The record's line, without its end."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": self._process,
        }
        line |= {name: record.__dict__[name] for name in CONTEXT if name in record.__dict__}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=True)


def set_up_logging(settings: LogSettings, process: str, stream: TextIO | None = None) -> None:
    """Let everything that this process logs go to ``stream``, by default standard error.

    Does nothing where somebody has set logging up before.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    as_json = settings.format == "json"
    handler.setFormatter(JsonFormatter(process) if as_json else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=settings.level, handlers=[handler])
    logging.captureWarnings(as_json)
