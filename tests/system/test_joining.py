"""``serve --address`` on a running Ray cluster, and hard ends of ``serve``: what is left behind.

One Ray cluster for all of it; every ``serve`` is a new life on the same ground.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvferry.cluster.client import Client
from kvferry.engine.weights.store import ModelFolder
from kvferry.protos import kvferry_pb2 as pb
from tests.system.pools import assert_quiet
from tests.system.processes import SOON_S, Served, eventually

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[2]
CONFIG = "{model: {max_model_len: 256}, cache: {num_blocks: 64}}"
ACTORS = ("RouterActor", "PrefillWorker", "DecodeWorker")


@pytest.fixture(scope="module")
def ray_head() -> Iterator[str]:
    """HOST:PORT of a Ray cluster that somebody else started and that must live on."""
    command = [sys.executable, "-m", "tests.system.ray_head"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as head:
        try:
            assert head.stdout is not None
            address = head.stdout.readline().strip()
            assert address
            yield address
            assert head.poll() is None
        finally:
            head.terminate()
            head.wait(SOON_S)


def actors() -> dict[int, str]:
    """Processes of our actors on this host, of whichever run: a joined Ray starts them."""
    found = {}
    for process in psutil.process_iter(["pid", "name"]):
        name = process.info["name"] or ""
        if name.startswith("ray::") and any(actor in name for actor in ACTORS):
            found[process.info["pid"]] = name
    return found


def test_drain_second_signal_kill_and_stop_on_a_joined_ray(
    default_model: ModelFolder, ray_head: str, tmp_path: Path
) -> None:
    others = set(actors())  # of the suite's own cluster

    def left() -> set[int]:
        return set(actors()) - others

    def joined(*flags: str) -> Served:
        return Served(tmp_path, CONFIG, "--address", ray_head, *flags)

    with joined("--decode", "2") as served, Client(served.endpoint) as at:
        assert served.ready["ray_address"] == ray_head
        assert len(left()) == 4
        drain(at)
        assert len(left()) == 3
        second_signal_ends_at_once(served, at)
    eventually("the actors end with their driver", left, lambda alive: not alive)

    with joined() as served:
        served.process.kill()
        served.wait()
    eventually("the actors end with their driver", left, lambda alive: not alive)

    with joined() as served, Client(served.endpoint) as at:
        assert at.generate_text("1, 2, 3, 4,", temperature=0.0, max_tokens=3).text == " 5,"
        assert_quiet(at)
        served.process.send_signal(signal.SIGTERM)
        ended = served.wait()
        assert (ended.code, ended.complaints) == (0, [])
        assert not served.ready_file.exists()
        eventually("no actor is left", left, lambda alive: not alive)


def drain(client: Client) -> None:
    """The drained worker's process ends and no other takes its place; the other one serves."""
    (pid,) = (
        entry.worker.pid
        for entry in client.status().workers
        if entry.worker.worker_id == "decode-1"
    )
    assert pid in actors()
    client.drain("decode-1", timeout_s=SOON_S)
    eventually("its process has ended", lambda: pid in actors(), lambda there: not there)
    completion = client.generate_text("1, 2, 3, 4,", temperature=0.0, max_tokens=3)
    assert completion.finished.decode_worker == "decode-0"
    status = client.status()
    assert status.ready
    assert {entry.worker.worker_id for entry in status.workers} == {"decode-0", "prefill-0"}
    assert status.counters.recovered == 0


def second_signal_ends_at_once(served: Served, client: Client) -> None:
    """The first lets a long stream go on; the second does not wait for it."""
    with client.generate("Once upon a time", ignore_eos=True, max_tokens=240) as stream:
        assert isinstance(next(stream), pb.Accepted)
        assert isinstance(next(stream), pb.Delta)
        served.process.send_signal(signal.SIGTERM)
        eventually("it is stopping", lambda: "stopping: " in served.err, bool)
        assert served.process.poll() is None
        served.process.send_signal(signal.SIGTERM)
        assert served.wait().code == 130
