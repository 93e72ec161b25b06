"""Rotary frequencies in torch, with the roundings of transformers.

Knows only ``rope.Rope``; each function is one line of its docstring.
"""

from __future__ import annotations

import math

import torch

from kvferry.engine.models.rope import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions.  [head_dim / 2] float32"""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    powers = rope.theta**exponents
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.divisors, dtype=torch.float32) * powers)
    plain = 1.0 / powers
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, powers)
    return plain


def _llama3(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    wavelength = 2 * math.pi / plain
    stretched = plain / rope.factor
    blend = (rope.original_len / wavelength - rope.low) / (rope.high - rope.low)
    between = (1 - blend) * plain / rope.factor + blend * plain
    outside = torch.where(wavelength > rope.original_len / rope.low, stretched, plain)
    is_outside = (wavelength < rope.original_len / rope.high) | (
        wavelength > rope.original_len / rope.low
    )
    return torch.where(is_outside, outside, between)


def _yarn(rope: Rope, powers: torch.Tensor) -> torch.Tensor:
    num_pairs = len(powers)
    first, last = (_pair_turning(rope, turns, num_pairs) for turns in (rope.high, rope.low))
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    width = last - first if last != first else 0.001
    ramp = ((torch.arange(num_pairs, dtype=torch.float32) - first) / width).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _pair_turning(rope: Rope, turns: float, num_pairs: int) -> float:
    """The (fractional) pair that turns ``turns`` times within ``original_len`` positions."""
    return num_pairs * math.log(rope.original_len / (turns * 2 * math.pi)) / math.log(rope.theta)
