"""The sampling fields of a request: ranges, defaults, and what is refused.

Turns ``kvferry.v1.SamplingParams`` into ``engine.request.SamplingParams`` or one InvalidRequest
that names the field, what it was and what is wanted. Owns every range; the defaults are the
dataclass's, but a seed is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from kvferry.engine.request import (
    MAX_BEAM_STOP_TOKEN_IDS,
    MAX_BEAMS,
    MAX_BRANCHES,
    EarlyStopping,
    InvalidRequest,
    SamplingParams,
    TokenBias,
)
from kvferry.engine.tokenizer import Tokenizer
from kvferry.protos import kvferry_pb2 as pb

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
INT32_MAX = 2**31 - 1

_DEFAULT = SamplingParams()
_BEAMS_TAKE_ONLY = {
    "n": 1,
    "min_tokens": 0,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class SamplingFields:
    """See the module.

    Args:
        vocab_size: ids below it are the model's.
        tokenizer: gives the tokens of bad words.
        random_bits: source of seeds: called with a number of bits.
    """

    def __init__(
        self, vocab_size: int, tokenizer: Tokenizer, random_bits: Callable[[int], int]
    ) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._random_bits = random_bits

    def read(self, sampling: pb.SamplingParams) -> tuple[SamplingParams, int]:
        """The parameters of each branch and the number of branches, or InvalidRequest."""
        num_beams = _integer(sampling, "num_beams", _DEFAULT.num_beams, 1, MAX_BEAMS)
        _check_beams(sampling, num_beams)
        parameters = self._parameters(sampling, num_beams)
        return parameters, _integer(sampling, "n", 1, 1, MAX_BRANCHES)

    def _parameters(self, sampling: pb.SamplingParams, num_beams: int) -> SamplingParams:
        default_temperature = _DEFAULT.temperature if num_beams == 1 else 0.0
        max_tokens = _integer(sampling, "max_tokens", _DEFAULT.max_tokens, 1, INT32_MAX)
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=_integer(sampling, "min_tokens", _DEFAULT.min_tokens, 0, max_tokens),
            temperature=_number(sampling, "temperature", default_temperature, 0.0, 100.0),
            top_k=_integer(sampling, "top_k", _DEFAULT.top_k, 0, INT32_MAX),
            top_p=_number(sampling, "top_p", _DEFAULT.top_p, 0.0, 1.0, above=True),
            min_p=_number(sampling, "min_p", _DEFAULT.min_p, 0.0, 1.0),
            repetition_penalty=_number(
                sampling, "repetition_penalty", _DEFAULT.repetition_penalty, 0.01, 10.0
            ),
            presence_penalty=_number(
                sampling, "presence_penalty", _DEFAULT.presence_penalty, -2.0, 2.0
            ),
            frequency_penalty=_number(
                sampling, "frequency_penalty", _DEFAULT.frequency_penalty, -2.0, 2.0
            ),
            logit_bias=self._biases(sampling.logit_bias.items()),
            bad_words=self._bad_words(list(sampling.bad_words)),
            seed=sampling.seed if sampling.HasField("seed") else self._random_bits(63),
            stop=_strings("stop", list(sampling.stop), MAX_STOP_STRINGS),
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            stop_token_ids=self._stop_ids(list(sampling.stop_token_ids)),
            ignore_eos=sampling.ignore_eos,
            skip_special_tokens=(
                sampling.skip_special_tokens if sampling.HasField("skip_special_tokens") else True
            ),
            logprobs=_count(sampling, "logprobs"),
            prompt_logprobs=_count(sampling, "prompt_logprobs"),
            num_beams=num_beams,
            length_penalty=_number(
                sampling, "length_penalty", _DEFAULT.length_penalty, -10.0, 10.0
            ),
            early_stopping=_early_stopping(sampling),
        )

    def _stop_ids(self, ids: list[int]) -> tuple[int, ...]:
        distinct = dict.fromkeys(ids)
        if len(distinct) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids: {len(distinct)} ids, wanted at most {MAX_STOP_TOKEN_IDS}"
            )
        for token_id in distinct:
            self._check_id("stop_token_ids", token_id)
        return tuple(distinct)

    def _biases(self, items: Iterable[tuple[int, float]]) -> tuple[TokenBias, ...]:
        biases = tuple(TokenBias(*item) for item in sorted(items))
        if len(biases) > MAX_LOGIT_BIASES:
            raise InvalidRequest(
                f"logit_bias: {len(biases)} ids, wanted at most {MAX_LOGIT_BIASES}"
            )
        for token_id, bias in biases:
            self._check_id("logit_bias", token_id)
            if not -100 <= bias <= 100:  # NaN is not either
                raise InvalidRequest(f"logit_bias[{token_id}]: got {bias}, wanted -100 to 100")
        return biases

    def _bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word as it begins a text and as it follows a space."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in _strings("bad_words", words, MAX_BAD_WORDS):
            bare = word.lstrip(" ")
            if not bare:
                raise InvalidRequest("bad_words: a string of spaces only, wanted a word")
            for text in (bare, f" {bare}"):
                ids = tuple(self._tokenizer.encode(text))
                if not ids:
                    raise InvalidRequest(f"bad_words: {word!r} has no tokens in this vocabulary")
                if max(ids) < self._vocab_size:  # else the model never produces it
                    sequences[ids] = None
        return tuple(sequences)

    def _check_id(self, name: str, token_id: int) -> None:
        if not 0 <= token_id < self._vocab_size:
            raise InvalidRequest(f"{name}: got {token_id}, wanted 0 to {self._vocab_size - 1}")


def _check_beams(sampling: pb.SamplingParams, num_beams: int) -> None:
    """A beam search takes what it can keep to; nothing is ignored."""
    if num_beams == 1:
        for name in ("length_penalty", "early_stopping"):
            if sampling.HasField(name):
                raise InvalidRequest(f"{name}: given without num_beams, wanted num_beams above 1")
        return
    for name, neutral in _BEAMS_TAKE_ONLY.items():
        value = getattr(sampling, name)
        if sampling.HasField(name) and value != neutral:
            raise InvalidRequest(
                f"{name}: got {value}, but with num_beams {num_beams} the likeliest output is "
                f"searched; wanted {neutral}, or leave it out"
            )
    for name in ("logprobs", "prompt_logprobs"):
        if sampling.HasField(name):
            raise InvalidRequest(f"{name}: not given with num_beams {num_beams}; leave it out")
    for name in ("logit_bias", "bad_words"):
        if getattr(sampling, name):
            raise InvalidRequest(f"{name}: not taken with num_beams {num_beams}; leave it out")
    if len(set(sampling.stop_token_ids)) > MAX_BEAM_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids: {len(set(sampling.stop_token_ids))} ids, wanted at most "
            f"{MAX_BEAM_STOP_TOKEN_IDS} with num_beams {num_beams}"
        )


def _early_stopping(sampling: pb.SamplingParams) -> EarlyStopping:
    if not sampling.HasField("early_stopping"):
        return _DEFAULT.early_stopping
    try:
        return EarlyStopping(sampling.early_stopping)
    except ValueError:
        wanted = ", ".join(EarlyStopping)
        raise InvalidRequest(
            f"early_stopping: got {sampling.early_stopping[:20]!r}, wanted one of {wanted}"
        ) from None


def _count(sampling: pb.SamplingParams, name: str) -> int | None:
    return _integer(sampling, name, 0, 0, MAX_LOGPROBS) if sampling.HasField(name) else None


def _integer(sampling: pb.SamplingParams, name: str, default: int, low: int, high: int) -> int:
    value: int = getattr(sampling, name) if sampling.HasField(name) else default
    if not low <= value <= high:
        raise InvalidRequest(f"{name}: got {value}, wanted {low} to {high}")
    return value


def _number(
    sampling: pb.SamplingParams,
    name: str,
    default: float,
    low: float,
    high: float,
    above: bool = False,
) -> float:
    """A float field within [low, high], or (low, high] with ``above``."""
    value: float = getattr(sampling, name) if sampling.HasField(name) else default
    if not math.isfinite(value) or not low <= value <= high or (above and value == low):
        bound = "above" if above else "from"
        raise InvalidRequest(f"{name}: got {value}, wanted {bound} {low:g} to {high:g}")
    return value


def _strings(name: str, texts: list[str], most: int) -> tuple[str, ...]:
    if len(texts) > most:
        raise InvalidRequest(f"{name}: {len(texts)} strings, wanted at most {most}")
    for text in texts:
        if not 0 < len(text) <= MAX_STOP_STRING_LENGTH:
            raise InvalidRequest(
                f"{name}: a string of {len(text)} characters, wanted 1 to {MAX_STOP_STRING_LENGTH}"
            )
    return tuple(texts)
