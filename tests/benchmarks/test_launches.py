"""Both systems are started with the same model, types, cores and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.cores import one_per_core
from benchmarks.peers.install import POLL_VARIABLE
from benchmarks.peers.launches import (
    ARRANGEMENTS,
    COLOCATED,
    DISAGGREGATED,
    GNU,
    KVFERRY,
    VLLM,
    Case,
    PeerSettings,
    halves,
    kvferry_config,
    vllm_launch,
)
from benchmarks.peers.processes import Launch
from benchmarks.peers.systems import Setup, vllm_launches
from kvferry.cluster.config import Config, load_config

MODEL = Path("models", "m")
PEER = PeerSettings(Path("venv"))
SHELL = {"PATH": "shell", "HOME": "h", "PYTHONPATH": "p", "OMP_NUM_THREADS": "9", "VLLM_X": "1"}


def launch(settings: PeerSettings = PEER, **more: Any) -> Launch:
    return vllm_launch("vllm", MODEL, "float32", 8000, [0, 1], settings, SHELL, **more)


def flag(launch: Launch, name: str) -> str:
    return launch.command[list(launch.command).index(name) + 1]


def test_vllm_gets_the_model_the_type_and_no_prefix_cache() -> None:
    found = launch()
    assert list(found.command[:3]) == ["venv/bin/vllm", "serve", "models/m"]
    assert flag(found, "--dtype") == "float32"
    assert flag(found, "--port") == "8000"
    assert "--no-enable-prefix-caching" in found.command
    assert "--kv-transfer-config" not in found.command


def test_vllm_binds_a_thread_to_each_core() -> None:
    assert launch().settings["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"


def test_vllm_gets_nothing_of_the_callers_python_and_threads() -> None:
    environment = launch().environment
    assert environment["HOME"] == "h"
    assert environment["PATH"] == "venv/bin:shell"
    assert not {"PYTHONPATH", "OMP_NUM_THREADS", "VLLM_X"} & set(environment)


@pytest.mark.parametrize(
    ("settings", "preloaded"),
    [
        (PEER, "venv/lib/libiomp5.so"),
        (PeerSettings(Path("venv"), tcmalloc="t.so"), "t.so:venv/lib/libiomp5.so"),
        (PeerSettings(Path("venv"), openmp=GNU, tcmalloc="t.so"), "t.so"),
        (PeerSettings(Path("venv"), openmp=GNU), ""),
    ],
)
def test_vllm_gets_the_libraries_that_were_asked_for(
    settings: PeerSettings, preloaded: str
) -> None:
    assert launch(settings).environment["LD_PRELOAD"] == preloaded


def test_what_the_caller_adds_stands_above_all() -> None:
    settings = PeerSettings(
        Path("venv"), more_environment={"LD_PRELOAD": "x"}, more_arguments=["--block-size=32"]
    )
    found = launch(settings)
    assert found.environment["LD_PRELOAD"] == "x"
    assert found.command[-1] == "--block-size=32"


def test_vllm_disaggregated_is_two_servers_and_a_proxy() -> None:
    setup = Setup(MODEL, [4, 6], PEER)
    launches = vllm_launches(Case(DISAGGREGATED, "float32"), setup, [1, 2, 3, 4, 5])
    (prefill, at), (decode, and_at), (proxy, before) = launches
    assert (at, and_at, before) == (1, 2, 5)
    roles = [json.loads(flag(each, "--kv-transfer-config")) for each in (prefill, decode)]
    assert [role["kv_role"] for role in roles] == ["kv_producer", "kv_consumer"]
    assert {role["kv_connector"] for role in roles} == {"NixlConnector"}
    for each, core, side in ((prefill, "4", "3"), (decode, "6", "4")):
        assert each.settings["VLLM_CPU_OMP_THREADS_BIND"] == core
        assert each.settings["VLLM_NIXL_SIDE_CHANNEL_PORT"] == side
        assert each.settings[POLL_VARIABLE] == "1000"
    assert list(proxy.command[-3:]) == ["5", "http://127.0.0.1:1", "http://127.0.0.1:2"]


def test_vllm_colocated_is_one_server_on_all_cores() -> None:
    setup = Setup(MODEL, [4, 6], PEER)
    ((found, port),) = vllm_launches(Case(COLOCATED, "int8"), setup, [1, 2, 3, 4, 5])
    assert port == 1
    assert found.settings["VLLM_CPU_OMP_THREADS_BIND"] == "4,6"
    assert flag(found, "--dtype") == "bfloat16"


def test_the_types_are_equal_but_beside_int8() -> None:
    assert Case(COLOCATED, "float32").dtype_of(VLLM) == "float32"
    assert Case(COLOCATED, "bfloat16").dtype_of(VLLM) == "bfloat16"
    assert Case(COLOCATED, "int8").dtype_of(VLLM) == "bfloat16"
    assert Case(COLOCATED, "int8").dtype_of(KVFERRY) == "int8"


def loaded(case: Case, tmp_path: Path) -> Config:
    """The configuration as ``kvferry serve`` reads it."""
    file = tmp_path / "kvferry.yaml"
    file.write_text(json.dumps(kvferry_config(case, tmp_path, [4, 6, 7])), encoding="utf-8")
    return load_config(str(file), {})


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_kvferry_takes_its_configuration(arrangement: str, tmp_path: Path) -> None:
    config = loaded(Case(arrangement, "bfloat16"), tmp_path)
    roles = (config.prefill, config.decode, config.colocated)
    threads = [role.threads if role.replicas else 0 for role in roles]
    assert threads == ([0, 0, 3] if arrangement == COLOCATED else [2, 1, 0])
    assert config.model.dtype == "bfloat16"
    assert config.server.grpc == "127.0.0.1:0"


def test_halves_are_all_cores_and_none_twice() -> None:
    assert halves([0, 1]) == ([0], [1])
    assert halves([0, 1, 2]) == ([0, 1], [2])


def test_of_two_threads_of_a_core_one_is_used() -> None:
    siblings = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 6: "6"}
    assert one_per_core(sorted(siblings), siblings.__getitem__) == [0, 1, 6]
