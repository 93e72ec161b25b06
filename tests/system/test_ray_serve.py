"""Under a real Ray Serve: the application starts a cluster, is its health, and ends it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvferry.cluster.client import Client
from kvferry.engine.weights.store import ModelFolder
from tests.system.pools import assert_quiet
from tests.system.processes import SOON_S, eventually

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]

SERVING = ("RouterActor", "PrefillWorker", "DecodeWorker")
ACTORS = (*SERVING, "Keeper")  # what outlives the replica, where there is one
REPOSITORY = Path(__file__).parents[2]
ARGUMENTS: dict[str, Any] = {
    "overrides": {
        "model.max_model_len": 256,
        "cache.num_blocks": 64,
        "server.grpc": "127.0.0.1:0",
        "server.http": "127.0.0.1:0",
    },
    "patience": "5s",
}
UPDATED = {**ARGUMENTS, "overrides": {**ARGUMENTS["overrides"], "model.max_model_len": 128}}


@pytest.fixture
def head(default_model: ModelFolder) -> Iterator[subprocess.Popen[str]]:
    """Ray and Serve with the application, in a process that ends them at the end of its input."""
    command = [sys.executable, "-m", "tests.system.serve_head", json.dumps(ARGUMENTS)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, text=True, stdin=pipe, stdout=pipe) as process:
        try:
            yield process
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(SOON_S) == 0
        finally:
            process.kill()  # Ray's processes follow


def actors_of(process: subprocess.Popen[str]) -> dict[int, str]:
    """Processes of our actors in the Ray that a process has started."""
    found = {}
    for each in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            name = each.name()
            if each.status() != psutil.STATUS_ZOMBIE and any(actor in name for actor in ACTORS):
                found[each.pid] = name
    return found


def tell(process: subprocess.Popen[str], order: str) -> None:
    """Give the head an order, see there, and wait until it has been carried out."""
    assert process.stdin is not None and process.stdout is not None
    print(order, file=process.stdin, flush=True)
    assert process.stdout.readline().strip() == "done"


def ask(url: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(url, timeout=SOON_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_serve_owns_the_clusters_life_and_sees_its_health(head: subprocess.Popen[str]) -> None:
    def serving() -> dict[int, str]:
        return {
            pid: name
            for pid, name in actors_of(head).items()
            if any(actor in name for actor in SERVING)
        }

    assert head.stdin is not None and head.stdout is not None
    url = json.loads(head.stdout.readline())["url"]
    status, facts = ask(url)
    assert (status, facts["ready"], facts["metrics"]) == (200, True, None)
    assert len(serving()) == 3

    # tokens come through the cluster's own door
    with Client(facts["grpc"]) as client:
        completion = client.generate_text("1, 2, 3, 4,", temperature=0.0, max_tokens=3)
        assert completion.text == " 5,"
        assert_quiet(client)
    with urllib.request.urlopen(f"http://{facts['http']}/ready", timeout=SOON_S) as answer:
        assert answer.status == 200

    # a death is supervision's affair, and the application says so meanwhile
    (pid,) = (pid for pid, name in serving().items() if "DecodeWorker" in name)
    psutil.Process(pid).kill()
    eventually(
        "the application says that it is not ready", lambda: ask(url)[0], lambda it: it == 503
    )
    status, again = eventually("it is ready again", lambda: ask(url), lambda it: it[0] == 200)
    assert again["grpc"] == facts["grpc"]  # the same cluster: Serve has not begun anew
    assert len(serving()) == 3

    # an update: the successor starts while its forerunner ends, and has a cluster of its own
    tell(head, json.dumps(UPDATED))
    status, updated = eventually("it is updated", lambda: ask(url), lambda it: it[0] == 200)
    with Client(updated["grpc"]) as client:
        assert client.status().model.max_model_len == 128
    eventually("nothing of the first is left", serving, lambda now: len(now) == 3)
    first = serving().keys()

    # unhealthy: Serve begins anew
    tell(head, "lose")
    eventually("it is not ready", lambda: ask(url)[0], lambda it: it != 200)
    status, anew = eventually(
        "Serve has begun anew", lambda: ask(url), lambda it: it[0] == 200, 180.0
    )
    with Client(anew["grpc"]) as client:
        assert client.generate_text("1, 2, 3, 4,", temperature=0.0, max_tokens=3).text == " 5,"
    eventually("nothing of earlier ones is left", serving, lambda now: len(now) == 3)
    assert not first & serving().keys()

    tell(head, "delete")
    eventually("the cluster has ended with it", lambda: actors_of(head), lambda alive: not alive)
    assert head.poll() is None  # Ray itself lives on
