"""``serve --address`` on a running Ray cluster: what outlives it, what finds it, what ends it.

One Ray cluster for all of it; every ``serve`` is a new life on the same ground.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kvferry.cluster.client import Client
from kvferry.engine.weights.store import ModelFolder
from kvferry.kv_cache.errors import KVFerryError
from kvferry.protos import kvferry_pb2 as pb
from kvferry.worker.cores import obstacle
from tests.cluster import documents
from tests.system.pools import assert_quiet
from tests.system.processes import SOON_S, START_S, Command, Served, eventually

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[2]
CONFIG = """
{model: {max_model_len: 256}, cache: {num_blocks: 64}, transfer: {host: loopback}}
"""
ACTORS = ("Keeper", "RouterActor", "PrefillWorker", "DecodeWorker")


@pytest.fixture(scope="module")
def ray_head() -> Iterator[Head]:
    """A Ray cluster that somebody else started and that must live on."""
    command = [sys.executable, "-m", "tests.system.ray_head"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True) as head:
        try:
            assert head.stdout is not None and head.stdin is not None
            address = head.stdout.readline().strip()
            assert address
            yield Head(head, address)
            assert head.poll() is None
            head.stdin.close()
            head.wait(SOON_S)
        finally:
            head.kill()  # Ray's processes follow


@dataclass(frozen=True)
class Head:
    process: subprocess.Popen[str]
    address: str

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(order, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline().strip() == "done"

    def actors(self) -> dict[int, str]:
        """Processes of our actors in this Ray: others may run on this host."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                name = process.name()
                if process.status() != psutil.STATUS_ZOMBIE and any(a in name for a in ACTORS):
                    found[process.pid] = name
        return found

    def joined(self, folder: Path, *flags: str) -> Served:
        return Served(folder, CONFIG, "--address", self.address, *flags)

    def down(self, folder: Path, *flags: str) -> list[dict[str, object]]:
        with Command("down", "--json", "--address", self.address, *flags, folder=folder) as command:
            ended = command.wait()
            assert ended.code == 0, ended.err
            clusters: list[dict[str, object]] = documents.parse(ended.out)["clusters"]
            return clusters


def test_a_cluster_on_a_joined_ray_outlives_its_driver_and_ends_when_told(
    default_model: ModelFolder, ray_head: Head, tmp_path: Path
) -> None:
    def left() -> set[int]:
        return set(ray_head.actors())

    def joined(*flags: str) -> Served:
        return ray_head.joined(tmp_path, *flags)

    def down() -> list[dict[str, object]]:
        return ray_head.down(tmp_path)

    with joined("--decode", "2") as served, Client(served.endpoint) as at:
        assert served.ready["ray_address"] == ray_head.address
        assert len(left()) == 5
        placed = {entry.worker.worker_id: entry.worker for entry in at.status().workers}
        assert all("with 1 CPU: " in worker.placement for worker in placed.values())
        assert all(w.address.startswith("tcp://127.0.0.1:") for w in placed.values())
        mine = [core for worker in placed.values() for core in worker.cores]
        assert len(set(mine)) == len(mine)
        pinned = obstacle([name for _, name in socket.if_nameindex()]) is None
        assert bool(mine) == pinned
        drain(at, ray_head)
        assert len(left()) == 4
        grow(at)
        second_signal_ends_at_once(served, at)
    eventually("the keeper ends the actors all the same", left, lambda alive: not alive)

    with joined() as served, Client(served.endpoint) as at:
        before = left()
        served.process.kill()
        served.wait()
        assert at.generate_text("1, 2, 3, 4,", temperature=0.0, max_tokens=3).text == " 5,"
        (keeper,) = (pid for pid, name in ray_head.actors().items() if "Keeper" in name)
        psutil.Process(keeper).kill()
        with joined() as again:
            assert "found a running cluster" in again.err
            assert again.endpoint == served.endpoint
            assert left() - before == {
                pid for pid, name in ray_head.actors().items() if "Keeper" in name
            }
            dies_and_comes_again(at)
            assert len(down()) == 1
            ended = again.wait()
            assert ended.code == 0
            assert "the cluster has been taken down" in ended.err
    eventually("no actor is left", left, lambda alive: not alive)
    assert down() == []

    with joined() as served, Client(served.endpoint) as at:
        assert at.generate_text("1, 2, 3, 4,", temperature=0.0, max_tokens=3).text == " 5,"
        assert_quiet(at)
        served.process.send_signal(signal.SIGTERM)
        ended = served.wait()
        assert (ended.code, ended.complaints) == (0, [])
        assert not served.ready_file.exists()
        eventually("no actor is left", left, lambda alive: not alive)


def test_what_cannot_be_placed_is_said_and_leaves_nothing(
    default_model: ModelFolder, ray_head: Head, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("{ray: {placement_wait: 3s}, decode: {threads: 1, resources: {absent: 1}}}")
    flags = ("--config", str(config), "--address", ray_head.address, "--grpc", "127.0.0.1:0")
    with Command("serve", *flags, folder=tmp_path) as command:
        ended = command.wait()
    assert (ended.code, ended.out) == (1, "")
    assert "waiting for nodes for decode-0 (1 absent); the whole" in ended.err
    assert "kvferry: no node for decode-0 (1 absent) after 3 s" in ended.err
    assert ray_head.down(tmp_path) == []


def test_places_that_another_job_made_are_given_back(ray_head: Head, tmp_path: Path) -> None:
    """As those of a Serve replica's keeper: Ray finds a group by name in its job's namespace."""
    ray_head.tell("reserve")
    (found,) = ray_head.down(tmp_path)
    assert (found["num_actors"], found["num_placement_groups"]) == (0, 1)
    assert ray_head.down(tmp_path) == []


def test_a_start_whose_command_was_killed_is_given_up(
    default_model: ModelFolder, ray_head: Head, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("{ray: {placement_wait: 1h}, decode: {threads: 1, resources: {absent: 1}}}")
    with Command(
        "serve", "--config", str(config), "--address", ray_head.address, folder=tmp_path
    ) as command:
        eventually(
            "it waits for a place", lambda: "waiting for nodes" in command.err, bool, START_S
        )
        assert ray_head.actors()
        command.process.kill()
        eventually("its keeper has ended", ray_head.actors, lambda alive: not alive, START_S)
    assert ray_head.down(tmp_path) == []


def test_what_is_being_taken_down_is_waited_for_and_its_end_is_not_the_next_one_s(
    default_model: ModelFolder, ray_head: Head, tmp_path: Path
) -> None:
    flags = ("--address", ray_head.address, "--grace", "60")
    with (
        ray_head.joined(tmp_path) as served,
        Client(served.endpoint) as at,
        at.generate("Once upon a time", ignore_eos=True, max_tokens=240) as stream,
    ):
        assert isinstance(next(stream), pb.Accepted)
        assert isinstance(next(stream), pb.Delta)
        with Command("down", *flags, folder=tmp_path) as down:
            eventually("nothing new is let in", lambda: refused(served.endpoint), bool)
            with ray_head.joined(tmp_path, "--detach") as detached:
                assert "waiting for the cluster that is being taken down" in detached.err
                assert detached.wait().code == 0
                assert (down.wait().code, served.wait().code) == (0, 0)
                assert "the cluster has been taken down" in served.err
                assert at_work(detached.endpoint)
                assert len(ray_head.down(tmp_path)) == 1


def test_what_cannot_be_taken_up_is_said_and_left_alone(
    default_model: ModelFolder, ray_head: Head, tmp_path: Path
) -> None:
    def workers() -> set[int]:
        return {pid for pid, name in ray_head.actors().items() if "Worker" in name}

    flags = ("--address", ray_head.address)
    with ray_head.joined(tmp_path) as served:
        there = workers()
        ray_head.tell("lose")
        lost = served.wait()
        assert lost.code == 1
        assert "the keeper has died, and what it watched is left alone" in lost.err
        assert workers() == there
        host, _, port = served.endpoint.rpartition(":")
        (router,) = (pid for pid, name in ray_head.actors().items() if "Router" in name)
        psutil.Process(router).kill()
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            eventually("the port is free", lambda: is_free(host, int(port)), bool)
            taken.bind((host, int(port)))
            taken.listen()
            with Command("serve", *flags, folder=tmp_path) as again:
                eventually("it says so", lambda: "cannot take up" in again.err, bool)
                again.interrupt()
                assert again.wait().code == 130
            with Command("serve", *flags, folder=tmp_path) as again:
                ended = again.wait()
                assert ended.code == 1
                assert "its workers are left alone: 'kvferry down', then serve anew" in ended.err
            assert workers() == there
    assert len(ray_head.down(tmp_path)) == 1
    eventually("no worker is left", workers, lambda alive: not alive)


def is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) != 0


def refused(endpoint: str) -> bool:
    try:
        return not at_work(endpoint)
    except KVFerryError:
        return True


def at_work(endpoint: str) -> bool:
    with Client(endpoint) as client:
        return client.generate_text("1, 2, 3, 4,", temperature=0.0, max_tokens=3).text == " 5,"


def grow(client: Client) -> None:
    """The drained worker's place was given back: there is room for another."""
    there = client.scale(decode=2, timeout_s=START_S)
    assert (there.prefill, there.decode) == (1, 2)
    assert client.scale(decode=1, timeout_s=START_S).decode == 1


def dies_and_comes_again(client: Client) -> None:
    """The keeper in its second life watches: a worker that is killed is started again."""
    (worker,) = (e.worker for e in client.status().workers if e.worker.role == "decode")
    psutil.Process(worker.pid).kill()

    def epochs() -> list[int]:
        found = [e.worker for e in client.status().workers if e.worker.role == "decode"]
        return [each.epoch for each in found if each.state == "ready"]

    eventually("it is there again", epochs, lambda found: found > [worker.epoch], START_S)


def drain(client: Client, head: Head) -> None:
    """The drained worker's process ends and no other takes its place; the other one serves."""
    (pid,) = (
        entry.worker.pid
        for entry in client.status().workers
        if entry.worker.worker_id == "decode-1"
    )
    assert pid in head.actors()
    client.drain("decode-1", timeout_s=SOON_S)
    eventually("its process has ended", lambda: pid in head.actors(), lambda there: not there)
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
