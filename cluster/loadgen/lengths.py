"""Numbers of tokens (or of turns) by a specification: a number, or a distribution of numbers.

    256                       exactly
    uniform:64:512            64 to 512, each alike
    lognormal:256:0.8         median 256, sigma 0.8 of the logarithm
    lognormal:256:0.8:16:2048 the same, cut to 16 ... 2048
    mix:0.9*64,0.1*1024       of each kind its share; a kind is a number or a distribution

Pure: a specification and randomness in, numbers out. Numbers are at least 1.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol

from kvferry.cluster.loadgen.errors import BadLoad

WANTED = "wanted N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA[:LOW:HIGH] or mix:SHARE*KIND,..."


class Lengths(Protocol):
    """Draws numbers of at least 1."""

    @property
    def fixed(self) -> int | None:
        """The number, if it is always the same."""

    def draw(self, rng: random.Random) -> int:
        """The next one."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always ``number``."""

    number: int

    @property
    def fixed(self) -> int | None:
        """The number."""
        return self.number

    def draw(self, rng: random.Random) -> int:
        """The number; draws nothing."""
        return self.number


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every whole number from ``low`` to ``high`` alike."""

    low: int
    high: int

    @property
    def fixed(self) -> int | None:
        """None, unless both ends are one number."""
        return self.low if self.low == self.high else None

    def draw(self, rng: random.Random) -> int:
        """The next one."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """``median * exp(sigma * N(0, 1))``, rounded, and cut to ``low`` ... ``high``."""

    median: float
    sigma: float
    low: int = 1
    high: int | None = None

    @property
    def fixed(self) -> int | None:
        """None."""
        return None

    def draw(self, rng: random.Random) -> int:
        """The next one."""
        drawn = self.median * math.exp(min(self.sigma * rng.gauss(0, 1), 700.0))
        most = drawn if self.high is None else min(drawn, self.high)
        return max(self.low, round(most))


@dataclass(frozen=True, slots=True)
class Mix:
    """One of ``kinds``, chosen by their ``shares``, which need not add up to one."""

    shares: tuple[float, ...]
    kinds: tuple[Lengths, ...]

    @property
    def fixed(self) -> int | None:
        """None."""
        return None

    def draw(self, rng: random.Random) -> int:
        """The next one."""
        return rng.choices(self.kinds, self.shares)[0].draw(rng)


def parse_lengths(text: str) -> Lengths:
    """The distribution that ``text`` specifies. Raises BadLoad."""
    try:
        return _parse(text)
    except ValueError as error:
        raise BadLoad(f"length {text!r}: {error}; {WANTED}") from error


def _parse(text: str) -> Lengths:
    name, _, rest = text.partition(":")
    parts = rest.split(":")
    match name:
        case "uniform":
            low, high = (_count(part) for part in parts)
            if high < low:
                raise ValueError(f"{high} is below {low}")
            return Uniform(low, high)
        case "lognormal":
            return _lognormal(parts)
        case "mix":
            pairs = [part.partition("*") for part in rest.split(",")]
            shares = tuple(_positive(share) for share, _, _ in pairs)
            return Mix(shares, tuple(_parse(kind) for _, _, kind in pairs))
        case _:
            return Fixed(_count(text))


def _lognormal(parts: list[str]) -> Lognormal:
    if len(parts) not in (2, 4):
        raise ValueError(f"{len(parts)} numbers")
    median, sigma = (_positive(part) for part in parts[:2])
    if len(parts) == 2:
        return Lognormal(median, sigma)
    low, high = (_count(part) for part in parts[2:])
    if high < low:
        raise ValueError(f"{high} is below {low}")
    return Lognormal(median, sigma, low, high)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"{number} is below 1")
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError(f"{text} is no positive number")
    return number
