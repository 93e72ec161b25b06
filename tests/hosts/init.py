"""Process 1 of a machine: mounts, sshd, reaping; ``python init.py SPEC``, run by ``unshare``.

Stands by itself, so that it starts fast: imports nothing of the project. SPEC is a JSON file.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def mount(*arguments: str, keep: Sequence[int] = ()) -> None:
    subprocess.run(["mount", *arguments], check=True, pass_fds=keep)


def private_mounts(spec: dict[str, Any], keep: list[str]) -> None:
    """A /tmp, /dev/shm, /run, home and hosts file of its own; ``keep`` stays visible below them."""
    home = os.path.expanduser("~")
    mount("--make-rprivate", "/")
    handles = {path: os.open(path, os.O_PATH) for path in keep}
    mount("-t", "tmpfs", "-o", "size=2g", "tmpfs", "/tmp")
    show(handles, "/tmp")
    mount("--bind", spec["home"], home)
    show(handles, home)
    mount("-t", "tmpfs", "-o", "size=512m", "tmpfs", "/dev/shm")
    mount("-t", "tmpfs", "tmpfs", "/run")
    Path("/run/sshd").mkdir(mode=0o755)
    mount("--bind", spec["hosts"], "/etc/hosts")


def show(handles: dict[str, int], hidden: str) -> None:
    """Bind what lies below a folder that has just been hidden. By its handle, not by its name."""
    for path, handle in handles.items():
        if Path(path).is_relative_to(hidden):
            Path(path).mkdir(parents=True, exist_ok=True)
            source = f"/proc/self/fd/{handle}"
            mount("--no-canonicalize", "--bind", source, path, keep=[handle])


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        spec = json.load(file)
    socket.sethostname(spec["name"])
    private_mounts(spec, spec["keep"])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    if spec["sshd_config"]:
        os.umask(0o022)
        subprocess.run(["/usr/sbin/sshd", "-f", spec["sshd_config"]], check=True)
    Path(spec["ready"]).write_text("ready", encoding="utf-8")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:  # whoever loses its parent here is ours
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            signal.sigtimedwait([signal.SIGCHLD], 1.0)


if __name__ == "__main__":
    main()
