"""What a command is and how it ends. Light on purpose: help loads nothing else of the project."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvferry.kv_cache.errors import KVFerryError

if TYPE_CHECKING:
    from kvferry.cluster.cli.document import Document

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_MODEL = 3
EXIT_INTERRUPTED = 130


class UsageError(KVFerryError):
    """The arguments cannot be used; says which. ``usage`` is how they are used."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, usage: str = "") -> None:
        super().__init__(message)
        self.usage = usage


class RunFailed(KVFerryError):
    """The command ran, and what it found or did is a failure; says what."""

    exit_code = EXIT_FAILED


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended: the document's fields as far as they are known, and the error if any."""

    fields: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None

    @property
    def exit_code(self) -> int:
        """0, or what the error's class says."""
        if self.error is None:
            return 0
        if isinstance(self.error, KeyboardInterrupt):
            return EXIT_INTERRUPTED
        if any(cls.__name__ == "ModelError" for cls in type(self.error).__mro__):
            return EXIT_MODEL  # by name: the class lives beside code that loads torch
        return int(getattr(self.error, "exit_code", EXIT_FAILED))


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    ``configure`` adds its flags to a parser and sets ``run``, a function from the parsed arguments
    to a Result. ``document`` is what ``--json`` prints; None for a command without that flag.
    ``kinds`` are the documents of its subcommands that print another one.
    """

    configure: Callable[[argparse.ArgumentParser], None]
    document: Document | None
    kinds: Mapping[str, Document] = field(default_factory=dict)

    def document_of(self, argv: Sequence[str]) -> Document | None:
        """That of the subcommand which ``argv`` names first, or else the command's own."""
        return next((self.kinds[word] for word in argv if word in self.kinds), self.document)
