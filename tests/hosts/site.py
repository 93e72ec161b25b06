"""Three machines as a Ray cluster: ``ray up`` with provider local, and what is run on the head.

The machines differ in what they offer: the head takes prefill, ``one`` both, ``two`` decode.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import yaml

from kvferry.engine.weights.store import default_cache_dir
from tests.hosts.machines import REPOSITORY, Lan, Machine

NAMES = ("head", "one", "two")
OFFERS = {
    "head": {"kvferry_prefill": 1},
    "one": {"kvferry_prefill": 1, "kvferry_decode": 1},
    "two": {"kvferry_decode": 1},
}
RAY_PORT = 6379
CONFIG: dict[str, Any] = {
    "model": {"max_model_len": 512},
    "cache": {"num_blocks": 256},
    "scheduler": {"max_num_batched_tokens": 96, "chunk_tokens": 64},
    "prefill": {"threads": 1, "resources": {"kvferry_prefill": 1}},
    "decode": {"threads": 1, "resources": {"kvferry_decode": 1}},
    # The machines share their processors, and here that cannot be seen: /sys is the host's.
    "ray": {"address": f"10.77.0.1:{RAY_PORT}", "pin_cores": False},
}


class Site:
    """A context manager: the machines are there; Ray is started by ``up``."""

    def __init__(self) -> None:
        self.cache = default_cache_dir(os.environ)
        keep = [REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), self.cache]
        python = Path(sys.executable).parent
        self.environment = {
            "PATH": f"{python}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(REPOSITORY),
            "KVFERRY_CACHE_DIR": str(self.cache),
            "HF_HUB_OFFLINE": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_UP_enable_autoscaler_v2": "0",  # version 2 starts one of two local workers
            "LANG": "C.UTF-8",
            "TERM": "dumb",
        }
        self.lan = Lan(NAMES, keep, self.environment)

    def __enter__(self) -> Self:
        self.lan.__enter__()
        token = secrets.token_hex(32)
        lines = [f"export {name}='{value}'" for name, value in self.environment.items()]
        for machine in [*self.lan.machines.values(), self.operator]:
            (machine.home / ".ray").mkdir()
            (machine.home / ".ray" / "auth_token").write_text(token)
            offer = json.dumps(OFFERS.get(machine.name, {}))
            own = [*lines, f"export KVFERRY_OFFERS='{offer}'"]
            for name in (".bashrc", ".bash_profile"):
                (machine.home / name).write_text("\n".join(own) + "\n")
        self.cluster_file.write_text(yaml.safe_dump(self.cluster_config()))
        self.config_file.write_text(yaml.safe_dump(CONFIG))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.lan.__exit__(*exc_info)

    @property
    def head(self) -> Machine:
        return self.lan.machines["head"]

    @property
    def operator(self) -> Machine:
        """Where the operator sits, who is part of no cluster."""
        assert self.lan.switch is not None
        return self.lan.switch

    @property
    def cluster_file(self) -> Path:
        return self.lan.folder / "cluster.yaml"

    @property
    def config_file(self) -> Path:
        return self.lan.folder / "kvferry.yaml"

    def cluster_config(self) -> dict[str, Any]:
        """What ``ray up`` reads. No ``ray stop``: nothing ran there before."""
        start = "ray start --num-cpus=2 --object-store-memory=80000000 --disable-usage-stats"
        start += ' --resources="$KVFERRY_OFFERS"'
        return {
            "cluster_name": "kvferry-hosts",
            "provider": {
                "type": "local",
                "head_ip": self.head.address,
                "worker_ips": [self.lan.machines[name].address for name in NAMES[1:]],
            },
            "auth": {"ssh_user": "root", "ssh_private_key": str(self.lan.folder / "key")},
            "min_workers": 2,
            "max_workers": 2,
            "idle_timeout_minutes": 60,
            "head_start_ray_commands": [
                f"{start} --head --port={RAY_PORT} --node-ip-address={self.head.address} "
                "--include-dashboard=false --autoscaling-config=~/ray_bootstrap_config.yaml"
            ],
            "worker_start_ray_commands": [f"{start} --address=$RAY_HEAD_IP:{RAY_PORT}"],
        }

    def start_ray(self) -> None:
        """Ray on every machine, as ``ray up`` would start it, but without it."""
        config = self.cluster_config()
        (head,) = config["head_start_ray_commands"]
        (worker,) = config["worker_start_ray_commands"]
        alone = head.replace("--autoscaling-config=~/ray_bootstrap_config.yaml", "")
        self.head.run("bash", "--login", "-c", alone)
        command = f"export RAY_HEAD_IP={self.head.address}; {worker}"
        with ThreadPoolExecutor() as threads:
            machines = [self.lan.machines[name] for name in NAMES[1:]]
            list(threads.map(lambda each: each.run("bash", "--login", "-c", command), machines))

    def up(self) -> None:
        """``ray up``, from the operator's place."""
        self.operator.run("ray", "up", "-y", "--no-config-cache", str(self.cluster_file))

    def down(self) -> None:
        """``ray down``, likewise."""
        self.operator.run("ray", "down", "-y", str(self.cluster_file))

    def kvferry(self, *arguments: str, within_s: float = 300.0) -> str:
        """A command on the head; its standard output."""
        words = (sys.executable, "-m", "kvferry.cluster.cli", *arguments)
        return self.head.run(*words, within_s=within_s)

    def kvferry_json(self, *arguments: str) -> dict[str, Any]:
        """The document of a command on the head."""
        document: dict[str, Any] = json.loads(self.kvferry(*arguments, "--json"))
        return document

    def streams(self, out: Path, streams: int, tokens: int) -> subprocess.Popen[bytes]:
        """Streams from the head, on their way."""
        words = [sys.executable, "-m", "tests.hosts.streams", str(out)]
        words += ["--streams", str(streams), "--tokens", str(tokens)]
        return self.head.start(words, out.with_suffix(".log"))
