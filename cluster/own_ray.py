"""Notes about clusters with a Ray of their own on this host, so that another process can end them.

A note names the process that serves, and those of its Ray, each with the time it began: a process
id may be another's by the time a note is read. That time is counted from the start of the kernel
where /proc tells it, because the clock on the wall may be set meanwhile. Notes lie in a folder that
only this user can write. Knows of Ray only where its programs are.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

KILLED_S = 10.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
START_FIELD = 19  # of those after the name in /proc/PID/stat: field 22, start in ticks since boot
CLOCK_S = 2.0  # what a clock that is being set may make of a time of birth


@dataclass(frozen=True, slots=True)
class Life:
    """A process: its id, and when it began.

    ``began`` is in ticks of the kernel since the ``boot`` of that id; in seconds of the epoch where
    ``boot`` is empty.
    """

    pid: int
    began: float
    boot: str = ""


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
    """Note this process and what its Ray has started until now."""
    me = psutil.Process()
    family: list[psutil.Process] = []
    for child in me.children():
        with contextlib.suppress(psutil.Error):
            if _is_rays(child):
                family += [child, *child.children(recursive=True)]
    itself, *lives = (life_of(each.pid) for each in (me, *family))
    assert itself is not None  # it runs this
    note = Note(itself, ray_address, tuple(life for life in lives if life is not None))
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
            if not ended and _is(life):
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


def life_of(pid: int) -> Life | None:
    """The process of an id now; None where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = BOOT_ID.read_text(encoding="ascii").strip()
        return Life(pid, float(stat.rpartition(")")[2].split()[START_FIELD]), boot)
    except (OSError, IndexError, ValueError):  # no /proc, or it has just ended
        return _life_by_clock(pid)


def _life_by_clock(pid: int) -> Life | None:
    try:
        return Life(pid, psutil.Process(pid).create_time())
    except psutil.Error:  # it has just ended
        return None


def _is(life: Life) -> bool:
    """Whether the process of that id is the one that is meant."""
    if not life.boot:
        now = _life_by_clock(life.pid)
        return now is not None and abs(now.began - life.began) < CLOCK_S
    return life_of(life.pid) == life


def _is_rays(process: psutil.Process) -> bool:
    """Whether it runs a program, or a script, of Ray's package."""
    folder = f"{ray_folder()}{os.sep}"
    return any(word.startswith(folder) for word in process.cmdline())


def ray_folder() -> Path:
    """Where Ray's package lies."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None and spec.origin is not None  # it is a dependency
    return Path(spec.origin).parent
