"""A sweep's clusters are processes: awaited, ended with all they started, heard when they fail."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
import yaml

from kvferry.cluster.loadgen.experiments.serve_process import ClusterFailed, ServeProcess

READY = """
import json, os, pathlib, signal, subprocess, sys, time
flags = dict(zip(sys.argv[2::2], sys.argv[3::2]))
assert sys.argv[1] == "serve" and flags["--grpc"] == "127.0.0.1:0"
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
said = pathlib.Path(os.environ["SAID"])
said.write_text(pathlib.Path(flags["--config"]).read_text())
def stop(number, frame):
    said.with_suffix(".signal").write_text(str(number))
    sys.exit(0)
signal.signal(signal.SIGINT, stop)
pathlib.Path(flags["--ready-file"] + "~").write_text("READY " + json.dumps(
    {"grpc": "127.0.0.1:7", "pid": os.getpid(), "child": child.pid}))
os.replace(flags["--ready-file"] + "~", flags["--ready-file"])
said.with_suffix(".pids").write_text(f"{os.getpid()} {child.pid}")
while True:
    time.sleep(600)
"""


def script(folder: Path, text: str) -> tuple[str, ...]:
    path = folder / "serve.py"
    path.write_text(text, encoding="utf-8")
    return (sys.executable, str(path))


def test_it_gets_its_configuration_and_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "said"
    monkeypatch.setenv("SAID", str(said))
    config = {"colocated": {"replicas": 1, "threads": 2}, "prefill": {"replicas": 0}}
    waits: list[None] = []
    process = ServeProcess(config, script(tmp_path, READY), lambda: waits.append(None))
    with process as running:
        assert running.endpoint == "127.0.0.1:7"
        assert running.startup_s > 0
        assert waits
        running.check()
        assert yaml.safe_load(said.read_text()) == config
    assert said.with_suffix(".signal").read_text() == "2"
    pids = said.with_suffix(".pids").read_text().split()
    assert len(pids) == 2
    assert not any(_lives(int(pid)) for pid in pids)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(("code", "exit_code"), [(1, 1), (2, 2), (3, 3), (130, 1)])
def test_one_that_does_not_start_says_why(tmp_path: Path, code: int, exit_code: int) -> None:
    text = f"import sys\nprint('no room', file=sys.stderr)\nsys.exit({code})"
    with pytest.raises(ClusterFailed, match=rf"ended with {code}\n  no room") as caught:
        ServeProcess({}, script(tmp_path, text)).__enter__()
    assert caught.value.exit_code == exit_code


def test_an_interruption_while_it_starts_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pid"
    monkeypatch.setenv("SAID", str(pids))
    text = (
        "import os, pathlib, time\n"
        "pathlib.Path(os.environ['SAID']).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )

    def interrupted() -> None:
        if pids.exists() and pids.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ServeProcess({}, script(tmp_path, text), interrupted).__enter__()
    assert not _lives(int(pids.read_text()))


def test_what_an_ended_start_has_left_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pid"
    monkeypatch.setenv("SAID", str(pids))
    text = (
        "import os, pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True)\n"
        "pathlib.Path(os.environ['SAID']).write_text(str(child.pid))\n"
        "sys.exit(1)\n"
    )
    with pytest.raises(ClusterFailed):
        ServeProcess({}, script(tmp_path, text)).__enter__()
    assert not _lives(int(pids.read_text()))
