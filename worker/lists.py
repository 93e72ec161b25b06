"""The periodic lists between router and worker: what is still wanted, and what is held.

They are the retransmission of everything else, see ``worker.messages``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvferry.engine.request import Attempt, RequestId


class Leg(StrEnum):
    """The two halves of a request's work."""

    PREFILL = "prefill"
    DECODE = "decode"


class Received(NamedTuple):
    """How many output tokens of a branch the router has."""

    branch: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class WantedItem:
    """A leg that the router still wants, and what it has received of each branch.

    A branch that is not among them is wanted no longer.
    """

    request_id: RequestId
    attempt: Attempt
    leg: Leg
    received: tuple[Received, ...]


@dataclass(frozen=True, slots=True)
class WantedList:
    """Router → worker, every period: all legs wanted there. What two lists in a row omit goes."""

    items: tuple[WantedItem, ...]


class LegState(StrEnum):
    """A leg as its worker sees it."""

    FULL = "full"
    RESERVED = "reserved"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class HeldItem:
    """A leg that a worker holds for the router; a decode leg may compute its prompt itself."""

    request_id: RequestId
    attempt: Attempt
    leg: Leg
    state: LegState
    branch: int = 0
    tokens_produced: int = 0
    missing_from: int = 0
    computes: bool = False


@dataclass(frozen=True, slots=True)
class HeldList:
    """Worker → router, every period: all legs held for it."""

    items: tuple[HeldItem, ...]
