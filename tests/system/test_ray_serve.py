"""Under a real Ray Serve: the application starts a cluster, is its health, and ends it."""

from __future__ import annotations

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

pytest.importorskip("ray.serve", reason="the extra ray-serve is not installed")

from kvferry.cluster.client import Client  # noqa: E402
from kvferry.engine.weights.store import ModelFolder  # noqa: E402
from tests.system.pools import assert_quiet  # noqa: E402
from tests.system.processes import SOON_S, eventually  # noqa: E402
from tests.system.test_joining import actors  # noqa: E402

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[2]
ARGUMENTS = {
    "overrides": {
        "model.max_model_len": 256,
        "cache.num_blocks": 64,
        "server.grpc": "127.0.0.1:0",
        "server.http": "127.0.0.1:0",
    },
    "patience": "5s",
}


@pytest.fixture
def head(default_model: ModelFolder) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.system.serve_head", json.dumps(ARGUMENTS)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()  # the second time, where the test has come to its end
            try:
                process.wait(SOON_S)
            finally:
                process.kill()


def ask(url: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(url, timeout=SOON_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_serve_owns_the_clusters_life_and_sees_its_health(head: subprocess.Popen[str]) -> None:
    others = set(actors())  # of the suite's own cluster

    def ours() -> dict[int, str]:
        return {pid: name for pid, name in actors().items() if pid not in others}

    assert head.stdout is not None
    url = json.loads(head.stdout.readline())["url"]
    status, facts = ask(url)
    assert (status, facts["ready"], facts["metrics"]) == (200, True, None)
    assert len(ours()) == 3

    # tokens come through the cluster's own door
    with Client(facts["grpc"]) as client:
        completion = client.generate_text("1, 2, 3, 4,", temperature=0.0, max_tokens=3)
        assert completion.text == " 5,"
        assert_quiet(client)
    with urllib.request.urlopen(f"http://{facts['http']}/ready", timeout=SOON_S) as answer:
        assert answer.status == 200

    # a death is supervision's affair, and the application says so meanwhile
    (pid,) = (pid for pid, name in ours().items() if "DecodeWorker" in name)
    psutil.Process(pid).kill()
    eventually(
        "the application says that it is not ready", lambda: ask(url)[0], lambda it: it == 503
    )
    status, again = eventually("it is ready again", lambda: ask(url), lambda it: it[0] == 200)
    assert again["grpc"] == facts["grpc"]  # the same cluster: Serve has not begun anew
    assert len(ours()) == 3

    head.terminate()
    assert head.stdout.readline().strip() == "deleted"
    eventually("the cluster has ended with the application", ours, lambda alive: not alive)
    assert head.poll() is None  # Ray itself lives on
