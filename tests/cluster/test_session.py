"""A session: tokens become text that is final, and ends where it has to, however they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.cluster.routed_request import RequestEnd, RoutedRequest, StopMatch
from kvferry.cluster.session import Session, SessionEnd, SessionItem, TextDelta
from kvferry.cluster.token_run import TokenRun
from kvferry.engine.detokenizer import IncrementalDetokenizer
from kvferry.engine.request import Attempt, FinishReason, RequestId, RequestSpec, SamplingParams
from kvferry.engine.stopping import Finish, finish_after
from kvferry.engine.tokenizer import Tokenizer
from tests.cluster.test_stop_strings import naive
from tests.engine.tiny_tokenizers import byte_level

EOS = 2  # <|im_end|>


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level(tmp_path_factory.mktemp("tokenizer"))


@dataclass
class Client:
    """A session and what it has emitted."""

    tokenizer: Tokenizer
    spec: RequestSpec
    items: list[SessionItem] = field(default_factory=list)
    accepted: int = 0

    def __post_init__(self) -> None:
        skip = self.spec.sampling.skip_special_tokens
        detokenizer = IncrementalDetokenizer(self.tokenizer, skip)
        self.session = Session(self.spec, detokenizer, self.items.append)

    def give(self, *token_ids: int) -> StopMatch | None:
        """The router offers tokens."""
        match = self.session.on_tokens(TokenRun(self.accepted, token_ids), 0.0)
        self.accepted += len(token_ids) if match is None else match.num_tokens
        return match

    @property
    def deltas(self) -> list[TextDelta]:
        return [item for item in self.items if isinstance(item, TextDelta)]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.run.token_ids]


def spec(
    max_tokens: int = 100,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    skip_special_tokens: bool = True,
    max_model_len: int = 1000,
    min_tokens: int = 0,
    include_stop: bool = False,
) -> RequestSpec:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        include_stop_str_in_output=include_stop,
        stop=tuple(stop),
        stop_token_ids=tuple(stop_ids),
        ignore_eos=ignore_eos,
        skip_special_tokens=skip_special_tokens,
    )
    return RequestSpec(RequestId("r"), (1, 2, 3), ((),), sampling, (EOS,), max_model_len)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per byte, so that tests choose where tokens end."""
    table = {tokenizer.token_bytes(i): i for i in range(3, 259)}
    return [table[bytes([byte])] for byte in text.encode()]


def test_text_comes_with_the_tokens_that_carry_it(tokenizer: Tokenizer) -> None:
    client = Client(tokenizer, spec())
    a, b, c = ids(tokenizer, "abc")
    assert client.give(a) is None
    assert client.give(b, c) is None
    assert client.items == [
        TextDelta(TokenRun(0, (a,)), "a"),
        TextDelta(TokenRun(1, (b, c)), "bc"),
    ]


def test_half_a_character_waits_for_its_rest_and_its_ids_do_not(tokenizer: Tokenizer) -> None:
    client = Client(tokenizer, spec())
    first, second = ids(tokenizer, "é")
    client.give(first)
    client.give(second)
    assert [delta.text for delta in client.deltas] == ["", "é"]
    assert client.ids == [first, second]


@pytest.mark.parametrize("end", ["limit", "model length", "eos", "stop id"])
def test_what_was_held_back_is_flushed_at_the_end(tokenizer: Tokenizer, end: str) -> None:
    """Half a character, and what might have become a stop string."""
    e, n, half = *ids(tokenizer, "EN"), ids(tokenizer, "é")[0]
    by_length = end in ("limit", "model length")
    client = Client(
        tokenizer,
        spec(
            max_tokens=3 if end == "limit" else 100,
            max_model_len=6 if end == "model length" else 1000,
            stop=["END"],
            stop_ids=[50] if end == "stop id" else [],
        ),
    )
    client.give(e, n)
    assert client.text == ""
    client.give(half)
    if not by_length:
        assert client.text == ""
        assert client.give(EOS if end == "eos" else 50) is None
    assert client.text == "EN�"


@pytest.mark.parametrize("kind", ["eos", "stop id"])
@pytest.mark.parametrize("skip", [True, False])
def test_the_text_of_a_token_that_stops_is_not_shown_but_its_id_is(
    tokenizer: Tokenizer, kind: str, skip: bool
) -> None:
    a, b = ids(tokenizer, "ab")
    stopping = EOS if kind == "eos" else b
    client = Client(tokenizer, spec(stop_ids=[b], skip_special_tokens=skip))
    assert client.give(a, stopping) is None
    assert client.text == "a"
    assert client.ids == [a, stopping]


def test_an_ignored_end_of_sequence_is_an_ordinary_special_token(tokenizer: Tokenizer) -> None:
    (a,) = ids(tokenizer, "a")
    for skip, text in ((True, "aa"), (False, "a<|im_end|>a")):
        client = Client(tokenizer, spec(ignore_eos=True, skip_special_tokens=skip))
        client.give(a, EOS, a)
        assert client.text == text


def test_the_text_of_the_last_allowed_token_is_shown(tokenizer: Tokenizer) -> None:
    client = Client(tokenizer, spec(max_tokens=2))
    client.give(*ids(tokenizer, "ab"))
    assert client.text == "ab"


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("text", "count"), [("x", 1), ("xy", 2), ("xyz", 3)])
def test_a_stop_string_in_the_first_tokens_ends_the_stream_there(
    tokenizer: Tokenizer, text: str, count: int, together: bool
) -> None:
    client = Client(tokenizer, spec(stop=[text]))
    tokens = ids(tokenizer, "xyzabc")
    batches = [tokens] if together else [[token] for token in tokens]
    match = None
    for batch in batches:
        match = client.give(*batch)
        if match is not None:
            break
    assert match == StopMatch(count if together else 1, Finish(FinishReason.STOP, text))
    assert client.text == ""
    assert client.ids == tokens[:count]


def test_a_stop_string_inside_a_token_shows_what_is_before_it(tokenizer: Tokenizer) -> None:
    (hell,) = tokenizer.encode("hell")
    (a,) = ids(tokenizer, "a")
    client = Client(tokenizer, spec(stop=["el"]))
    match = client.give(a, hell, a)
    assert match == StopMatch(2, Finish(FinishReason.STOP, "el"))
    assert client.text == "ah"
    assert client.ids == [a, hell]


def test_a_stop_string_in_the_last_allowed_token_is_a_stop(tokenizer: Tokenizer) -> None:
    client = Client(tokenizer, spec(max_tokens=2, stop=["b"]))
    match = client.give(*ids(tokenizer, "ab"))
    assert match == StopMatch(2, Finish(FinishReason.STOP, "b"))
    assert client.text == "a"


def test_the_end_is_passed_on_after_everything(tokenizer: Tokenizer) -> None:
    client = Client(tokenizer, spec())
    client.give(*ids(tokenizer, "a"))
    request = RoutedRequest(client.spec, client.session, 0.0, 1, Attempt(1, 1), 0.0)
    end = RequestEnd(Finish(FinishReason.ABORT))
    client.session.on_end(request, end, 7.0)
    assert client.items[-1] == SessionEnd(request, end, 7.0)


@given(st.lists(st.tuples(st.lists(st.integers(0, 9)), st.text(max_size=4)), min_size=1))
def test_deltas_that_are_joined_say_what_they_said_apart(
    parts: list[tuple[list[int], str]],
) -> None:
    deltas, index = [], 5
    for tokens, text in parts:
        deltas.append(TextDelta(TokenRun(index, tuple(tokens)), text))
        index += len(tokens)
    joined = deltas[0]
    for delta in deltas[1:]:
        joined = joined.then(delta)
    assert joined.run.first_index == 5
    assert list(joined.run.token_ids) == [t for d in deltas for t in d.run.token_ids]
    assert joined.text == "".join(d.text for d in deltas)


def reference(
    tokenizer: Tokenizer, request: RequestSpec, tokens: Sequence[int]
) -> tuple[str, int, str | None]:
    """Text, number of tokens and stop string of a stream, read token by token from its start."""
    for count in range(1, len(tokens) + 1):
        detokenizer = IncrementalDetokenizer(tokenizer, request.sampling.skip_special_tokens)
        finish = finish_after(request, count - 1, tokens[count - 1])
        stopped = finish is not None and finish.reason is FinishReason.STOP
        text = detokenizer.push(tokens[: count - 1] if stopped else tokens[:count])
        if finish is not None:
            text += detokenizer.finish()
        before, stop = naive(request.sampling.stop, text)
        if stop is not None or finish is not None:
            return before, count, stop
    return "", 0, None


def test_a_stop_string_is_shown_if_asked_for(tokenizer: Tokenizer) -> None:
    client = Client(tokenizer, spec(stop=["bc"], include_stop=True))
    match = client.give(*ids(tokenizer, "abcd"))
    assert match == StopMatch(3, Finish(FinishReason.STOP, "bc"))
    assert client.text == "abc"


def test_a_stop_token_s_text_is_shown_if_asked_for_unless_it_is_special(
    tokenizer: Tokenizer,
) -> None:
    a, b = ids(tokenizer, "ab")
    for include, wanted in ((False, "a"), (True, "ab")):
        client = Client(tokenizer, spec(stop_ids=[b], include_stop=include))
        client.give(a, b)
        assert client.text == wanted
    for skip, wanted in ((True, "a"), (False, "a<|im_end|>")):
        client = Client(tokenizer, spec(include_stop=True, skip_special_tokens=skip))
        client.give(a, EOS)
        assert client.text == wanted


@pytest.mark.parametrize("first", [1, 2, 3, 4])
@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3])
def test_nothing_stops_the_output_before_min_tokens(
    tokenizer: Tokenizer, first: int, min_tokens: int
) -> None:
    """``aXbX``: the stop string comes whole with tokens 2 and 4."""
    request = spec(stop=["X"], min_tokens=min_tokens)
    stream = ids(tokenizer, "aXbX")
    client = Client(tokenizer, request)
    match = client.give(*stream[:first])
    if match is None and first < 4:
        match = client.give(*stream[first:])
    count = 2 if min_tokens < 2 else 4
    assert match is not None and match.finish == Finish(FinishReason.STOP, "X")
    assert client.ids == stream[:count]
    assert client.text == "aXbX"[: count - 1]


def test_a_stop_string_begun_before_min_tokens_ends_the_output_after(tokenizer: Tokenizer) -> None:
    client = Client(tokenizer, spec(stop=["bcd", "b"], min_tokens=3))
    match = client.give(*ids(tokenizer, "abcde"))
    assert match == StopMatch(4, Finish(FinishReason.STOP, "bcd"))
    assert client.text == "a"


@settings(suppress_health_check=list(HealthCheck))
@given(
    tokens=st.lists(st.sampled_from("ab é€"), min_size=1, max_size=12),
    cuts=st.sets(st.integers(1, 30)),
    stops=st.lists(st.text(alphabet="ab é€", min_size=1, max_size=3), max_size=3),
    limit=st.integers(1, 30),
    data=st.data(),
)
def test_however_the_tokens_are_batched_the_stream_is_the_same(
    tokenizer: Tokenizer,
    tokens: list[str],
    cuts: set[int],
    stops: list[str],
    limit: int,
    data: st.DataObject,
) -> None:
    stream = ids(tokenizer, "".join(tokens))
    stream.insert(data.draw(st.integers(0, len(stream))), EOS)
    request = spec(max_tokens=limit, stop=stops)
    text, count, stop = reference(tokenizer, request, stream)
    last = next(place for place, token in enumerate(stream, 1) if token == EOS or place == limit)
    stream = stream[:last]
    client = Client(tokenizer, request)
    borders = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    match = None
    for start, end in pairwise(borders):
        match = client.give(*stream[start:end])
        if match is not None:
            break
    assert client.text == text
    assert client.ids == stream[:count]
    assert (match.finish.stop_reason if match is not None else None) == stop
