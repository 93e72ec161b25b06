"""What is sent, before anything is: sessions of turns, and the prompts that conversations make.

A session is one or several requests, each sent when the one before has been answered. A turn says
what it adds; the prompt of turn k holds all that was said before, the answers that were received
too. Pure. Knows neither when sessions begin nor who answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.cluster.loadgen.errors import BadLoad

IDS, TEXT, CHAT = "ids", "text", "chat"
FORMS = (IDS, TEXT, CHAT)

# What token ids become where text is wanted: one short word each, so that equal ids stay equal.
_TEXT = (
    "the of and to in is you that it he was for on are as with his they I at be this have "
    "from or one had by word but not what all were we when your can said there use an each "
    "which she do how their if will up other about out many then them these so some her would "
    "make like him into time has look two more write go see number no way could people my "
    "than first water been call who oil its now find long down day did get come made may part"
)
_WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what it adds to its conversation, and what is wanted of it.

    Attributes:
        token_ids: the new part of the prompt; or
        text: the same, where prompts are texts.
        output_tokens: the answer's length, or its limit where the end is the model's.
        think_s: wait after the answer before, in seconds.
        cancel_after_s: the client goes away so long after it has sent; None: it stays.
    """

    output_tokens: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    think_s: float = 0.0
    cancel_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation: one turn or more.

    Attributes:
        number: its place in the plan, from 0.
        opening: tokens before the first turn, which other sessions of the group share.
        group: whose opening or whose history it shares; None: nobody's.
        tools: tool definitions, which a chat begins with; then ``opening`` is their tokens.
    """

    number: int
    turns: tuple[Turn, ...]
    opening: tuple[int, ...] = ()
    group: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def is_text(self) -> bool:
        """Whether its turns are texts, not token ids."""
        return any(turn.text for turn in self.turns)

    def most_tokens(self) -> int | None:
        """Prompt and output of the last turn, if every answer has full length; None of texts."""
        if self.is_text:
            return None
        said = sum(len(turn.token_ids) + turn.output_tokens for turn in self.turns)
        return len(self.opening) + said


def check_form(session: Session, form: str) -> None:
    """Raises BadLoad if the session's prompts cannot be sent in this form."""
    if form not in FORMS:
        raise BadLoad(f"send: got {form!r}, wanted {', '.join(FORMS)}")
    if form == IDS and session.is_text:
        raise BadLoad("send: got ids, but the prompts are texts; wanted text or chat")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in one of three forms; the other two are None."""

    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(slots=True)
class Conversation:
    """Puts a session's prompts together, in one form, as its answers come."""

    session: Session
    form: str
    _ids: list[int] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _messages: list[Mapping[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_form(self.session, self.form)
        opening, tools = self.session.opening, self.session.tools
        if self.form == IDS:
            self._ids.extend(opening)
        elif self.form == TEXT:
            said = "".join(json.dumps(tool) + "\n" for tool in tools) or words(opening)
            self._text.append(said)
        elif opening and not tools:
            self._messages.append({"role": "system", "content": words(opening)})

    def ask(self, turn: Turn) -> Prompt:
        """The prompt of the next turn: everything so far, and what the turn adds."""
        text = turn.text or words(turn.token_ids)
        if self.form == IDS:
            self._ids.extend(turn.token_ids)
            return Prompt(token_ids=tuple(self._ids))
        if self.form == TEXT:
            is_later = turn.text and any(self._text)
            self._text.append(f"\n{text}" if is_later else text)
            return Prompt(text="".join(self._text))
        self._messages.append({"role": "user", "content": text})
        return Prompt(messages=tuple(self._messages), tools=self.session.tools)

    def answered(self, token_ids: Sequence[int], text: str) -> None:
        """What the last prompt was answered with."""
        if self.form == IDS:
            self._ids.extend(token_ids)
        elif self.form == TEXT:
            self._text.append(text)
        else:
            self._messages.append({"role": "assistant", "content": text})


def words(token_ids: Iterable[int]) -> str:
    """A text of one word per id; each begins with a blank, so that texts can be put together."""
    return "".join(f" {_WORDS[token_id % len(_WORDS)]}" for token_id in token_ids)


def fingerprint(sessions: Sequence[Session], offsets: Sequence[float] | None) -> str:
    """A digest of all that would be sent and when: equal plans have equal ones, everywhere."""
    digest = hashlib.blake2b(digest_size=16)
    for session in sessions:
        for turn in session.turns:
            digest.update(repr((turn.token_ids, turn.text, turn.output_tokens)).encode())
            digest.update(repr((turn.think_s, turn.cancel_after_s)).encode())
        digest.update(repr((session.opening, session.group)).encode())
        digest.update(json.dumps(session.tools, sort_keys=True).encode())
    digest.update(repr(offsets and [round(offset, 9) for offset in offsets]).encode())
    return digest.hexdigest()
