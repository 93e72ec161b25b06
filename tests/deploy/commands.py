"""Commands in shell text, and what is wrong with those that are KVFerry's, Ray's or make's.

Enough of the shell for our own files: simple commands, joined by the usual operators. What a
command would do is not asked, only whether its parser takes it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any

import click

from kvferry.cluster.cli.app import COMMANDS, parser_of
from kvferry.kv_cache.errors import KVFerryError
from tests.house.source import ROOT

# Where else a command is an argument: `ray exec CLUSTER "COMMAND"`.
RUNS_ITS_LAST_WORD = {("ray", "exec")}
CLICK = {"ray": "ray.scripts.scripts", "serve": "ray.serve.scripts"}

_OPERATORS = re.compile(r"[();<>|&\n]+")


def simple_commands(text: str) -> Iterator[list[str]]:
    """The words of each simple command of a shell text, assignments before it left out.

    Command substitutions stay as words of the command around them, and are commands of their own.
    """
    text = text.replace("\\\n", " ")
    for inner in re.findall(r"\$\(([^()]*)\)", text):
        yield from simple_commands(inner)
    text = re.sub(r"\$\([^()]*\)", "SUBSTITUTED", text)
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not _OPERATORS.fullmatch(word):
                words.append(word)
                continue
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words.pop(0)
            if words:
                yield words
            words = []


def problems(words: list[str]) -> list[str]:
    """What a parser has against a command; nothing if it is nobody's that we know."""
    name = _name_of(words)
    if name == "kvferry":
        return _kvferry(words[1:])
    if name in CLICK:
        return _click(name, words[1:])
    if name == "make":
        known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        targets = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
        return [f"make has no target {target}" for target in targets if target not in known]
    return []


def is_checked(words: list[str]) -> bool:
    """Whether ``problems`` knows the command."""
    return _name_of(words) in {"kvferry", "make", *CLICK}


def _name_of(words: list[str]) -> str:
    """A command's name, without the folder; what has a colon is a volume of Compose's, say."""
    return "" if ":" in words[0] else PurePosixPath(words[0]).name


def unknown_flags(words: list[str]) -> list[str]:
    """For a command that is only mentioned, with what it needs left out: whether it exists, and has
    the flags that are named.
    """
    found = problems([word for word in words if not word.startswith("-")] + ["--help"])
    if found:
        return found
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    known = _flags_of(words)
    return [f"{' '.join(words[:2])} has no flag {flag}" for flag in flags if flag not in known]


def _kvferry(arguments: list[str]) -> list[str]:
    try:
        parser_of(arguments).parse_args(arguments)
    except KVFerryError as error:
        return [f"kvferry {shlex.join(arguments)}: {error}"]
    except SystemExit:  # help has been asked for, and given
        pass
    return []


def _click(name: str, arguments: list[str]) -> list[str]:
    command: Any = import_module(CLICK[name]).cli
    rest = list(arguments)
    path = [name]
    try:
        while isinstance(command, click.Group) and rest:
            found = command.get_command(click.Context(command), rest[0])
            if found is None:
                return [f"{' '.join(path)} has no command {rest[0]}"]
            command, path = found, [*path, rest.pop(0)]
        command.make_context(" ".join(path), list(rest))
    except click.exceptions.Exit:
        return []
    except click.ClickException as error:
        return [f"{name} {shlex.join(arguments)}: {error.format_message()}"]
    if tuple(path) in RUNS_ITS_LAST_WORD:
        return [each for words in simple_commands(rest[-1]) for each in problems(words)]
    return []


def _flags_of(words: list[str]) -> set[str]:
    """Every flag along a command's path."""
    name = _name_of(words)
    if name == "kvferry":
        parser, found = parser_of(words[1:]), set[str]()
        names = [word for word in words[1:] if word in COMMANDS]
        text = parser.format_help()
        if names:
            (subparsers,) = parser._subparsers._group_actions  # type: ignore[union-attr]
            sub: Any = subparsers.choices[names[0]]  # type: ignore[index]
            text += sub.format_help()
            below = sub._subparsers
            for each in below._group_actions[0].choices.values() if below else ():
                text += each.format_help()
        return found | set(re.findall(r"--[a-z][a-z-]*", text))
    if name in CLICK:
        command: Any = import_module(CLICK[name]).cli
        for word in words[1:]:
            if isinstance(command, click.Group) and word in command.commands:
                command = command.commands[word]
        return {option for parameter in command.params for option in parameter.opts}
    return set()
