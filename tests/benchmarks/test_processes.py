"""Servers are awaited with bounds, and nothing of them lives on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.peers.processes import Launch, Server, ServerFailed, free_ports

# Starts a child in its group and one in a session of its own, then ignores SIGTERM if told so.
PARENT = """
import pathlib, signal, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(sleep, start_new_session=new) for new in (False, True)]
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("ready").write_text(" ".join(str(child.pid) for child in children))
time.sleep(600)
"""


def server(folder: Path, code: str, *arguments: str) -> Server:
    command = [sys.executable, "-c", code, *arguments]
    return Server(Launch("it", command, {"MARK": "1"}, os.environ), folder)


def wait_ready(server: Server, folder: Path) -> list[psutil.Process]:
    ready = folder / "ready"
    server.wait_until(lambda: ready.exists() and bool(ready.read_text()), 60)
    return [psutil.Process(int(pid)) for pid in ready.read_text().split()]


def test_children_end_with_their_server_wherever_they_are(tmp_path: Path) -> None:
    with server(tmp_path, PARENT) as running:
        children = wait_ready(running, tmp_path)
        family = running.family()
        assert len(family) == 3
        assert set(children) < set(family)
    assert not any(process.is_running() for process in family)


def test_they_end_after_a_failure_too(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), server(tmp_path, PARENT) as running:
        wait_ready(running, tmp_path)
        family = running.family()
        raise KeyboardInterrupt
    assert not any(process.is_running() for process in family)


def test_a_server_that_ignores_the_signal_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.peers.processes.STOP_S", 0.1)
    with server(tmp_path, PARENT, "deaf") as running:
        wait_ready(running, tmp_path)
        family = running.family()
    assert not any(process.is_running() for process in family)


def test_a_child_that_outlives_its_parent_is_ended(tmp_path: Path) -> None:
    with server(tmp_path, PARENT) as running:
        child = wait_ready(running, tmp_path)[0]
        parent = child.parent()
        assert parent is not None
        parent.kill()
        psutil.wait_procs([parent], timeout=60)
        assert child.is_running()
    assert not child.is_running()


def test_a_server_that_ends_early_is_named_with_its_last_words(tmp_path: Path) -> None:
    code = "import sys; print('no such model'); sys.exit(3)"
    with (
        pytest.raises(ServerFailed, match=r"it ended with 3:\nno such model"),
        server(tmp_path, code) as running,
    ):
        running.wait_until(lambda: False, 60)


def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerFailed, match=r"it was not ready within 0.1 s"),
        server(tmp_path, "import time; time.sleep(600)") as running,
    ):
        running.wait_until(lambda: False, 0.1)


def test_it_runs_with_its_variables_in_its_folder(tmp_path: Path) -> None:
    code = "import os; open('ready', 'w').write(os.environ['MARK'] + os.environ['PATH'])"
    with server(tmp_path, code) as running:
        ready = tmp_path / "ready"
        wanted = "1" + os.environ["PATH"]
        running.wait_until(lambda: ready.exists() and ready.read_text() == wanted, 60)


def test_free_ports_are_different() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert min(ports) > 1023
