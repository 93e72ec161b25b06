"""The fields of a beam search: ranges, and that nothing is ignored beside it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvferry.cluster.sampling_fields import SamplingFields
from kvferry.engine.request import EarlyStopping, InvalidRequest, SamplingParams
from kvferry.engine.tokenizer import Tokenizer
from kvferry.protos import kvferry_pb2 as pb
from tests.engine.tiny_tokenizers import byte_level


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> SamplingFields:
    folder = tmp_path_factory.mktemp("model")
    byte_level(folder)
    return SamplingFields(300, Tokenizer(folder), lambda bits: 7)


def read(fields: SamplingFields, **given: Any) -> SamplingParams:
    return fields.read(pb.SamplingParams(**given))[0]


def refused(fields: SamplingFields, **given: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        read(fields, **given)
    return str(caught.value)


def test_a_search_is_what_was_asked_for(fields: SamplingFields) -> None:
    got = read(fields, num_beams=4, length_penalty=-0.5, early_stopping="true")
    assert (got.num_beams, got.length_penalty) == (4, -0.5)
    assert got.early_stopping is EarlyStopping.TRUE
    assert got.temperature == 0, "what is not said is what a search takes"


def test_one_beam_is_no_search(fields: SamplingFields) -> None:
    assert read(fields, num_beams=1) == read(fields)


@pytest.mark.parametrize("num_beams", [0, -1, 17, 2**31 - 1])
def test_the_number_of_beams_has_its_range(fields: SamplingFields, num_beams: int) -> None:
    assert refused(fields, num_beams=num_beams) == f"num_beams: got {num_beams}, wanted 1 to 16"


@pytest.mark.parametrize("penalty", [-10.01, 10.01, math.nan, math.inf])
def test_the_length_penalty_has_its_range(fields: SamplingFields, penalty: float) -> None:
    said = refused(fields, num_beams=2, length_penalty=penalty)
    assert said.startswith(f"length_penalty: got {penalty}, wanted from -10 to 10")


@pytest.mark.parametrize("when", ["", "True", "always", "x" * 1000])
def test_when_it_ends_is_one_of_three(fields: SamplingFields, when: str) -> None:
    said = refused(fields, num_beams=2, early_stopping=when)
    assert said == f"early_stopping: got {when[:20]!r}, wanted one of true, false, never"


# what a search does not take, and where there is one, the value that says nothing
BESIDE: dict[str, tuple[Any, Any]] = {
    "n": (2, 1),
    "min_tokens": (1, 0),
    "temperature": (0.7, 0.0),
    "top_k": (5, 0),
    "top_p": (0.9, 1.0),
    "min_p": (0.1, 0.0),
    "repetition_penalty": (1.1, 1.0),
    "presence_penalty": (0.5, 0.0),
    "frequency_penalty": (0.5, 0.0),
    "logprobs": (0, None),
    "prompt_logprobs": (0, None),
    "logit_bias": ({5: 1.0}, None),
    "bad_words": (["no"], None),
    "stop_token_ids": (list(range(65)), list(range(64))),
}
TAKEN = {
    *("max_tokens", "seed", "stop", "ignore_eos", "include_stop_str_in_output"),
    *("skip_special_tokens", "num_beams", "length_penalty", "early_stopping"),
}


def test_every_field_is_taken_or_refused() -> None:
    assert BESIDE.keys() | TAKEN == {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}


@pytest.mark.parametrize("name", BESIDE)
def test_what_a_search_does_not_keep_to_is_refused_by_name(
    fields: SamplingFields, name: str
) -> None:
    value, neutral = BESIDE[name]
    said = refused(fields, num_beams=4, **{name: value})
    assert said.startswith(f"{name}: ") and "num_beams 4" in said
    if neutral is not None:
        read(fields, num_beams=4, **{name: neutral})


@pytest.mark.parametrize("name", ["length_penalty", "early_stopping"])
def test_without_beams_its_other_fields_are_refused(fields: SamplingFields, name: str) -> None:
    value: Any = {"length_penalty": 1.0, "early_stopping": "true"}[name]
    assert refused(fields, **{name: value}).startswith(f"{name}: given without num_beams")
