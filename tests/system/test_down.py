"""``kvferry scale`` and ``kvferry down`` on a Ray of one's own, also after ``kill -9`` of serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.cluster.client import Client
from kvferry.engine.weights.store import ModelFolder
from tests.cluster import documents
from tests.system.processes import START_S, Command, Served

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]

CONFIG = "{model: {max_model_len: 256}, cache: {num_blocks: 64}}"


def test_a_killed_serve_is_cleared_away_at_once_and_again_is_harmless(
    default_model: ModelFolder, tmp_path: Path
) -> None:
    def down(pid: int) -> list[dict[str, object]]:
        with Command("down", "--json", "--pid", str(pid), folder=tmp_path) as command:
            clusters: list[dict[str, object]] = documents.parse(command.wait().out)["clusters"]
            return clusters

    with Served(tmp_path, CONFIG) as served, Client(served.endpoint) as client:
        grown = client.scale(decode=2, timeout_s=START_S)
        assert (grown.prefill, grown.decode) == (1, 2)
        assert client.scale(decode=1, timeout_s=START_S).decode == 1
        assert client.generate_text("1, 2, 3, 4,", temperature=0.0, max_tokens=3).text == " 5,"
        (worker,) = (e.worker for e in client.status().workers if e.worker.role == "decode")
        assert (worker.placement, list(worker.cores)) == ("a Ray of its own, on this host", [])
        assert any("gcs_server" in process.name() for process in served.family())
        served.process.kill()
        served.wait()
        (cluster,) = down(served.process.pid)
        assert (cluster["kind"], cluster["pid"]) == ("own", served.process.pid)
        assert cluster["ray_address"] == served.ready["ray_address"]
        served.assert_nothing_lives_on()
        assert down(served.process.pid) == []


def test_down_stops_a_serve_that_runs(default_model: ModelFolder, tmp_path: Path) -> None:
    with Served(tmp_path, CONFIG) as served:
        pid = served.process.pid
        with Command("down", "--pid", str(pid), folder=tmp_path) as command:
            ended = command.wait()
            assert (ended.code, ended.out) == (
                0,
                f"the cluster on Ray at {served.ready['ray_address']} is down\n",
            )
        stopped = served.wait()
        assert (stopped.code, stopped.complaints) == (0, [])
        served.assert_nothing_lives_on()
