"""Intake: every field is taken as given, or refused by its name with what was got and wanted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from kvferry.cluster.chat_input import read_chat
from kvferry.cluster.errors import UnknownModel
from kvferry.cluster.intake import MAX_PROMPT_LOGPROBS, Intake, ServedModel
from kvferry.cluster.sampling_fields import (
    INT32_MAX,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    SamplingFields,
)
from kvferry.engine.chat import ChatTemplate
from kvferry.engine.request import Attempt, InvalidRequest, PromptTooLong, SamplingParams, TokenBias
from kvferry.engine.tokenizer import Tokenizer
from kvferry.protos import kvferry_pb2 as pb
from kvferry.worker.messages import Reserve
from kvferry.worker.validity import fault
from tests.engine.tiny_gguf import TEMPLATE
from tests.engine.tiny_tokenizers import byte_level, save
from tests.fakes import stub_layout
from tests.stack import SIZE

VOCAB, MAX_LEN = 300, 32


class Bits:
    """A source of random bits that counts, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, bits: int) -> int:
        self.asked.append(bits)
        return len(self.asked)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    byte_level(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def make(folder: Path) -> Callable[[], tuple[Intake, Bits]]:
    tokenizer, template = Tokenizer(folder), ChatTemplate.from_folder(folder, limit_s=60.0)
    model = ServedModel("tiny", "1", "llama", "float32", SIZE, stub_layout(4), MAX_LEN, VOCAB, (2,))

    def build() -> tuple[Intake, Bits]:
        bits = Bits()
        return Intake(model, tokenizer, template, bits), bits

    return build


@pytest.fixture
def intake(make: Callable[[], tuple[Intake, Bits]]) -> Intake:
    return make()[0]


def request(**fields: Any) -> pb.GenerateRequest:
    fields.setdefault("text", "hello")
    return pb.GenerateRequest(**fields)


def sampled(**fields: Any) -> pb.GenerateRequest:
    return request(sampling=pb.SamplingParams(**fields))


def refused(intake: Intake, made: pb.GenerateRequest) -> str:
    """The message of the refusal."""
    with pytest.raises(InvalidRequest) as caught:
        intake.prepare(made)
    return str(caught.value)


# --- what is taken -----------------------------------------------------------------------------


def test_a_bare_request_takes_the_defaults(make: Callable[[], tuple[Intake, Bits]]) -> None:
    intake, _ = make()
    spec = intake.prepare(request(text="hello"))
    assert spec.prompt_token_ids == tuple(intake.tokenize("hello"))
    assert spec.suffixes == ((),)
    assert spec.eos_token_ids == (2,)
    assert spec.max_model_len == MAX_LEN
    assert spec.cache_salt == ""
    assert spec.sampling == SamplingParams(seed=spec.sampling.seed)


def test_every_supported_field_reaches_the_specification(intake: Intake) -> None:
    spec = intake.prepare(
        request(
            model="tiny",
            cache_salt="salt",
            sampling=pb.SamplingParams(
                max_tokens=7,
                temperature=0.5,
                top_p=0.25,
                top_k=3,
                seed=2**64 - 1,
                n=1,
                stop=["a", "b"],
                stop_token_ids=[5, 6],
                ignore_eos=True,
                skip_special_tokens=False,
            ),
        )
    )
    assert spec.cache_salt == "salt"
    assert spec.sampling == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        seed=2**64 - 1,
        stop=("a", "b"),
        stop_token_ids=(5, 6),
        ignore_eos=True,
        skip_special_tokens=False,
    )


def test_the_id_is_128_random_bits_and_the_client_s_own_is_only_a_label(
    make: Callable[[], tuple[Intake, Bits]],
) -> None:
    intake, bits = make()
    ids = {intake.prepare(request(request_id="mine")).request_id for _ in range(3)}
    assert len(ids) == 3 and "mine" not in ids
    assert all(len(i) == 32 and int(i, 16) >= 0 for i in ids)
    assert bits.asked.count(128) == 3


def test_a_seed_is_drawn_only_if_none_is_given(make: Callable[[], tuple[Intake, Bits]]) -> None:
    intake, bits = make()
    assert intake.prepare(sampled(seed=0)).sampling.seed == 0, "0 is a seed"
    assert bits.asked == [128]
    drawn = [intake.prepare(request()).sampling.seed for _ in range(2)]
    assert bits.asked == [128, 63, 128, 63, 128]
    assert drawn[0] != drawn[1]


def test_a_prompt_may_be_text_ids_or_chat(intake: Intake) -> None:
    assert intake.prepare(request(text="hello")).prompt_token_ids == tuple(intake.tokenize("hello"))
    given_ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[0, 5, VOCAB - 1]))
    assert intake.prepare(given_ids).prompt_token_ids == (0, 5, VOCAB - 1)
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="hi")])
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert intake.chat_text(chat) == expected
    spec = intake.prepare(pb.GenerateRequest(chat=chat))
    assert spec.prompt_token_ids == tuple(intake.tokenizer.encode(expected))
    assert list(spec.prompt_token_ids) == intake.tokenize_chat(chat)
    assert spec.prompt_token_ids[0] == 1, "markup is recognised as its token"


def test_a_conversation_is_rendered_as_it_was_sent(intake: Intake) -> None:
    chat = pb.ChatInput(
        messages=[
            pb.ChatMessage(role="user", content="hi"),
            pb.ChatMessage(role="assistant", content="The "),
        ],
        continue_final_message=True,
    )
    begun = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe "
    assert intake.chat_text(chat) == begun
    assert intake.prepare(pb.GenerateRequest(chat=chat)).prompt_token_ids == tuple(
        intake.tokenizer.encode(begun)
    )
    chat = pb.ChatInput(messages=chat.messages, add_generation_prompt=False)
    assert intake.chat_text(chat) == begun + "<|im_end|>\n"


def test_tokenizing_takes_text_and_conversations_as_generating_does(intake: Intake) -> None:
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="hi")])
    ids = intake.prepare(pb.GenerateRequest(chat=chat)).prompt_token_ids
    assert tuple(intake.tokenize_input(pb.TokenizeRequest(chat=chat))) == ids
    assert intake.tokenize_input(pb.TokenizeRequest(text="hi")) == intake.tokenize("hi")
    with pytest.raises(UnknownModel, match="huge"):
        intake.tokenize_input(pb.TokenizeRequest(text="hi", model="huge"))
    with pytest.raises(InvalidRequest, match=r"chat\.messages: empty"):
        intake.tokenize_input(pb.TokenizeRequest(chat=pb.ChatInput()))


def test_raw_text_gets_the_token_that_begins_a_document_and_chat_does_not(intake: Intake) -> None:
    begin = 1
    assert intake.tokenize("hello") == [begin, *intake.tokenizer.encode("hello")]
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="hi")])
    assert intake.tokenize_chat(chat).count(begin) == 2  # of the two turns in the template


def test_a_prompt_one_below_the_limit_is_taken(intake: Intake) -> None:
    made = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * (MAX_LEN - 1)))
    assert len(intake.prepare(made).prompt_token_ids) == MAX_LEN - 1


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("length", [MAX_LEN, MAX_LEN + 1, 10 * MAX_LEN])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(
    intake: Intake, length: int
) -> None:
    with pytest.raises(PromptTooLong) as caught:
        intake.prepare(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * length)))
    assert f"{length} tokens" in str(caught.value)
    assert f"takes {MAX_LEN}" in str(caught.value)
    assert f"at most {MAX_LEN - 1}" in str(caught.value)


@pytest.mark.parametrize("token", [-1, VOCAB, -(2**31), 2**31 - 1])
def test_an_id_outside_the_vocabulary_is_refused_by_value(intake: Intake, token: int) -> None:
    made = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, token, 6]))
    assert f"token_ids: token id {token}, wanted 0 to {VOCAB - 1}" in refused(intake, made)
    message = refused(intake, sampled(stop_token_ids=[5, token]))
    assert f"stop_token_ids: got {token}, wanted 0 to {VOCAB - 1}" in message


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (pb.GenerateRequest(), "input: none given"),
        (pb.GenerateRequest(text=""), "text: the prompt has no tokens"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids: the prompt has no tokens"),
        (pb.GenerateRequest(chat=pb.ChatInput()), "chat.messages: empty"),
    ],
    ids=["nothing", "no text", "no ids", "no messages"],
)
def test_an_empty_prompt_is_refused_by_its_field(
    intake: Intake, made: pb.GenerateRequest, named: str
) -> None:
    assert named in refused(intake, made)


def test_another_model_is_refused_with_both_names(intake: Intake) -> None:
    intake.check_model("")
    intake.check_model("tiny")
    with pytest.raises(UnknownModel, match=r"'huge' is not served here, 'tiny' is"):
        intake.prepare(request(model="huge"))


# below, above, and what is no number; then what just fits
RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "max_tokens": ([0, -1, -(2**31)], [1, INT32_MAX]),
    "temperature": (
        [-0.001, -math.inf, 100.001, math.inf, math.nan],
        [0.0, -0.0, 1e-300, 0.7, 100.0],
    ),
    "top_p": ([0.0, -0.0, -1.0, 1.0000001, math.inf, -math.inf, math.nan], [1e-300, 0.5, 1.0]),
    "top_k": ([-1, -(2**31)], [0, 1, INT32_MAX]),
    "min_tokens": ([-1, SamplingParams().max_tokens + 1], [0, SamplingParams().max_tokens]),
    "min_p": ([-0.001, 1.0000001, math.nan, math.inf], [0.0, 1e-300, 1.0]),
    "repetition_penalty": ([0.0, 0.009, -1.0, 10.001, math.nan, math.inf], [0.01, 1.0, 10.0]),
    "presence_penalty": ([-2.001, 2.001, math.nan, -math.inf], [-2.0, 0.0, 2.0]),
    "frequency_penalty": ([-2.001, 2.001, math.nan, math.inf], [-2.0, 0.0, 2.0]),
    "logprobs": ([-1, 21], [0, 20]),
    "prompt_logprobs": ([-1, 21], [0, 20]),
    "n": ([0, -1, 65, 2**31 - 1], [1, 64]),
    "seed": ([], [0, 1, 2**64 - 1]),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (bad, _) in RANGES.items() for value in bad]
)
def test_a_value_out_of_range_is_refused_by_field_and_value(
    intake: Intake, name: str, value: Any
) -> None:
    message = refused(intake, sampled(**{name: value}))
    assert message.startswith(f"{name}: got {value}")


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (_, good) in RANGES.items() for value in good]
)
def test_a_value_at_the_border_is_taken(intake: Intake, name: str, value: Any) -> None:
    sampling = intake.prepare(sampled(**{name: value})).sampling
    if name != "n":
        assert getattr(sampling, name) == value


@pytest.mark.parametrize(
    ("stops", "named"),
    [
        (["x"] * (MAX_STOP_STRINGS + 1), f"stop: {MAX_STOP_STRINGS + 1} strings, wanted at most"),
        (["ok", ""], "stop: a string of 0 characters"),
        (["x" * (MAX_STOP_STRING_LENGTH + 1)], f"stop: a string of {MAX_STOP_STRING_LENGTH + 1}"),
    ],
    ids=["too many", "empty", "too long"],
)
def test_stop_strings_are_bounded(intake: Intake, stops: list[str], named: str) -> None:
    assert named in refused(intake, sampled(stop=stops))
    most = ["x" * MAX_STOP_STRING_LENGTH] * MAX_STOP_STRINGS
    assert intake.prepare(sampled(stop=most)).sampling.stop == tuple(most)


@pytest.mark.parametrize("value", [-100.5, 100.5, math.nan, math.inf, -math.inf])
def test_a_bias_out_of_range_is_refused_by_id_and_value(intake: Intake, value: float) -> None:
    message = refused(intake, sampled(logit_bias={7: value}))
    assert message == f"logit_bias[7]: got {value}, wanted -100 to 100"


def test_biases_are_bounded_in_number_and_name_ids_of_the_model(intake: Intake) -> None:
    assert "logit_bias: got 300, wanted 0 to 299" in refused(intake, sampled(logit_bias={300: 1.0}))
    assert "logit_bias: got -1" in refused(intake, sampled(logit_bias={-1: 1.0}))
    many = dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 0.5)
    assert f"{MAX_LOGIT_BIASES + 1} ids, wanted at most" in refused(
        intake, sampled(logit_bias=many)
    )
    taken = intake.prepare(sampled(logit_bias={9: 100.0, 4: -100.0})).sampling
    assert taken.logit_bias == (TokenBias(4, -100.0), TokenBias(9, 100.0)), "in a fixed order"


def test_min_tokens_may_not_exceed_max_tokens(intake: Intake) -> None:
    assert "min_tokens: got 6, wanted 0 to 5" in refused(
        intake, sampled(min_tokens=6, max_tokens=5)
    )


def test_bad_words_are_their_tokens_at_a_beginning_and_behind_a_space(intake: Intake) -> None:
    encode = intake.tokenizer.encode
    for word in ("hello", " hello"):
        words = intake.prepare(sampled(bad_words=[word])).sampling.bad_words
        assert words == tuple(tuple(encode(text)) for text in ("hello", " hello"))
    assert "bad_words: a string of spaces only" in refused(intake, sampled(bad_words=["  "]))
    assert "bad_words: a string of 0 characters" in refused(intake, sampled(bad_words=[""]))
    beyond = intake.prepare(sampled(bad_words=["日本"])).sampling.bad_words
    assert all(max(word) < VOCAB for word in beyond), "ids that the model lacks are never sampled"
    many = ["x"] * (MAX_BAD_WORDS + 1)
    assert f"bad_words: {MAX_BAD_WORDS + 1} strings" in refused(intake, sampled(bad_words=many))


def test_a_bad_word_without_tokens_is_refused(tmp_path: Path) -> None:
    fast = FastTokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))  # no token for the rest
    fast.decoder = decoders.ByteLevel()
    fields = SamplingFields(2, save(fast, tmp_path), Bits())
    with pytest.raises(InvalidRequest, match="bad_words: 'é' has no tokens"):
        fields.read(pb.SamplingParams(bad_words=["é"]))


@pytest.mark.parametrize(("length", "top"), [(3276, 10), (20, 20)])
def test_prompt_logprobs_are_bounded_by_what_they_weigh(
    folder: Path, length: int, top: int
) -> None:
    model = ServedModel("tiny", "1", "llama", "float32", SIZE, stub_layout(4), 9999, VOCAB, (2,))
    wide = Intake(model, Tokenizer(folder), ChatTemplate.from_folder(folder), Bits())
    made = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5] * length), sampling=pb.SamplingParams(prompt_logprobs=top)
    )
    if length * (1 + top) <= MAX_PROMPT_LOGPROBS:
        assert wide.prepare(made).sampling.prompt_logprobs == top
    else:
        assert f"prompt_logprobs: {top} for {length} prompt tokens" in refused(wide, made)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake.tokenizer, "encode", None)  # it would raise
    longest = MAX_LEN * intake.tokenizer.longest_token
    with pytest.raises(PromptTooLong, match=f"{longest + 1} characters"):
        intake.prepare(request(text="a" * (longest + 1)))
    said = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="a" * longest)])
    with pytest.raises(PromptTooLong, match="characters"):
        intake.prepare(pb.GenerateRequest(chat=said))


def test_stop_ids_are_distinct_and_bounded(folder: Path) -> None:
    fields = SamplingFields(99999, Tokenizer(folder), Bits())
    sampling, _ = fields.read(pb.SamplingParams(stop_token_ids=[7, 5] * 9000))
    assert sampling.stop_token_ids == (7, 5)
    with pytest.raises(InvalidRequest, match=r"stop_token_ids: 1025 ids, wanted at most 1024"):
        fields.read(pb.SamplingParams(stop_token_ids=range(1025)))


# --- no field is forgotten ---------------------------------------------------------------------

SAMPLING: dict[str, Any] = {
    "max_tokens": 5,
    "min_tokens": 2,
    "temperature": 0.5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "include_stop_str_in_output": True,
    "logprobs": 0,
    "prompt_logprobs": 3,
    "logit_bias": {5: -1.0},
    "bad_words": ["hell"],
    "top_p": 0.5,
    "top_k": 5,
    "n": 3,
    "stop": ["x"],
    "seed": 5,
    "stop_token_ids": [5],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "num_beams": 4,
    "length_penalty": 0.5,
    "early_stopping": "never",
}
ALREADY: dict[str, dict[str, Any]] = {
    "num_beams": {"temperature": 0.0},
    "length_penalty": {"num_beams": 4},
    "early_stopping": {"num_beams": 4},
}
SUPPORTED_REQUEST: dict[str, Any] = {
    "request_id": "label",
    "model": "tiny",
    "text": "hello",
    "token_ids": pb.TokenIds(ids=[5]),
    "chat": pb.ChatInput(messages=[pb.ChatMessage(role="user", content="hi")]),
    "sampling": pb.SamplingParams(max_tokens=5),
    "cache_salt": "salt",
    "tenant": "acme",  # whose it is has been looked at before
    "echo_prompt_token_ids": True,
}


def names_of(message: Any) -> list[str]:
    return [field.name for field in message.DESCRIPTOR.fields]


def some_value(field: Any) -> Any:
    """A value that says something."""
    kind = FieldDescriptor
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {5: 1.0}
    value: Any = {
        kind.CPPTYPE_STRING: "x",
        kind.CPPTYPE_BOOL: True,
        kind.CPPTYPE_DOUBLE: 0.5,
        kind.CPPTYPE_FLOAT: 0.5,
    }.get(field.cpp_type, 5)
    return value


@pytest.mark.parametrize("name", names_of(pb.SamplingParams))
def test_every_sampling_field_reaches_the_specification(intake: Intake, name: str) -> None:
    """A field added to the contract fails here until something reads it."""
    given = {"seed": 3, **ALREADY.get(name, {})}
    before = intake.prepare(sampled(**given)).sampling
    spec = intake.prepare(sampled(**{**given, name: SAMPLING[name]}))
    after = spec.sampling
    if name == "n":
        assert after == before
        assert (spec.branches, spec.suffixes) == ((0, 1, 2), ((), (), ()))
    else:
        assert getattr(after, name) != getattr(before, name)
        assert replace(after, **{name: getattr(before, name)}) == before


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in (pb.ChatInput, pb.ChatMessage) for name in names_of(kind)],
)
def test_every_field_of_a_conversation_reaches_the_template(kind: Any, name: str) -> None:
    """A field added to the contract fails here until it does."""
    said: dict[str, Any] = {
        "messages": [pb.ChatMessage(role="assistant", content="hi")],
        "tools": ['{"a": 1}'],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "template_args": '{"a": 1}',
        "tool_calls": ['{"a": 1}', '{"b": []}'],
        "tool_call_id": "a",
        "name": "b",
        "role": "developer",
        "content": "c",
    }
    message = pb.ChatMessage(role="user", content="hello")
    plain = read_chat(pb.ChatInput(messages=[message]))
    if kind is pb.ChatInput:
        chat = pb.ChatInput(messages=[message])
        chat.MergeFrom(pb.ChatInput(**{name: said[name]}))
    else:
        message.MergeFrom(pb.ChatMessage(**{name: said[name]}))
        chat = pb.ChatInput(messages=[message])
    assert read_chat(chat) != plain


@pytest.mark.parametrize("name", names_of(pb.GenerateRequest))
def test_every_request_field_is_supported_or_refused_by_name(intake: Intake, name: str) -> None:
    if name in SUPPORTED_REQUEST:
        made = pb.GenerateRequest(**{name: SUPPORTED_REQUEST[name]})
        if made.WhichOneof("input") is None:
            made.text = "hello"
        intake.prepare(made)
        return
    value = some_value(pb.GenerateRequest.DESCRIPTOR.fields_by_name[name])
    reason = "got 5, but requests are served" if name == "priority" else "not supported"
    assert refused(intake, request(**{name: value})).startswith(f"{name}: {reason}")


@pytest.mark.parametrize("priority", [-(2**31), -1, 0, 2**31 - 1])
def test_a_priority_reaches_the_specification_where_the_policy_has_them(
    intake: Intake, priority: int
) -> None:
    front = Intake(intake.model, intake.tokenizer, intake._chat_template, Bits(), priorities=True)
    spec = front.prepare(request(priority=priority))
    assert spec.priority == priority
    assert not fault(Reserve(spec, Attempt(1, 1)))


@settings(suppress_health_check=list(HealthCheck))
@given(
    st.builds(
        pb.SamplingParams,
        max_tokens=st.none() | st.integers(-(2**31), INT32_MAX),
        temperature=st.none() | st.floats(),
        top_p=st.none() | st.floats(),
        top_k=st.none() | st.integers(-(2**31), INT32_MAX),
        n=st.none() | st.integers(-(2**31), INT32_MAX),
        min_tokens=st.none() | st.integers(-(2**31), INT32_MAX),
        min_p=st.none() | st.floats(),
        repetition_penalty=st.none() | st.floats(),
        presence_penalty=st.none() | st.floats(),
        frequency_penalty=st.none() | st.floats(),
        logit_bias=st.dictionaries(st.integers(-5, VOCAB + 5), st.floats(width=32), max_size=3),
        bad_words=st.lists(st.text(max_size=3), max_size=2),
        logprobs=st.none() | st.integers(-(2**31), INT32_MAX),
        stop=st.lists(st.text(max_size=3), max_size=3),
        stop_token_ids=st.lists(st.integers(-(2**31), INT32_MAX), max_size=3),
        num_beams=st.none() | st.integers(-1, 20),
        length_penalty=st.none() | st.floats(),
        early_stopping=st.none() | st.sampled_from(["true", "false", "never", "", "True"]),
    ),
    st.text(max_size=40) | st.lists(st.integers(-5, VOCAB + 5), max_size=40),
)
def test_whatever_comes_is_taken_within_bounds_or_refused(
    intake: Intake, sampling: pb.SamplingParams, prompt: str | list[int]
) -> None:
    made = pb.GenerateRequest(sampling=sampling)
    if isinstance(prompt, str):
        made.text = prompt
    else:
        made.token_ids.CopyFrom(pb.TokenIds(ids=prompt))
    try:
        spec = intake.prepare(made)
    except InvalidRequest as error:
        assert str(error)
        return
    got = spec.sampling
    assert got.max_tokens >= 1 and 0.0 <= got.temperature <= 100.0
    assert 0.0 < got.top_p <= 1.0 and got.top_k >= 0
    assert 0 <= got.min_tokens <= got.max_tokens and 0 <= got.min_p <= 1
    assert got.repetition_penalty > 0 and all(got.bad_words)
    assert got.num_beams == 1 or (got.temperature == 0 and spec.branches == (0,))
    assert not fault(Reserve(spec, Attempt(1, 1))), "what is taken is what workers take"
    assert all(0 <= i < VOCAB and abs(bias) <= 100 for i, bias in got.logit_bias)
    assert all(got.stop) and all(0 <= i < VOCAB for i in got.stop_token_ids)
    assert 0 < len(spec.prompt_token_ids) < MAX_LEN
    assert all(0 <= i < VOCAB for i in spec.prompt_token_ids)
