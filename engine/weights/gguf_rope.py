"""The rotary embedding of a GGUF file as the ``rope_scaling`` of a Hugging Face configuration.

Owns the meaning of the ``rope.scaling.*`` keys and of the tensor ``rope_freqs.weight``. Does not
read files; impossible values are left for ``ModelConfig`` to name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FREQUENCIES_TENSOR = "rope_freqs.weight"

_PLAIN = ("none", "")
# Keys that change the result in ways that no ``rope_scaling`` says, with the value that does not.
_NEUTRAL: Mapping[str, float] = {
    "alpha": 0.0,
    "yarn_ext_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_log_multiplier": 0.0,
}


class UntranslatableRope(ValueError):
    """The file scales its rope in a way that a Hugging Face configuration cannot say."""


def rope_scaling(
    scaling: Mapping[str, Any], context_length: int, divisors: list[float] | None
) -> dict[str, Any] | None:
    """What to write as ``rope_scaling``, or None for the plain embedding.

    Args:
        scaling: the values of the keys ``<architecture>.rope.scaling.*``, by their last part.
        context_length: positions the model was made for.
        divisors: the values of ``rope_freqs.weight``, which divide the frequencies, if it is there.
            Llama 3 is stored so. They become longrope's factors, the same for short and long.

    Raises UntranslatableRope.
    """
    kind = scaling.get("type", "none")
    for key, neutral in _NEUTRAL.items():
        if kind not in _PLAIN and scaling.get(key, neutral) != neutral:
            raise UntranslatableRope(f"rope.scaling.{key} {scaling[key]} (wanted {neutral})")
    stretch = scaling.get("attn_factor", 1.0)
    if kind != "yarn" and stretch != 1.0:
        raise UntranslatableRope(f"rope.scaling.attn_factor {stretch} without yarn (wanted 1)")
    if divisors is not None and any(divisor != 1.0 for divisor in divisors):
        if kind not in _PLAIN:
            raise UntranslatableRope(f"{FREQUENCIES_TENSOR} together with rope of type {kind!r}")
        return {
            "rope_type": "longrope",
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context_length,
            "short_factor": divisors,
            "long_factor": divisors,
        }
    if kind in _PLAIN:
        return None
    found = {"rope_type": kind, "factor": scaling.get("factor")}
    return found | _yarn(scaling, context_length) if kind == "yarn" else found


def _yarn(scaling: Mapping[str, Any], context_length: int) -> dict[str, Any]:
    """Yarn's keys; GGUF's ``attn_factor`` comes on top of the paper's ``0.1 ln(factor) + 1``."""
    found: dict[str, Any] = {
        "original_max_position_embeddings": scaling.get("original_context_length", context_length)
    }
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if theirs in scaling:
            found[ours] = scaling[theirs]
    factor, stretch = scaling.get("factor"), scaling.get("attn_factor", 1.0)
    if stretch != 1.0 and isinstance(factor, float) and isinstance(stretch, float):
        found["attention_factor"] = stretch * (0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
    return found
