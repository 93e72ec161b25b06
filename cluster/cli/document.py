"""The JSON document of a command: head, fields, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from kvferry.cluster.cli.command import Result
from kvferry.cluster.errors import Cancelled
from kvferry.cluster.reports.common import common_fields
from kvferry.cluster.reports.documents import error_json


@dataclass(frozen=True, slots=True)
class Document:
    """Document ``kvferry.NAME/1`` and the names of its own fields.

    A field that a failed command did not get to is null; ``ok`` and ``error`` are always there.
    """

    name: str
    fields: tuple[str, ...]

    def render(self, result: Result, argv: Sequence[str], now: datetime) -> str:
        """The document as one line of JSON."""
        error = result.error
        if isinstance(error, KeyboardInterrupt):
            error = Cancelled("interrupted")
        document = {
            **common_fields(self.name, argv, now),
            "ok": error is None,
            "error": error_json(error),
            **{name: result.fields.get(name) for name in self.fields},
        }
        return json.dumps(document, allow_nan=False)
