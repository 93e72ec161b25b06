"""What is started for each arrangement: commands, environments and configurations. Pure.

An arrangement is ``colocated``, one server with all threads, or ``disaggregated``, one prefill and
one decode server with half of them each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.install import POLL_VARIABLE
from benchmarks.peers.processes import Launch

COLOCATED, DISAGGREGATED = "colocated", "disaggregated"
ARRANGEMENTS = (COLOCATED, DISAGGREGATED)
DTYPES = ("float32", "bfloat16", "int8")
KVFERRY, VLLM = "kvferry", "vllm"
SYSTEMS = (VLLM, KVFERRY)

MAX_MODEL_LEN = 2048
KV_CACHE_GIB = 2  # of each server
HOST = "127.0.0.1"
INTEL, GNU = "intel", "gnu"

# Variables that begin so are about the caller's programs, not about vLLM's.
_NOT_PASSED_ON = ("PYTHON", "OMP_", "KMP_", "GOMP_", "VLLM_", "KVFERRY_", "LD_PRELOAD")


@dataclass(frozen=True, slots=True)
class Case:
    """What is compared: an arrangement and KVFerry's type of weights."""

    arrangement: str
    dtype: str

    @property
    def peer_dtype(self) -> str:
        """The peer's: the same, but bfloat16 beside int8, for which it needs another checkpoint."""
        return "bfloat16" if self.dtype == "int8" else self.dtype

    def dtype_of(self, system: str) -> str:
        """Of either."""
        return self.dtype if system == KVFERRY else self.peer_dtype


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """How vLLM is run.

    Attributes:
        environment_folder: its virtual environment.
        openmp: ``intel``, whose library its manual recommends and its package brings, or ``gnu``.
        tcmalloc: name of that library, to be loaded before all others; None without it.
        nixl_poll_us: delay of NIXL's progress thread; 0 is as delivered.
        more_environment, more_arguments: stand after, and above, all that is set here.
    """

    environment_folder: Path
    openmp: str = INTEL
    tcmalloc: str | None = None
    nixl_poll_us: int = 1000
    more_environment: Mapping[str, str] = field(default_factory=dict)
    more_arguments: Sequence[str] = ()

    @property
    def python(self) -> Path:
        """Of its virtual environment."""
        return self.environment_folder / "bin" / "python"


def halves(cores: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Cores of prefill and of decode; the odd one is prefill's."""
    middle = (len(cores) + 1) // 2
    return cores[:middle], cores[middle:]


def vllm_launch(
    name: str,
    model: Path,
    dtype: str,
    port: int,
    cores: Sequence[int],
    settings: PeerSettings,
    inherited: Mapping[str, str],
    *,
    kv_role: str | None = None,
    side_channel_port: int = 0,
) -> Launch:
    """One vLLM server on ``port``, with an OpenMP thread bound to each of ``cores``.

    With a ``kv_role`` its KV goes through NIXL.
    """
    command = [
        str(settings.environment_folder / "bin" / "vllm"),
        *("serve", str(model), "--served-model-name", served_name(model)),
        *("--host", HOST, "--port", str(port), "--dtype", dtype),
        *("--max-model-len", str(MAX_MODEL_LEN), "--generation-config", "vllm"),
        *("--no-enable-prefix-caching", "--disable-uvicorn-access-log", "--disable-log-stats"),
    ]
    own = _vllm_variables(settings, inherited)
    own["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores)
    if kv_role is not None:
        transfer = {"kv_connector": "NixlConnector", "kv_role": kv_role, "kv_buffer_device": "cpu"}
        command += ["--kv-transfer-config", json.dumps(transfer)]
        own["VLLM_NIXL_SIDE_CHANNEL_HOST"] = HOST
        own["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channel_port)
        own[POLL_VARIABLE] = str(settings.nixl_poll_us)
    own.update(settings.more_environment)
    kept = {name: value for name, value in inherited.items() if not name.startswith(_NOT_PASSED_ON)}
    return Launch(name, [*command, *settings.more_arguments], own, kept)


def served_name(model: Path) -> str:
    """The model's name to vLLM's clients."""
    return model.name


def _vllm_variables(settings: PeerSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    folder = settings.environment_folder
    preloaded = [settings.tcmalloc] if settings.tcmalloc else []
    if settings.openmp == INTEL:
        preloaded.append(str(folder / "lib" / "libiomp5.so"))
    return {
        "PATH": f"{folder / 'bin'}:{inherited.get('PATH', '')}",
        "LD_PRELOAD": ":".join(preloaded),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        # What it compiles is kept, and found again by the next start.
        "VLLM_CACHE_ROOT": str(folder / "cache" / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache" / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def proxy_launch(
    root: Path,
    port: int,
    prefill_port: int,
    decode_port: int,
    settings: PeerSettings,
    inherited: Mapping[str, str],
) -> Launch:
    """The proxy in front of two vLLM servers; ``root`` is the repository."""
    urls = [f"http://{HOST}:{each}" for each in (prefill_port, decode_port)]
    command = [str(settings.python), "-m", "benchmarks.peers.proxy", str(port), *urls]
    return Launch("vllm-proxy", command, {"PYTHONPATH": str(root)}, inherited)


def kvferry_launch(
    python: str, config_file: Path, ready_file: Path, inherited: Mapping[str, str]
) -> Launch:
    """``kvferry serve`` with a configuration file."""
    command = [python, "-m", "kvferry.cluster.cli", "serve"]
    command += ["--config", str(config_file), "--ready-file", str(ready_file)]
    return Launch("kvferry", command, {"RAY_USAGE_STATS_ENABLED": "0"}, inherited)


def kvferry_config(case: Case, model: Path, cores: Sequence[int]) -> dict[str, Any]:
    """The configuration of ``kvferry serve``, on a free port; everything else is as delivered."""
    prefill, decode = halves(cores)
    none: dict[str, int] = {"replicas": 0}
    roles = (
        {"colocated": {"replicas": 1, "threads": len(cores)}, "prefill": none, "decode": none}
        if case.arrangement == COLOCATED
        else {
            "prefill": {"replicas": 1, "threads": len(prefill)},
            "decode": {"replicas": 1, "threads": len(decode)},
        }
    )
    return {
        "model": {"path": str(model), "dtype": case.dtype, "max_model_len": MAX_MODEL_LEN},
        "cache": {"memory": f"{KV_CACHE_GIB}GiB", "prefix_caching": False},
        "server": {"grpc": f"{HOST}:0"},
        **roles,
    }
