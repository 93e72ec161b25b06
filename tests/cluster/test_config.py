"""The configuration is checked whole before anything starts, and no key is silently ignored."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvferry.cluster.block_sizes import choose_block_sizes
from kvferry.cluster.config import (
    Config,
    ConfigError,
    Replicas,
    _known_keys,
    load_config,
    parse_duration,
    parse_size,
)
from kvferry.cluster.router_actor import RouterEndpoints
from kvferry.cluster.settings import Share, router_settings, worker_setting
from kvferry.kv_cache.errors import KVFerryError
from kvferry.kv_transfer.faults import FaultPlan
from kvferry.worker.cluster_key import ClusterKey
from kvferry.worker.messages import NodeRef

KEY = ClusterKey(bytes(32))


def load_text(tmp_path: Path, text: str, overrides: dict[str, Any] | None = None) -> Config:
    file = tmp_path / "kvferry.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, overrides)


def refusal(overrides: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return str(caught.value)


def test_defaults_are_the_documented_ones() -> None:
    config = load_config()
    assert config.cache.block_size == 16
    assert config.scheduler.max_num_seqs == 32
    assert config.scheduler.max_num_batched_tokens == 288
    assert config.scheduler.chunk_tokens == 256
    assert config.scheduler.watermark == 0.01
    assert (config.transfer.list_period, config.transfer.stall_limit) == (1.0, 30.0)
    assert (config.transfer.heartbeat, config.router.heartbeat_timeout) == (0.5, 1.5)
    assert (config.router.worker_wait, config.router.max_attempts) == (30.0, 3)
    assert (config.router.prefill_window, config.router.queue_limit) == (2048, 1024)
    assert config.server.grpc == "127.0.0.1:50051"


def test_file_is_read_and_overrides_stand_before_it(tmp_path: Path) -> None:
    text = "cache: {block_size: 32, memory: 512MiB}\nrouter: {worker_wait: 500ms}\nprefill:\n"
    config = load_text(tmp_path, text, {"cache.block_size": 8, "router.worker_wait": None})
    assert config.cache.block_size == 8
    assert config.cache.memory == 512 * 2**20
    assert config.router.worker_wait == 0.5


def test_override_of_one_alternative_takes_back_the_other(tmp_path: Path) -> None:
    config = load_text(tmp_path, "model: {path: /models/a}\n", {"model.name": "b"})
    assert (config.model.name, config.model.path) == ("b", None)
    config = load_text(tmp_path, "cache: {memory: 1GiB}\n", {"cache.num_blocks": 64})
    assert (config.cache.num_blocks, config.cache.memory) == (64, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cache: {blok_size: 16}", "cache.blok_size: unknown key; did you mean cache.block_size?"),
        ("schduler: {}", "schduler: unknown key; did you mean scheduler?"),
        ("block_size: 8", "block_size: unknown key; did you mean cache.block_size?"),
        ("transfer: {faults: {corupt: 1}}", "did you mean transfer.faults.corrupt?"),
        ("debug: {xyz: 1}", "debug.xyz: unknown key; debug has audit_every_step, kernels, isa"),
    ],
)
def test_unknown_key_names_its_path_and_the_nearest(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    assert message in str(caught.value)
    assert "kvferry.yaml" in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        "slo.ttft",
        "tenants.a.weight",
        "cache.hash_seed",
        "router.replicas",
    ],
)
def test_keys_of_later_versions_are_refused_by_name(key: str) -> None:
    message = refusal({key: "1"})
    assert "not supported yet in this version" in message
    assert key.removesuffix(".ttft") in message


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("transfer.connector", "nixl", "auto or shm or tcp"),
        ("router.policy", "cost", "least_loaded"),
    ],
)
def test_values_of_later_versions_are_refused_by_name(key: str, value: str, instead: str) -> None:
    assert refusal({key: value}).endswith(
        f"{key}: {value!r} is not supported yet in this version; use {instead}"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cache.block_size", 0),
        ("cache.block_size", "16"),
        ("cache.block_size", True),
        ("cache.block_size", 1025),
        ("cache.block_size", "Auto"),
        ("decode.block_size", 0),
        ("decode.block_size", 8.0),
        ("prefill.block_size", "auto16"),
        ("cache.kv_dtype", "int4"),
        ("cache.memory", True),
        ("cache.memory", "1.5B"),
        ("scheduler.watermark", 1.0),
        ("scheduler.watermark", float("nan")),
        ("transfer.list_period", "1 fortnight"),
        ("transfer.list_period", -1),
        ("transfer.faults.corrupt", 1.5),
        ("router.worker_wait", float("inf")),
        ("router.max_attempts", 0),
        ("server.grpc", "50051"),
        ("server.grpc", "127.0.0.1:99999"),
        ("ray.object_store_memory", "1MiB"),
        ("logging.level", "loud"),
        ("prefill.replicas", -1),
        ("debug.audit_every_step", 1),
        ("debug.kernels", "cuda"),
        ("debug.isa", "mmx"),
        ("prefill", 3),
    ],
)
def test_wrong_value_is_named_with_its_key(key: str, value: object) -> None:
    assert f"{key}: got {value!r}: " in refusal({key: value})


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"cache.num_blocks": 8, "cache.memory": "1GiB"}, "cache.memory"),
        ({"scheduler.max_num_batched_tokens": 16, "scheduler.chunk_tokens": 8}, "max_num_seqs"),
        ({"scheduler.chunk_tokens": 289}, "scheduler.max_num_batched_tokens = 288"),
        ({"router.heartbeat_timeout": "900ms"}, "transfer.heartbeat = 0.5 s"),
        ({"transfer.stall_limit": "1s"}, "transfer.list_period = 1 s"),
        ({"debug.kernels": "reference", "debug.isa": "avx2"}, "debug.isa: got avx2"),
        ({"prefill.replicas": 0}, "0 prefill, 1 decode"),
        ({"decode.replicas": 0}, "1 prefill, 0 decode"),
    ],
)
def test_values_that_contradict_each_other_are_named(overrides: dict[str, Any], named: str) -> None:
    assert named in refusal(overrides)


def test_all_wrong_values_are_named_at_once() -> None:
    message = refusal({"cache.block_size": 0, "router.max_attempts": 0})
    assert "cache.block_size" in message
    assert "router.max_attempts" in message


@pytest.mark.parametrize(
    ("given_counts", "expected"),
    [
        ({}, Replicas(1, 1, 0)),
        ({"prefill": 2}, Replicas(2, 1, 0)),
        ({"colocated": 2}, Replicas(0, 0, 2)),
        ({"colocated": 1, "prefill": 1}, Replicas(1, 0, 1)),
        ({"colocated": 0}, Replicas(1, 1, 0)),
    ],
)
def test_replicas_not_given_are_one_prefill_and_one_decode(
    given_counts: dict[str, int], expected: Replicas
) -> None:
    overrides = {f"{role}.replicas": count for role, count in given_counts.items()}
    assert load_config(None, overrides).replicas() == expected


def test_durations_are_seconds_and_sizes_are_bytes() -> None:
    assert [parse_duration(v) for v in ("1s", "500ms", "2m", 3, 0.25)] == [1, 0.5, 120, 3, 0.25]
    assert [parse_size(v) for v in ("512MiB", "1GB", "1.5kB", 7)] == [512 * 2**20, 10**9, 1500, 7]


@given(st.integers(0, 10**9))
def test_quantities_read_back_what_was_written(number: int) -> None:
    assert parse_duration(f"{number}ms") == pytest.approx(number / 1000)
    assert parse_size(f"{number} MiB") == number * 2**20


@pytest.mark.parametrize(
    "text", ["a: [", "- 1\n", "cache: {block_size: 1, block_size: 2}", "cache: !!python/name:os.x"]
)
def test_file_that_is_no_plain_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"kvferry\.yaml"):
        load_text(tmp_path, text)


def test_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        load_config(tmp_path / "absent.yaml")


def test_config_error_is_ours_and_ends_with_exit_code_2() -> None:
    assert issubclass(ConfigError, KVFerryError)
    assert ConfigError.exit_code == 2


def test_fault_settings_are_those_that_the_transfer_injects() -> None:
    config = load_config(None, {"transfer.faults.corrupt": 0.5, "transfer.faults.delay": "5ms"})
    plan = FaultPlan(**config.transfer.faults.model_dump())
    assert (plan.corrupt, plan.delay) == (0.5, 0.005)


def test_config_is_frozen() -> None:
    with pytest.raises(ValidationError):
        load_config().cache.block_size = 8


def test_configuration_loads_neither_torch_nor_ray_nor_grpc() -> None:
    code = (
        "import sys, kvferry.cluster.config\n"
        "print([name for name in ('torch', 'ray', 'grpc', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        ({}, {"prefill": 16, "decode": 16}),
        ({"cache.block_size": 128}, {"prefill": 128, "decode": 128}),
        ({"prefill.block_size": 1, "decode.block_size": 64}, {"prefill": 1, "decode": 64}),
        (
            {"cache.block_size": 8, "decode.block_size": "auto", "colocated.replicas": 1},
            {"colocated": 8},
        ),
        ({"cache.block_size": "auto", "decode.block_size": 4}, {"prefill": "auto", "decode": 4}),
    ],
)
def test_a_role_s_block_size_stands_before_that_of_all(
    overrides: dict[str, Any], sizes: dict[str, int | str]
) -> None:
    assert load_config(None, overrides).block_sizes() == sizes


def test_a_refused_block_size_is_named_once_with_what_is_wanted() -> None:
    message = refusal({"prefill.block_size": 0})
    assert message == (
        "configuration: prefill.block_size: got 0: wanted 1 to 1024 token positions, or auto"
    )


def test_a_match_unit_that_does_not_divide_a_block_size_is_refused_with_both() -> None:
    sizes = {"cache.block_size": 32, "decode.block_size": 4}
    message = refusal({"cache.prefix_match_unit": 8, **sizes})
    assert "cache.prefix_match_unit: got 8" in message and "(decode 4)" in message
    assert load_config(None, {"cache.prefix_match_unit": 2, **sizes}).cache.prefix_match_unit == 2


def test_every_key_is_in_the_documentation_and_nothing_else_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    table = page.partition("## Environment")[0]
    named: set[str] = set()
    for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        section = ""
        for name in re.findall(r"`([^`]+)`", cell):
            key = section + name if name.startswith(".") else name
            section = section or key.rpartition(".")[0]
            named.add(key)
    declared = {key for key in _known_keys(Config) if not _is_section(key)}
    assert named == declared


def _is_section(key: str) -> bool:
    return any(other.startswith(f"{key}.") for other in _known_keys(Config))


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"disk_path": "kv"}, "one is given without the other"),
        ({"memory": "1MiB", "disk_size": "1GB"}, "one is given without the other"),
        ({"disk_path": "kv", "disk_size": "1GB"}, "without cache.host_tier.memory"),
        ({"memory": 0}, "cache.host_tier.memory"),
    ],
)
def test_a_host_tier_that_makes_no_sense_is_refused(given: dict[str, Any], wrong: str) -> None:
    assert wrong in refusal({f"cache.host_tier.{key}": value for key, value in given.items()})


def test_workers_get_the_host_tier_and_router_and_workers_the_ageing() -> None:
    tier = {"cache.host_tier.memory": "1MiB"}
    tier |= {"cache.host_tier.disk_path": "kv", "cache.host_tier.disk_size": "1GB"}
    config = load_config(overrides={**tier, "scheduler.policy": "priority", "scheduler.ageing": 3})
    sizes = choose_block_sizes(config, Path("m"), "float32")
    for role in sizes.by_role:
        ref = NodeRef(f"{role}-0", 1)
        settings = worker_setting(config, Path("m"), sizes, role, ref, Share(1, 0.5), KEY)
        assert (settings.host_bytes, settings.disk_path) == (1 << 20, "kv")
        assert settings.disk_bytes == 10**9
        assert settings.scheduler.ageing == 3.0
        assert settings.key is KEY
    ref = NodeRef("router-0", 1)
    assert router_settings(config, Path("m"), ref, RouterEndpoints(""), KEY).config.ageing == 3.0
    plain = load_config()
    assert router_settings(plain, Path("m"), ref, RouterEndpoints(""), KEY).config.ageing is None
    setting = worker_setting(plain, Path("m"), sizes, "decode", ref, Share(1, 1.0), KEY)
    assert setting.host_bytes == 0


def test_the_http_door_has_an_address_of_its_own_or_there_is_none() -> None:
    assert load_config().server.http is None
    config = load_config(None, {"server.http": "127.0.0.1:8000"})
    assert config.server.http == "127.0.0.1:8000"
    message = refusal({"server.http": "127.0.0.1:50051"})
    assert "server.http: got 127.0.0.1:50051, which is server.grpc's" in message
    both = load_config(None, {"server.http": "127.0.0.1:0", "server.grpc": "127.0.0.1:0"})
    assert both.server.http == both.server.grpc
