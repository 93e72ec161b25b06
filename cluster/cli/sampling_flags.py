"""The flags that are sampling parameters; what is not given is left to the server.

Owns their names and help. Ranges are the server's business, which refuses what is out of them by
the field's name.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, cast

from kvferry.cluster.cli.flags import positive, seed
from kvferry.cluster.client_stream import GenerateOptions, Sampling
from kvferry.engine.request import EarlyStopping, SamplingParams

_DEFAULTS = SamplingParams()


# flag, what its argument is called, how it is read, what it does
_NUMBERS: tuple[tuple[str, str, Callable[[str], Any], str], ...] = (
    ("max-tokens", "N", positive, "output tokens at most"),
    ("min-tokens", "N", int, "output tokens before anything may stop it"),
    ("temperature", "T", float, "randomness; 0 is greedy"),
    ("top-p", "P", float, "keep the likeliest tokens up to this probability"),
    ("top-k", "K", int, "keep the K likeliest tokens; 0 keeps all"),
    ("min-p", "P", float, "keep tokens at least P times as likely as the likeliest"),
    ("repetition-penalty", "X", float, "weaken tokens of prompt and output; 1 is none"),
    ("presence-penalty", "X", float, "weaken tokens that the output has"),
    ("frequency-penalty", "X", float, "weaken them once per occurrence"),
    ("logprobs", "N", int, "log-probability of each output token and of the N likeliest"),
    ("prompt-logprobs", "N", int, "likewise of each prompt token but the first"),
    ("num-beams", "N", int, "search the likeliest output with N beams"),
    ("length-penalty", "X", float, "of beams: divide scores by length to this power"),
)
# flag, field, what its argument is called, how it is read, what it does
_LISTS: tuple[tuple[str, str, str, Callable[[str], Any], str], ...] = (
    ("stop", "stop", "STR", str, "end before this string"),
    ("stop-token-id", "stop_token_ids", "ID", int, "end with this token id"),
    ("bad-word", "bad_words", "STR", str, "never produce this word's tokens"),
)
# flag, field, value, what it does
_SWITCHES = (
    ("include-stop", "include_stop_str_in_output", True, "show what stopped it too"),
    ("ignore-eos", "ignore_eos", True, "go on past the model's end-of-sequence token"),
    ("show-special-tokens", "skip_special_tokens", False, "show special tokens in the text"),
)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the flags, grouped under their own heading."""
    group = parser.add_argument_group("sampling")
    for flag, metavar, kind, text in _NUMBERS:
        default = getattr(_DEFAULTS, flag.replace("-", "_"))
        said = "none" if default is None else f"{default:g}"
        group.add_argument(
            f"--{flag}", metavar=metavar, type=kind, help=f"{text} (default: {said})"
        )
    group.add_argument(
        "--n",
        metavar="N",
        type=positive,
        help="outputs, each a branch of one computed prompt (default: 1)",
    )
    group.add_argument(
        "--early-stopping",
        choices=[when.value for when in EarlyStopping],
        help="of beams: over as soon as N outputs have ended; with false when none of the present "
        f"length is better, with never when none could be (default: {_DEFAULTS.early_stopping})",
    )
    group.add_argument(
        "--seed", metavar="S", type=seed, help="key of the random choice (default: drawn anew)"
    )
    group.add_argument(
        "--logit-bias",
        metavar="ID=X",
        action=_Biases,
        help="add X to the logit of this token id; may be repeated (default: none)",
    )
    for flag, field, metavar, kind, text in _LISTS:
        group.add_argument(
            f"--{flag}",
            dest=field,
            metavar=metavar,
            action="append",
            type=kind,
            help=f"{text}; may be repeated (default: none)",
        )
    for flag, field, value, text in _SWITCHES:
        group.add_argument(
            f"--{flag}",
            dest=field,
            action="store_const",
            const=value,
            help=f"{text} (default: off)",
        )


def sampling_options(args: argparse.Namespace) -> GenerateOptions:
    """The client's options for the flags that were given."""
    given = {name: getattr(args, name) for name in Sampling.__annotations__}
    return cast(GenerateOptions, {k: v for k, v in given.items() if v is not None})


class _Biases(argparse.Action):
    """Collects ID=X into a dictionary; an id that stands twice is an error."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        token_id, _, bias = values.partition("=")
        biases: dict[int, float] = getattr(namespace, self.dest) or {}
        try:
            key, value = int(token_id), float(bias)
        except ValueError:
            raise argparse.ArgumentError(
                self, f"got {values!r}, wanted ID=X, such as 42=-5"
            ) from None
        if key in biases:
            raise argparse.ArgumentError(self, f"token id {key} is given twice")
        setattr(namespace, self.dest, {**biases, key: value})
