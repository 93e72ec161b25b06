"""Notes about clusters with a Ray of their own on this host, so that another process can end them.

A note names the process that serves, and those of its Ray, each with the time it began: a process
id may be another's by the time a note is read. It lies in a folder that only this user can write.
Knows processes, and no Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

KILLED_S = 10.0
CLOCK_S = 2.0  # what a clock that is being set may make of a time of birth


@dataclass(frozen=True, slots=True)
class Life:
    """A process: its id, and when it began, in seconds of the epoch."""

    pid: int
    began: float


@dataclass(frozen=True, slots=True)
class Note:
    """A cluster: who serves it, its Ray's address, and the processes that it has started."""

    server: Life
    ray_address: str
    family: tuple[Life, ...]


def notes_folder() -> Path:
    """Where notes lie; made if need be. Raises PermissionError if it is another user's."""
    folder = Path(tempfile.gettempdir()) / f"kvferry-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is not this user's: remove it")
    return folder


def write_note(ray_address: str) -> Path:
    """Note this process and all that it has started until now."""
    me = psutil.Process()
    family = [_life(child) for child in me.children(recursive=True)]
    itself = Life(me.pid, me.create_time())
    note = Note(itself, ray_address, tuple(life for life in family if life is not None))
    path = notes_folder() / f"{me.pid}.json"
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(note)), encoding="utf-8")
    fresh.replace(path)
    return path


def read_notes() -> list[Note]:
    """The clusters of which anything lives; notes of others are removed."""
    found = []
    for path in sorted(notes_folder().glob("*.json")):
        try:
            data = json.loads(path.read_bytes())
            family = tuple(Life(**life) for life in data["family"])
            note = Note(Life(**data["server"]), data["ray_address"], family)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it is being written, or is not ours
        if living([note.server, *note.family]):
            found.append(note)
        else:
            path.unlink(missing_ok=True)
    return found


def living(lives: Iterable[Life]) -> list[psutil.Process]:
    """Those that still run."""
    found = []
    for life in lives:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(life.pid)
            ended = process.status() == psutil.STATUS_ZOMBIE
            if not ended and abs(process.create_time() - life.began) < CLOCK_S:
                found.append(process)
    return found


def end(note: Note, within_s: float) -> int:
    """Ask who serves to stop, and end what is left then; how many processes had to be killed."""
    for server in living([note.server]):
        with contextlib.suppress(psutil.Error):
            server.send_signal(signal.SIGTERM)
        psutil.wait_procs([server], within_s)
    left = living([note.server, *note.family])
    for process in list(left):
        with contextlib.suppress(psutil.Error):
            left.extend(process.children(recursive=True))
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, KILLED_S)
    return len(set(left))


def _life(process: psutil.Process) -> Life | None:
    try:
        return Life(process.pid, process.create_time())
    except psutil.Error:  # it has just ended
        return None
