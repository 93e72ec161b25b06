"""``kvferry down`` ends what a note names, with all that is left of it, and nobody else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from kvferry.cluster import own_ray
from kvferry.cluster.cli.app import main
from kvferry.cluster.own_ray import Life, Note, living, read_notes
from tests.cluster import documents

SLEEPS = "import signal; signal.pause()"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"

Starter = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return own_ray.notes_folder()


@pytest.fixture
def start() -> Iterator[Starter]:
    processes: list[subprocess.Popen[bytes]] = []

    def started(code: str) -> subprocess.Popen[bytes]:
        ready = f"{code.rpartition(';')[0]}; print(flush=True); signal.pause()"
        process = subprocess.Popen([sys.executable, "-c", ready], stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None and process.stdout.readline()
        return process

    yield started
    for process in processes:
        process.kill()
        process.communicate()


def life(process: subprocess.Popen[bytes], shift: float = 0.0) -> Life:
    born = own_ray.life_of(process.pid)
    assert born is not None
    return replace(born, began=born.began + shift)


def note(folder: Path, server: Life, *family: Life) -> None:
    data = {
        "server": asdict(server),
        "ray_address": f"127.0.0.1:{server.pid}",
        "family": [asdict(each) for each in family],
    }
    (folder / f"{server.pid}.json").write_text(json.dumps(data))


def down(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, list[dict[str, object]]]:
    code = main(["down", "--json", *flags])
    return code, documents.parse(capsys.readouterr().out)["clusters"]


def test_a_note_of_this_process_names_it_and_its_rays_processes_but_no_others(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "ray" / "raylet.py"
    script.parent.mkdir()
    script.write_text(
        "import signal, subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {SLEEPS!r}])\n"
        "print(flush=True)\n"
        "signal.pause()\n"
    )
    monkeypatch.setattr(own_ray, "ray_folder", lambda: script.parent)
    other = start(SLEEPS)
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as rays:
        assert rays.stdout is not None and rays.stdout.readline()
        (worker,) = psutil.Process(rays.pid).children()
        try:
            path = own_ray.write_note("127.0.0.1:1")
            (found,) = read_notes()
        finally:
            worker.kill()
            rays.kill()
    assert found.server.pid == os.getpid()
    pids = {each.pid for each in found.family}
    assert pids == {rays.pid, worker.pid}
    assert other.pid not in pids
    path.unlink()
    assert read_notes() == []


def test_a_step_of_the_clock_makes_nobody_another(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(SLEEPS)
    born = life(process)
    real = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: real(self) + 3600.0)
    assert [each.pid for each in living([born])] == [process.pid]
    assert not living([replace(born, boot="of another start of the machine")])


def test_without_proc_the_clock_tells(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(SLEEPS)
    monkeypatch.setattr(own_ray, "BOOT_ID", Path("/proc/absent"))
    born = life(process)
    assert born == Life(process.pid, psutil.Process(process.pid).create_time())
    assert living([born])
    assert not living([life(process, 100.0)])


def test_ray_runs_its_programs_from_its_package() -> None:
    assert (own_ray.ray_folder() / "core" / "src" / "ray" / "raylet" / "raylet").exists()


def test_the_one_that_serves_is_asked_and_what_it_leaves_is_killed(
    folder: Path, start: Starter, capsys: pytest.CaptureFixture[str]
) -> None:
    server, left, other = start(SLEEPS), start(STUBBORN), start(SLEEPS)
    life_of_server, life_of_left = life(server), life(left)
    note(folder, life_of_server, life_of_left)
    code, clusters = down(capsys)
    assert code == 0
    assert [(c["kind"], c["pid"], c["num_killed"]) for c in clusters] == [("own", server.pid, 1)]
    assert not living([life_of_server, life_of_left])
    assert other.poll() is None
    assert down(capsys) == (0, [])
    assert list(folder.iterdir()) == []


def test_a_server_that_was_killed_leaves_its_ray_to_be_ended(
    folder: Path, start: Starter, capsys: pytest.CaptureFixture[str]
) -> None:
    server, left = start(SLEEPS), start(SLEEPS)
    life_of_left = life(left)
    note(folder, life(server), life_of_left)
    server.kill()
    server.wait()
    assert down(capsys)[1][0]["num_killed"] == 1
    assert not living([life_of_left])


def test_a_process_id_that_is_another_s_now_is_left_alone(
    folder: Path, start: Starter, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger = start(SLEEPS)
    note(folder, life(stranger, -100.0), life(stranger, 100.0))
    assert down(capsys) == (0, [])
    assert stranger.poll() is None
    assert living([life(stranger)])


def test_of_several_one_must_be_named(
    folder: Path, start: Starter, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = start(SLEEPS), start(SLEEPS)
    for each in (first, second):
        note(folder, life(each))
    assert main(["down", "--json"]) == 2
    assert documents.parse(capsys.readouterr().out)["clusters"] is None
    assert [c["pid"] for c in down(capsys, "--pid", str(second.pid))[1]] == [second.pid]
    assert first.poll() is None
    assert [c["pid"] for c in down(capsys, "--all")[1]] == [first.pid]
    assert main(["down", "--all", "--address", "127.0.0.1:1"]) == 2


def test_a_file_that_is_no_note_is_nobody_s(folder: Path) -> None:
    for name, text in (("1.json", "{"), ("2.json", "[]"), ("3.json", '{"family": 3}')):
        (folder / name).write_text(text)
    assert read_notes() == []


def test_a_folder_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 4242)
    with pytest.raises(PermissionError, match="not this user's"):
        own_ray.notes_folder()


def test_a_note_reads_back_what_was_written(folder: Path, start: Starter) -> None:
    server = start(SLEEPS)
    note(folder, life(server))
    assert read_notes() == [Note(life(server), f"127.0.0.1:{server.pid}", ())]
