"""The supervision signals the process that it has watched, never another with the same id."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvferry.cluster.running import Handles, RunningRouter
from kvferry.worker.messages import NodeRef

HERE = "this node"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        yield process
        process.kill()


def running(pid: int, epoch: int = 1, node: str = HERE) -> RunningRouter:
    return RunningRouter(None, NodeRef("router-0", epoch), pid, node)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_watched_process_is_ended_even_if_it_stands_still(
    sleeper: subprocess.Popen[bytes], stopped: bool
) -> None:
    handles = Handles(HERE)
    handles.watch(running(sleeper.pid))
    if stopped:
        sleeper.send_signal(signal.SIGSTOP)
    handles.kill(NodeRef("router-0", 1))
    assert sleeper.wait(10) == -signal.SIGKILL
    handles.kill(NodeRef("router-0", 1))  # again: nothing


def test_only_the_life_that_was_watched_is_ended(sleeper: subprocess.Popen[bytes]) -> None:
    handles = Handles(HERE)
    handles.watch(running(sleeper.pid, epoch=2))
    handles.kill(NodeRef("router-0", 1))
    assert sleeper.poll() is None
    handles.close()
    assert sleeper.poll() is None


def test_a_process_on_another_node_is_not_signalled(sleeper: subprocess.Popen[bytes]) -> None:
    handles = Handles(HERE)
    handles.watch(running(sleeper.pid, node="another"))
    handles.kill(NodeRef("router-0", 1))
    assert sleeper.poll() is None


def test_a_process_that_has_ended_harms_nobody(sleeper: subprocess.Popen[bytes]) -> None:
    handles = Handles(HERE)
    handles.watch(running(sleeper.pid))
    sleeper.kill()
    sleeper.wait()
    handles.kill(NodeRef("router-0", 1))
    handles.watch(running(sleeper.pid, epoch=2))  # too late to watch: no error either
    handles.kill(NodeRef("router-0", 2))
