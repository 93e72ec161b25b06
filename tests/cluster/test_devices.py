"""Which workers compute on a GPU, and what follows from that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster.block_sizes import BlockSizes
from kvferry.cluster.config import Config, ConfigError, load_config
from kvferry.cluster.devices import gpus_for, gpus_of, on_devices, reserved
from kvferry.cluster.errors import NotPlaced
from kvferry.cluster.ground import OwnGround
from kvferry.cluster.settings import Share, kv_dtype, model_dtype, worker_setting
from kvferry.engine.device.choice import DeviceUnavailable
from kvferry.worker.cluster_key import SECRET_BYTES, ClusterKey
from kvferry.worker.messages import NodeRef

KEY = ClusterKey(bytes(SECRET_BYTES))


def config(**overrides: Any) -> Config:
    return load_config(None, {key.replace("__", "."): v for key, v in overrides.items()})


def devices(found: Config) -> dict[str, str]:
    return {role: getattr(found, role).device for role in ("prefill", "decode", "colocated")}


def test_auto_is_the_cpu_where_there_is_no_gpu_and_nothing_is_said_of_it() -> None:
    placed = on_devices(config(), 0)
    assert placed.lines == ()
    assert (placed.config.prefill.device, placed.config.decode.device) == ("cpu", "cpu")
    assert model_dtype(placed.config) == kv_dtype(placed.config) == "float32"


def test_auto_is_a_gpu_where_there_is_one_for_each_worker() -> None:
    placed = on_devices(config(prefill__replicas=2), 3)
    assert (placed.config.prefill.device, placed.config.decode.device) == ("cuda", "cuda")
    assert placed.lines == ("device: prefill cuda, decode cuda",)
    assert model_dtype(placed.config) == kv_dtype(placed.config) == "bfloat16"


def test_with_too_few_gpus_auto_is_the_cpu_for_all_and_start_up_says_so() -> None:
    placed = on_devices(config(prefill__replicas=2), 2)
    assert (placed.config.prefill.device, placed.config.decode.device) == ("cpu", "cpu")
    (line,) = placed.lines
    assert "auto is the CPU" in line and "3 GPUs" in line and "has 2" in line


def test_what_has_to_be_on_a_gpu_comes_first() -> None:
    placed = on_devices(config(decode__device="cuda"), 1)
    assert (placed.config.prefill.device, placed.config.decode.device) == ("cpu", "cuda")
    assert model_dtype(placed.config) == "bfloat16", "one dtype for all pools"


def test_a_dtype_that_is_asked_for_stays() -> None:
    placed = on_devices(config(model__dtype="float32"), 2)
    assert placed.config.decode.device == "cuda" and model_dtype(placed.config) == "float32"


def test_workers_may_share_a_gpu() -> None:
    shared = config(prefill__gpus=0.5, decode__gpus=0.5)
    assert on_devices(shared, 1).config.decode.device == "cuda"
    thirds = config(prefill__gpus=1 / 3, decode__gpus=1 / 3, prefill__replicas=2)
    assert on_devices(thirds, 1).config.prefill.device == "cuda"


def test_a_worker_does_not_span_two_gpus() -> None:
    large = config(colocated__replicas=3, colocated__gpus=0.6, prefill__replicas=0)
    large = large.model_copy(update={"decode": large.decode.model_copy(update={"replicas": 0})})
    assert on_devices(large, 2).config.colocated.device == "cpu"
    assert on_devices(large, 3).config.colocated.device == "cuda"
    assert gpus_for([(2, 0.5), (1, 1.0), (3, 0.3)]) == 3
    assert gpus_for([(4, 1 / 3), (2, 2 / 3)]) == 3
    assert gpus_for([(2, 2.0), (2, 0.5)]) == 5
    assert gpus_for([]) == 0


def test_more_workers_than_gpus_is_an_error_that_names_what_to_change() -> None:
    asked = config(prefill__device="cuda", decode__device="cuda", decode__replicas=2)
    with pytest.raises(DeviceUnavailable) as caught:
        on_devices(asked, 1)
    assert str(caught.value) == (
        "1 prefill, 2 decode on cuda need 3 GPUs, Ray's cluster has 1: set prefill.device and "
        "decode.device to cpu or auto, or lower replicas or gpus"
    )
    assert caught.value.exit_code == 2


def test_a_role_without_workers_needs_nothing() -> None:
    alone = config(
        colocated__replicas=1,
        colocated__device="cuda",
        prefill__device="cuda",
        prefill__replicas=0,
        decode__replicas=0,
    )
    assert on_devices(alone, 1).config.colocated.device == "cuda"


@pytest.mark.parametrize("gpus", [0, -1, 1.5])
def test_a_worker_takes_a_part_of_one_gpu(gpus: float) -> None:
    with pytest.raises(ConfigError, match=r"decode\.gpus"):
        config(decode__gpus=gpus)


def test_a_worker_hears_of_its_device_and_ray_of_its_gpus(tmp_path: Path) -> None:
    asked = config(decode__device="cuda", decode__gpus=0.25, transfer__staging_blocks=9)
    placed = on_devices(asked, 1).config
    sizes = BlockSizes({"prefill": 16, "decode": 16}, 16, ())
    prefill, decode = (
        worker_setting(placed, tmp_path, sizes, role, NodeRef(f"{role}-0", 1), Share(1, 0.5), KEY)
        for role in ("prefill", "decode")
    )
    assert prefill.key is decode.key is KEY
    assert (prefill.device, decode.device) == ("cpu", "cuda")
    assert (decode.role, decode.gpus, decode.staging_blocks) == ("decode", 0.25, 9)
    ground = OwnGround(placed, lambda: {"CPU": 1.0, "GPU": 1.0})
    ground.assign({"prefill-0": "prefill", "decode-0": "decode"}, pytest.fail)
    assert ground.worker_options(NodeRef("prefill-0", 1)) == {"num_cpus": 0}
    assert ground.worker_options(NodeRef("decode-0", 2)) == {"num_cpus": 0, "num_gpus": 0.25}


def test_all_workers_together_must_have_room_on_a_ray_of_one_s_own() -> None:
    """One that has none would wait in Ray for ever, and who ordered it, too."""
    placed = on_devices(config(decode__device="cuda", prefill__device="cpu"), 2).config
    ground = OwnGround(placed, lambda: {"CPU": 4.0, "GPU": 2.0})
    ground.assign({"prefill-0": "prefill", "decode-0": "decode"}, pytest.fail)
    with pytest.raises(NotPlaced, match=r"decode-1, decode-2 beside the 2 .* 3 GPU .* has 2 GPU"):
        ground.assign({"decode-1": "decode", "decode-2": "decode"}, pytest.fail)
    assert ground.names().keys() == {"prefill-0", "decode-0"}
    ground.assign({"decode-1": "decode", "decode-2": "decode"}, pytest.fail, going=["decode-0"])
    tenths = on_devices(config(decode__device="cuda", decode__gpus=0.1), 1).config
    ground = OwnGround(tenths, lambda: {"GPU": 1.0})
    ground.assign({f"decode-{at}": "decode" for at in range(10)}, pytest.fail)


def test_a_gpu_among_the_resources_stands_before_gpus_and_asks_for_one() -> None:
    asked = config(
        ray__address="auto",
        decode__resources={"GPU": 2.0, "mine": 1.0},
        prefill__resources={"GPU": 0.0},
    )
    decode = on_devices(asked, 2).config.decode
    assert (decode.device, gpus_of(decode)) == ("cuda", 1.0)
    assert reserved(decode) == {"GPU": 2.0, "mine": 1.0}
    assert on_devices(asked, 9).config.prefill.device == "cpu", "it would be shown none"
    with pytest.raises(DeviceUnavailable, match="need 2 GPUs"):
        on_devices(asked, 1)
    with pytest.raises(ConfigError, match=r"decode\.resources\.GPU: got 0"):
        config(decode__resources={"GPU": 0.0}, decode__device="cuda")


def test_where_more_gpus_may_come_a_worker_that_has_to_be_on_one_waits_for_it() -> None:
    asked = config(decode__device="cuda", decode__gpus=0.5)
    placed = on_devices(asked, 0, can_grow=True)
    assert (placed.config.prefill.device, placed.config.decode.device) == ("cpu", "cuda")
    assert reserved(placed.config.decode) == {"GPU": 0.5}
    assert reserved(placed.config.prefill) == {}
