"""Made-up sessions have the lengths, the sharing and the turns that were asked for."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.lengths import Fixed, Lognormal, Mix, Uniform, parse_lengths
from kvferry.cluster.loadgen.plan import reused_fraction
from kvferry.cluster.loadgen.sessions import CHAT, IDS, TEXT, Conversation, Session, Turn, words
from kvferry.cluster.loadgen.workloads import Cancels, Source, Synthetic

SOURCE = Source(seed=3, repeat=0, vocab_size=50_000)


def drawn(text: str, count: int = 20_000) -> list[int]:
    rng, lengths = random.Random(1), parse_lengths(text)
    return [lengths.draw(rng) for _ in range(count)]


def test_lengths_are_what_their_specification_says() -> None:
    assert parse_lengths("256") == Fixed(256)
    assert parse_lengths("uniform:2:5") == Uniform(2, 5)
    assert parse_lengths("lognormal:256:0.8:16:2048") == Lognormal(256, 0.8, 16, 2048)
    assert parse_lengths("mix:0.9*64,0.1*uniform:1:2") == Mix(
        (0.9, 0.1), (Fixed(64), Uniform(1, 2))
    )
    assert set(drawn("uniform:2:5", 200)) == {2, 3, 4, 5}
    assert sorted(drawn("lognormal:256:0.8"))[10_000] == pytest.approx(256, rel=0.05)
    cut = drawn("lognormal:256:2:16:300")
    assert (min(cut), max(cut)) == (16, 300)
    assert drawn("mix:0.9*64,0.1*1024").count(1024) == pytest.approx(2000, rel=0.1)


@pytest.mark.parametrize(
    "text",
    ["", "0", "some", "uniform:5", "uniform:5:2", "lognormal:1", "lognormal:0:1", "mix:64", "mix:"],
)
def test_a_specification_that_says_nothing_is_quoted(text: str) -> None:
    with pytest.raises(BadLoad, match=f"length '{text}'.*wanted N, uniform"):
        parse_lengths(text)


SYNTHETIC = st.builds(
    Synthetic,
    input_tokens=st.sampled_from([Fixed(9), Uniform(1, 20)]),
    output_tokens=st.sampled_from([Fixed(4), Uniform(1, 9)]),
    opening_tokens=st.sampled_from([None, Fixed(32), Uniform(16, 40)]),
    shared_ratio=st.floats(0, 1),
    groups=st.integers(1, 4),
    turns=st.sampled_from([Fixed(1), Uniform(1, 4)]),
    has_tools=st.booleans(),
    cancels=st.builds(Cancels, share=st.floats(0, 1), within_s=st.floats(0.1, 9)),
)


@given(SYNTHETIC, st.integers(0, 20), st.integers(0, 5))
def test_session_n_is_a_function_of_seed_repeat_and_n(
    synthetic: Synthetic, count: int, more: int
) -> None:
    found = synthetic.sessions(count, SOURCE)
    assert synthetic.sessions(count + more, SOURCE)[:count] == found
    other = Source(seed=3, repeat=1, vocab_size=50_000)
    ids = {turn.token_ids for session in found for turn in session.turns}
    again = [t for s in synthetic.sessions(count, other) for t in s.turns]
    assert all(turn.token_ids not in ids for turn in again if len(turn.token_ids) > 4)


@given(SYNTHETIC)
def test_exactly_the_sessions_of_a_group_share_their_opening(synthetic: Synthetic) -> None:
    sessions = synthetic.sessions(40, SOURCE)
    by_opening = defaultdict(list)
    for session in sessions:
        by_opening[session.opening].append(session)
    if synthetic.opening_tokens is None:
        assert set(by_opening) == {()}
        assert all(session.group is None for session in sessions)
        return
    for opening, sharers in by_opening.items():
        assert len(opening) >= 16
        groups = {session.group for session in sharers}
        assert len(groups) == 1
        assert len(sharers) == 1 or groups != {None}
    groups_seen = {s.group for s in sessions if s.group is not None}
    assert len(groups_seen) <= synthetic.groups
    # Openings that differ do so within their first block: no cache has a part of one.
    assert len({opening[:16] for opening in by_opening}) == len(by_opening)


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_the_share_of_sharing_sessions_is_the_ratio(ratio: float) -> None:
    synthetic = Synthetic(Fixed(1), Fixed(1), Fixed(32), shared_ratio=ratio, groups=3)
    sessions = synthetic.sessions(2000, SOURCE)
    shared = sum(session.group is not None for session in sessions)
    assert shared / 2000 == pytest.approx(ratio, abs=0.03)
    # All but the first of each group find their opening's two blocks; 33 tokens are a prompt.
    wanted = 32 * (shared - min(3, shared)) / (33 * 2000)
    assert reused_fraction(sessions) == pytest.approx(wanted)


def test_cancels_are_a_share_at_moments_spread_over_their_time() -> None:
    synthetic = Synthetic(Fixed(1), Fixed(1), cancels=Cancels(0.3, 5.0))
    turns = [session.turns[0] for session in synthetic.sessions(4000, SOURCE)]
    moments = [t.cancel_after_s for t in turns if t.cancel_after_s is not None]
    assert len(moments) / 4000 == pytest.approx(0.3, abs=0.03)
    assert 0 <= min(moments) < 0.2
    assert 4.8 < max(moments) <= 5.0


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_is_between_nothing_and_all(share: float) -> None:
    with pytest.raises(BadLoad, match=f"got {share}"):
        Cancels(share, 1.0)
    with pytest.raises(BadLoad, match=f"got {share}"):
        Synthetic(Fixed(1), Fixed(1), shared_ratio=share)


TURNS = (Turn(2, token_ids=(1, 2)), Turn(3, token_ids=(3,)), Turn(1, token_ids=(4, 5)))


def test_a_turn_begins_with_all_that_was_said_and_answered() -> None:
    talk = Conversation(Session(0, TURNS, opening=(9, 8)), IDS)
    assert talk.ask(TURNS[0]).token_ids == (9, 8, 1, 2)
    talk.answered([70, 71], "x")
    assert talk.ask(TURNS[1]).token_ids == (9, 8, 1, 2, 70, 71, 3)
    talk.answered([72], "y")
    assert talk.ask(TURNS[2]).token_ids == (9, 8, 1, 2, 70, 71, 3, 72, 4, 5)


def test_as_text_it_does_so_in_words() -> None:
    talk = Conversation(Session(0, TURNS, opening=(9,)), TEXT)
    first = talk.ask(TURNS[0]).text
    assert first == words((9, 1, 2))
    talk.answered([], " yes")
    assert talk.ask(TURNS[1]).text == f"{first} yes{words((3,))}"


def test_as_chat_it_is_a_list_of_messages() -> None:
    talk = Conversation(Session(0, TURNS, opening=(9,)), CHAT)
    talk.ask(TURNS[0])
    talk.answered([], "yes")
    messages = talk.ask(TURNS[1]).messages
    assert messages is not None
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert [message["content"] for message in messages][2] == "yes"


def test_agents_begin_with_their_tools() -> None:
    synthetic = Synthetic(Fixed(4), Fixed(2), Fixed(130), groups=1, has_tools=True)
    one, other = synthetic.sessions(2, SOURCE)
    assert one.tools == other.tools
    assert [tool["function"]["name"] for tool in one.tools] == ["tool_0", "tool_1", "tool_2"]
    assert (
        Conversation(one, IDS).ask(one.turns[0]).token_ids == one.opening + one.turns[0].token_ids
    )
    prompt = Conversation(one, CHAT).ask(one.turns[0])
    assert prompt.tools == one.tools
    assert prompt.messages is not None
    assert [message["role"] for message in prompt.messages] == ["user"]
    text = Conversation(one, TEXT).ask(one.turns[0]).text
    assert text is not None
    assert text.startswith('{"type": "function"')


def test_texts_cannot_be_sent_as_ids() -> None:
    with pytest.raises(BadLoad, match="wanted text or chat"):
        Conversation(Session(0, (Turn(1, text="hi"),)), IDS)
