"""The flags that are sampling parameters; what is not given is left to the server.

Owns their names and help. Ranges are the server's business, which refuses what is out of them by
the field's name.
"""

from __future__ import annotations

import argparse
from typing import Any, cast

from kvferry.cluster.cli.flags import positive, seed
from kvferry.cluster.client_stream import GenerateOptions, Sampling
from kvferry.engine.request import SamplingParams

_DEFAULTS = SamplingParams()


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the flags, grouped under their own heading."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        metavar="N",
        type=positive,
        default=128,
        help="output tokens at most (default: %(default)s)",
    )
    group.add_argument(
        "--min-tokens",
        metavar="N",
        type=int,
        help=f"output tokens before anything may stop it (default: {_DEFAULTS.min_tokens})",
    )
    _add_float(group, "--temperature", "T", "randomness; 0 is greedy")
    _add_float(group, "--top-p", "P", "keep the likeliest tokens up to this probability")
    group.add_argument(
        "--top-k",
        metavar="K",
        type=int,
        help=f"keep the K likeliest tokens; 0 keeps all (default: {_DEFAULTS.top_k})",
    )
    _add_float(group, "--min-p", "P", "keep tokens at least P times as likely as the likeliest")
    _add_float(group, "--repetition-penalty", "X", "weaken tokens of prompt and output; 1 is none")
    _add_float(group, "--presence-penalty", "X", "weaken tokens that the output has")
    _add_float(group, "--frequency-penalty", "X", "weaken them once per occurrence")
    group.add_argument(
        "--logit-bias",
        metavar="ID=X",
        action="append",
        type=_bias,
        help="add X to the logit of this token id; may be repeated (default: none)",
    )
    group.add_argument(
        "--bad-word",
        dest="bad_words",
        metavar="STR",
        action="append",
        help="never produce this word's tokens; may be repeated (default: none)",
    )
    group.add_argument(
        "--seed", metavar="S", type=seed, help="key of the random choice (default: drawn anew)"
    )
    group.add_argument(
        "--stop",
        metavar="STR",
        action="append",
        help="end before this string; may be repeated (default: none)",
    )
    group.add_argument(
        "--stop-token-id",
        dest="stop_token_ids",
        metavar="ID",
        action="append",
        type=int,
        help="end with this token id; may be repeated (default: none)",
    )
    _add_switch(group, "--include-stop", "include_stop_str_in_output", "show what stopped it too")
    _add_switch(group, "--ignore-eos", "ignore_eos", "go on past the model's end-of-sequence token")
    group.add_argument(
        "--show-special-tokens",
        dest="skip_special_tokens",
        action="store_const",
        const=False,
        help="show special tokens in the text (default: off)",
    )
    group.add_argument(
        "--logprobs",
        metavar="N",
        type=int,
        help="log-probability of each output token and of the N likeliest (default: none)",
    )
    group.add_argument(
        "--prompt-logprobs",
        metavar="N",
        type=int,
        help="likewise of each prompt token but the first (default: none)",
    )


def sampling_options(args: argparse.Namespace) -> GenerateOptions:
    """The client's options for the flags that were given."""
    given = {name: getattr(args, name) for name in Sampling.__annotations__}
    options = {name: value for name, value in given.items() if value is not None}
    if "logit_bias" in options:
        options["logit_bias"] = dict(options["logit_bias"])
    return cast(GenerateOptions, options)


def _add_float(group: Any, flag: str, metavar: str, text: str) -> None:
    default = getattr(_DEFAULTS, flag.removeprefix("--").replace("-", "_"))
    group.add_argument(flag, metavar=metavar, type=float, help=f"{text} (default: {default:g})")


def _add_switch(group: Any, flag: str, name: str, text: str) -> None:
    group.add_argument(
        flag, dest=name, action="store_true", default=None, help=f"{text} (default: off)"
    )


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted ID=X, such as 42=-5") from None
