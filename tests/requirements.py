"""What a test needs from outside the repository, and what happens when it is missing."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(variable: str, reason: str) -> NoReturn:
    """Skip the calling test or fixture; fail it where ``variable`` (``KVFERRY_REQUIRE_...``) is 1.

    Continuous integration sets the variables, so that nothing there is skipped unseen.
    """
    if os.environ.get(variable) == "1":
        pytest.fail(f"{reason} ({variable}=1 makes this a failure)", pytrace=False)
    pytest.skip(f"{reason} (a failure under {variable}=1)")
