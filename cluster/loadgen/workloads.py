"""Made-up sessions from a seed: independent, with shared openings, of several turns, with tools.

All are one shape: an opening that a share of the sessions has in common with its group, then
turns of drawn lengths. Session number n is a function of seed, repeat and n alone, so a longer
plan begins like a shorter one, and no two repeats have tokens in common that a cache could answer
for. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.lengths import Fixed, Lengths
from kvferry.cluster.loadgen.sessions import Session, Turn, words

TOOL_TOKENS = 64  # about as many words describe one made-up tool


@dataclass(frozen=True, slots=True)
class Source:
    """Randomness and tokens of one repeat.

    ``rng`` and ``tokens`` give the same for the same purpose, whatever was drawn before.
    """

    seed: int
    repeat: int
    vocab_size: int

    def rng(self, *purpose: object) -> random.Random:
        """Randomness of its own for a purpose."""
        return random.Random("/".join(map(str, (self.seed, self.repeat, *purpose))))

    def tokens(self, count: int, *purpose: object) -> tuple[int, ...]:
        """``count`` token ids; fewer of a purpose are the beginning of more."""
        return tuple(self.rng("tokens", *purpose).choices(range(self.vocab_size), k=count))


@dataclass(frozen=True, slots=True)
class Cancels:
    """A share of the requests is cancelled, each at a moment drawn evenly from ``within_s``."""

    share: float = 0.0
    within_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise BadLoad(f"cancel_share: got {self.share}, wanted 0 to 1")
        if self.share and self.within_s <= 0:
            raise BadLoad(f"cancel_within: got {self.within_s}, wanted more than 0 seconds")

    def draw(self, rng: random.Random) -> float | None:
        """Seconds from sending to cancelling; None: it is not cancelled."""
        is_cancelled, after = rng.random() < self.share, rng.random() * self.within_s
        return after if is_cancelled else None


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Sessions of drawn lengths.

    Attributes:
        input_tokens: of each turn, beside the opening and what was said before.
        output_tokens: of each answer.
        opening_tokens: of the opening; None: there is none. A group's opening has one length.
        shared_ratio: the share of sessions that begin with their group's opening. The others
            begin with one as long that nobody else has.
        groups: how many different openings are shared.
        turns: of each session.
        think_s: between an answer and the next turn.
        has_tools: the opening is a list of tool definitions.
        cancels: which requests are given up.
    """

    input_tokens: Lengths
    output_tokens: Lengths
    opening_tokens: Lengths | None = None
    shared_ratio: float = 1.0
    groups: int = 1
    turns: Lengths = Fixed(1)  # noqa: RUF009  (frozen)
    think_s: float = 0.0
    has_tools: bool = False
    cancels: Cancels = Cancels()

    def __post_init__(self) -> None:
        if not 0 <= self.shared_ratio <= 1:
            raise BadLoad(f"shared_ratio: got {self.shared_ratio}, wanted 0 to 1")
        if self.groups < 1:
            raise BadLoad(f"groups: got {self.groups}, wanted at least 1")

    def sessions(self, count: int, source: Source) -> list[Session]:
        """The first ``count``."""
        return [self._session(number, source) for number in range(count)]

    def _session(self, number: int, source: Source) -> Session:
        rng = source.rng("session", number)
        group = rng.randrange(self.groups)
        owner = ("group", group) if rng.random() < self.shared_ratio else ("session", number)
        opening: tuple[int, ...] = ()
        if self.opening_tokens is not None:
            length = self.opening_tokens.draw(source.rng("length", "group", group))
            opening = source.tokens(length, "opening", *owner)
        is_shared = self.opening_tokens is not None and owner[0] == "group"
        turns = tuple(
            Turn(
                token_ids=source.tokens(self.input_tokens.draw(rng), "turn", number, place),
                output_tokens=self.output_tokens.draw(rng),
                think_s=self.think_s if place else 0.0,
                cancel_after_s=self.cancels.draw(rng),
            )
            for place in range(self.turns.draw(rng))
        )
        return Session(
            number=number,
            turns=turns,
            opening=opening,
            group=f"{owner[0]}-{owner[1]}" if is_shared else None,
            tools=tool_definitions(opening) if self.has_tools else (),
        )


def tool_definitions(token_ids: tuple[int, ...]) -> tuple[Mapping[str, Any], ...]:
    """Functions as OpenAI describes them, of the words that stand for ``token_ids``."""
    pieces = [
        token_ids[start : start + TOOL_TOKENS] for start in range(0, len(token_ids), TOOL_TOKENS)
    ]
    return tuple(
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": words(piece).strip(),
                "parameters": {
                    "type": "object",
                    "properties": {"value": {"type": "string"}},
                    "required": ["value"],
                },
            },
        }
        for number, piece in enumerate(pieces)
    )
