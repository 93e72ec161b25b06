"""A worker built on a device: its kernels, pool, graphs and transfers; and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.engine import kernel_choice
from kvferry.engine.device.choice import DeviceUnavailable
from kvferry.engine.device.runner import DeviceModelRunner
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kernels import reference
from kvferry.kv_transfer.authentication import NO_KEY
from kvferry.kv_transfer.connector import TransferFailed
from kvferry.worker import build
from kvferry.worker.build import HostTierUnsupported, WorkerSettings, build_on, build_worker
from kvferry.worker.cluster_key import SECRET_BYTES, ClusterKey
from kvferry.worker.messages import NodeRef
from kvferry.worker.staging.connector import StagingConnector
from kvferry.worker.staging.publisher import StagingPublisher
from kvferry.worker.worker import WorkerTimes
from tests.engine.generation import prompt
from tests.fake_device import FakeDevice
from tests.fakes import ATTEMPT, RecordingOwner
from tests.golden.cluster import greedy
from tests.parity.variants import random_reference

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in Hugging Face layout."""
    path = tmp_path_factory.mktemp("model")
    random_reference("llama").save_pretrained(path)
    return path


@pytest.fixture
def settings(folder: Path) -> WorkerSettings:
    return WorkerSettings(
        NodeRef("decode-0", 3),
        str(folder),
        "float32",
        "float32",
        SchedulerConfig(4, 32, 16, 0.0),
        WorkerTimes(),
        key=NO_KEY,
        block_size=8,
        role="decode",
        device="cuda",
        staging_blocks=3,
        connector="shm",
    )


def run(built: build.BuiltWorker, max_tokens: int = 6) -> list[int]:
    """The tokens of one request in this worker alone."""
    engine, owner = built.worker.engine, RecordingOwner()
    engine.new_sequence(greedy("r", prompt(1, 21), max_tokens), ATTEMPT, owner)
    while engine.step():
        pass
    assert owner.failures == []
    return owner.tokens("r")


def test_a_worker_on_a_device_computes_with_graphs_and_moves_blocks_through_slots(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_choice, "TRITON_FAMILY", reference.__name__)  # stands for it
    device = FakeDevice(seed=1)
    built = build_on(settings, device)
    assert (built.kernels.implementation, built.kernels.isa) == ("triton", "fake")
    assert isinstance(built.worker.connector, StagingConnector)
    assert isinstance(built.worker.publisher, StagingPublisher)
    assert built.worker.connector.local_info().num_blocks == 6
    on_cpu = build_on(replace(settings, kernels="reference", device="cpu"), None)
    assert run(built) == run(on_cpu)
    assert sum(graph.num_launches for graph in device.graphs) == 5
    for each in (built, on_cpu):
        each.worker.close()


def test_readers_of_a_device_s_blocks_must_know_the_cluster_s_key(settings: WorkerSettings) -> None:
    key = ClusterKey(bytes(SECRET_BYTES))
    ours = replace(settings, kernels="reference", connector="tcp", key=key)
    source = build_on(ours, FakeDevice())
    friend = build_on(replace(ours, ref=NodeRef("decode-1", 4)), FakeDevice())
    stranger = build_on(replace(ours, ref=NodeRef("decode-2", 5), key=NO_KEY), FakeDevice())
    info = source.worker.connector.local_info()
    friend.worker.connector.connect(info)
    assert not source.worker.connector.refused()
    with pytest.raises(TransferFailed):
        stranger.worker.connector.connect(info)
    assert source.worker.connector.refused() == {"unauthenticated": 1}
    for each in (source, friend, stranger):
        each.worker.close()


def test_without_kernels_that_can_be_captured_there_are_no_graphs(settings: WorkerSettings) -> None:
    device = FakeDevice(seed=2)
    built = build_on(replace(settings, kernels="reference"), device)
    assert isinstance(built.worker.engine._runner, DeviceModelRunner)
    assert len(run(built)) == 6 and not device.graphs
    built.worker.close()


def test_the_pool_takes_what_the_device_has_left_and_says_how(settings: WorkerSettings) -> None:
    reserve = build.DEVICE_RESERVE_BYTES
    device = FakeDevice(free=reserve + 1 * MIB, total=reserve + 16 * MIB)
    many = SchedulerConfig(32, 32, 16, 0.0)
    built = build_on(replace(settings, kernels="reference", scheduler=many), device)
    weights = built.worker.engine._runner.model.weights.num_bytes()  # type: ignore[attr-defined]
    limit = reserve + 1 * MIB + weights
    line = built.pool.arithmetic
    assert f"({limit / MIB:,.2f} MiB x 1.00 - weights {weights / MIB:,.2f} MiB - step " in line
    assert f" - reserve {reserve / MIB:,.2f} MiB = 0." in line
    assert 0 < built.pool.num_blocks * built.layout.block_bytes() < 1 * MIB
    built.worker.close()


def test_a_share_of_a_device_bounds_the_pool(settings: WorkerSettings) -> None:
    total = 2 * build.DEVICE_RESERVE_BYTES + 20 * MIB
    shared = replace(settings, kernels="reference", gpus=0.5)
    many = replace(shared, scheduler=SchedulerConfig(32, 32, 16, 0.0))
    built = build_on(many, FakeDevice(free=total, total=total))
    assert f"{total / 2 / MIB:,.2f} MiB x 1.00" in built.pool.arithmetic
    assert built.pool.num_blocks * built.layout.block_bytes() < 10 * MIB
    built.worker.close()


def test_a_host_tier_is_refused_by_name(settings: WorkerSettings) -> None:
    with pytest.raises(HostTierUnsupported, match=r"cache\.host_tier .* decode\.device") as caught:
        build_on(replace(settings, kernels="reference", host_bytes=MIB), FakeDevice())
    assert caught.value.exit_code == 2


def test_a_gpu_where_there_is_none_is_refused(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(DeviceUnavailable, match=r"decode\.device is cuda"):
        build_worker(settings)
