"""The rotary embedding as data: which frequencies a checkpoint asks for.

Owns the reading of ``rope_theta`` with ``rope_scaling`` (old) or ``rope_parameters`` (new).
``frequencies`` computes from it. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvferry.engine.models.checkpoint import shown
from kvferry.engine.models.errors import DamagedModel
from kvferry.engine.models.refusals import unsupported

_SMALLEST, _LARGEST = 1e-6, 1e15

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Frequencies of one decoder, over the whole of ``head_dim``, the same in every layer.

    With ``f_i = theta ** (-2i / head_dim)`` pair ``i`` turns per position by

    - default: ``f_i``.
    - linear: ``f_i / factor``.
    - dynamic: ``f_i``. The base grows only beyond ``max_position_embeddings``, and then every key
      already in the cache would have to be turned anew. ``max_model_len`` is that bound, so no
      sequence gets there.
    - llama3: ``f_i`` for wavelengths below ``original_len / high``, ``f_i / factor`` above
      ``original_len / low``, a blend of both between (Llama 3.1).
    - yarn: from ``f_i`` to ``f_i / factor`` along a ramp between the pairs that turn ``high`` and
      ``low`` times within ``original_len``, rounded outwards if ``truncate`` (Peng et al., 2023,
      https://arxiv.org/abs/2309.00071).
    - longrope: ``f_i / divisors[i]`` (Ding et al., 2024, https://arxiv.org/abs/2402.13753). Only
      one set of divisors: where the set would change with the length of a sequence, keys already
      in the cache would be wrong, and the model is refused.

    ``attention_factor`` multiplies cosines and sines, and so attention scores by its square.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    attention_factor: float = 1.0
    original_len: int = 0
    low: float = 0.0
    high: float = 0.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()


def read_rope(
    config: Mapping[str, Any], name: str, architecture: str, head_dim: int, max_model_len: int
) -> Rope:
    """Read what ``config.json`` says, in either form; the older one wins, as in transformers.

    Raises UnsupportedModel for what ``Rope`` cannot say, DamagedModel for impossible values.
    """
    section = _section(config)
    kind = section.get("rope_type") or section.get("type") or "default"
    if any(isinstance(value, Mapping) for value in section.values()):
        raise unsupported(name, architecture, "rope per layer type (wanted one for all layers)")
    if kind not in get_args(RopeKind):
        wanted = ", ".join(get_args(RopeKind))
        raise unsupported(name, architecture, f"rope of type {shown(kind)} (wanted {wanted})")
    if section.get("partial_rotary_factor") not in (None, 1):
        raise unsupported(name, architecture, "a partial rotary embedding (wanted the whole head)")
    theta = _number(section if section.get("rope_theta") is not None else config, "rope_theta", 1e4)
    original = config.get("original_max_position_embeddings")
    if original is None:
        original = section.get("original_max_position_embeddings")
    original = max_model_len if original is None else original
    if kind == "linear":
        return Rope(theta, "linear", _number(section, "factor"))
    if kind == "dynamic":
        return Rope(theta, "dynamic", _number(section, "factor"))
    if kind == "default":
        return Rope(theta)
    if type(original) is not int or not 1 < original <= _LARGEST:
        raise DamagedModel(
            f"config.json: original_max_position_embeddings is {shown(original)}, wanted an "
            "integer above 1"
        )
    if kind == "llama3":
        return _llama3(section, theta, original)
    factor = _number(section, "factor", max_model_len / original)
    if kind == "yarn":
        return _yarn(section, theta, factor, original)
    short, long = (_divisors(section, key, head_dim) for key in ("short_factor", "long_factor"))
    if short != long and max_model_len > original:
        found = "longrope whose short and long factors differ (they would change in mid-sequence)"
        raise unsupported(name, architecture, found)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    attention = _number(section, "attention_factor", default)
    return Rope(theta, "longrope", factor, attention, original, divisors=short)


def _section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("rope_scaling", "rope_parameters"):
        section = config.get(key)
        if section is not None and not isinstance(section, Mapping):
            raise DamagedModel(f"config.json: {key} is {shown(section)}, wanted an object")
        if section:
            return section
    return {}


def _llama3(section: Mapping[str, Any], theta: float, original: int) -> Rope:
    low, high = _number(section, "low_freq_factor"), _number(section, "high_freq_factor")
    if high <= low:
        raise DamagedModel(
            f"config.json: high_freq_factor {high} is not above low_freq_factor {low}"
        )
    factor = _number(section, "factor")
    return Rope(theta, "llama3", factor, original_len=original, low=low, high=high)


def _yarn(section: Mapping[str, Any], theta: float, factor: float, original: int) -> Rope:
    if theta <= 1:
        raise DamagedModel(f"config.json: rope_theta is {theta}, wanted above 1 for yarn")
    truncate = section.get("truncate", True)
    return Rope(
        theta,
        "yarn",
        factor,
        _number(section, "attention_factor", _yarn_attention(section, factor)),
        original,
        low=_number(section, "beta_slow", 1.0),
        high=_number(section, "beta_fast", 32.0),
        truncate=bool(truncate),
    )


def _yarn_attention(section: Mapping[str, Any], factor: float) -> float:
    """``0.1 ln(factor) + 1``, or the quotient of two such, weighted by ``mscale`` and its twin."""

    def scaled(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if section.get("mscale") and section.get("mscale_all_dim"):
        return scaled(_number(section, "mscale")) / scaled(_number(section, "mscale_all_dim"))
    return scaled(1.0)


def _divisors(section: Mapping[str, Any], key: str, head_dim: int) -> tuple[float, ...]:
    value = section.get(key)
    if not isinstance(value, list) or len(value) != head_dim // 2:
        found = f"{len(value)} numbers" if isinstance(value, list) else shown(value)
        raise DamagedModel(
            f"config.json: {key} of rope is {found}, wanted {head_dim // 2}, half of head_dim"
        )
    return tuple(_number({key: item}, key) for item in value)


def _number(section: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number of a size that frequencies have; null and absence give the default."""
    value = section.get(key)
    if value is None:
        value = default
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not _SMALLEST <= value <= _LARGEST
    ):
        wanted = f"a number from {_SMALLEST} to {_LARGEST}"
        raise DamagedModel(f"config.json: {key} of rope is {shown(value)}, wanted {wanted}")
    return float(value)
