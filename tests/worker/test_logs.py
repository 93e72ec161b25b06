"""Every record is one line of JSON, or the text it always was."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.worker.logs import JsonFormatter, about


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    logger = logging.getLogger("kvferry.test")
    return logger.makeRecord(
        logger.name, logging.WARNING, "file", 1, message, args, None, extra=extra
    )


def formatted(made: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter("decode-0").format(made)
    assert "\n" not in line and "\r" not in line and line.isascii()
    found = json.loads(line)
    assert isinstance(found, dict)
    return found


@given(st.text(), st.text(min_size=1))
def test_any_message_is_one_line_and_comes_back(message: str, request_id: str) -> None:
    found = formatted(record("%s", message, **about(request_id, 3)))
    assert (found["message"], found["request_id"], found["attempt"]) == (message, request_id, 3)
    assert (found["level"], found["logger"], found["process"]) == (
        "warning",
        "kvferry.test",
        "decode-0",
    )


def test_the_time_is_that_of_the_record_in_utc() -> None:
    made = record("x")
    made.created = 1767323045.25
    at = datetime.fromisoformat(formatted(made)["time"])
    assert at.utcoffset() == timedelta(0)
    assert at.timestamp() == 1767323045.25
    assert formatted(made)["time"] == "2026-01-02T03:04:05.250+00:00"


def test_a_record_about_nothing_in_particular_has_no_context() -> None:
    assert formatted(record("x")).keys() == {"time", "level", "logger", "message", "process"}
    several = [about("a", 1), about("b", 2)]
    assert formatted(record("x", requests=several))["requests"] == several


def test_a_traceback_is_part_of_the_line() -> None:
    try:
        raise ArithmeticError("told to fail")
    except ArithmeticError:
        made = record("x")
        made.exc_info = sys.exc_info()
    exception = formatted(made)["exception"]
    assert exception.startswith("Traceback") and exception.endswith("told to fail")


CODE = """
import logging, sys, warnings
from kvferry.worker.logs import LogSettings, about, set_up_logging
set_up_logging(LogSettings("INFO", sys.argv[1]), "router-0")
logging.getLogger("kvferry.a").debug("unseen")
logging.getLogger("kvferry.a").info("seen %d", 1, extra=about("r", 2))
logging.getLogger("elsewhere").warning("two\\nlines")
warnings.warn("beware")
"""


def lines(form: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-c", CODE, form], capture_output=True, text=True, check=True
    )
    assert ran.stdout == ""
    return ran.stderr.splitlines()


def test_text_is_as_it_was() -> None:
    assert lines("text")[:3] == ["INFO kvferry.a: seen 1", "WARNING elsewhere: two", "lines"]


def test_json_is_all_that_a_process_writes_with_warnings_too() -> None:
    found = [json.loads(line) for line in lines("json")]
    assert [each["message"].partition(":")[0] for each in found] == [
        "seen 1",
        "two\nlines",
        "<string>",
    ]
    assert found[0]["request_id"] == "r" and found[0]["attempt"] == 2
    assert {each["process"] for each in found} == {"router-0"}
    assert found[2]["logger"] == "py.warnings" and "beware" in found[2]["message"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_level_holds(form: str) -> None:
    assert not any("unseen" in line for line in lines(form))
