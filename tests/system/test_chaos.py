"""A handful of the experiments of ``kvferry chaos``; ``make chaos`` runs them all."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from kvferry.cluster.client import Client
from kvferry.engine.weights.store import ModelFolder
from tests.cluster import documents
from tests.system.processes import Command, Served

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]

# One of each target, each in another state; both faults.
CELLS = (
    "prefill/stop/prefilling",
    "decode/kill/transferring",
    "router/kill/handed_off",
    "client/kill/decoding",
)
DETECTED_WITHIN_S = 2.0
SLOW_MACHINE_S = 2.0


def test_streams_outlive_workers_routers_and_clients_and_nothing_is_left_behind(
    default_model: ModelFolder, tmp_path: Path
) -> None:
    with Command("chaos", "--json", "--cells", *CELLS, folder=tmp_path) as chaos:
        ended = chaos.wait()
        found = documents.parse(ended.out)
        assert ended.code == 0, found["error"]
        chaos.assert_nothing_lives_on()
    names = {f"{cell['target']}/{cell['fault']}/{cell['state']}": cell for cell in found["cells"]}
    assert names.keys() == set(CELLS)
    for name, cell in names.items():
        assert (cell["tried"], cell["survived"], cell["why"]) == (1, 1, None), name
        assert cell["tokens_lost"] == cell["tokens_repeated"] == cell["tokens_wrong"] == 0, name
        assert cell["blocks_leaked"] == 0, name
        assert cell["detection_s"]["max"] < DETECTED_WITHIN_S + SLOW_MACHINE_S, name
    assert found["false_deaths"] == 0


def test_other_programs_do_not_stand_before_the_cluster(served: Served, client: Client) -> None:
    """Ray gives its workers a low priority, so that a busy host would starve their heartbeats."""
    status = client.status()
    pids = [entry.worker.pid for entry in status.workers] + [entry.pid for entry in status.routers]
    assert len(pids) == 3
    own = psutil.Process().nice()
    assert {psutil.Process(pid).nice() for pid in pids} == {own}
