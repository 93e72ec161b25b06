"""Machines and the switch between them, made of namespaces; gone with the processes that hold them.

A machine has its own network, mounts, processes, hostname and shared memory; processors, memory
and the files outside /tmp, /run, /dev/shm and home are the host's. The switch is a namespace too,
so that nothing is added to the host's own network. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

REPOSITORY = Path(__file__).parents[2]
INIT = Path(__file__).with_name("init.py")
NETWORK = "10.77.0"
SWITCH_HOST = 254
START_S = 30.0
POLL_S = 0.02
TOOLS = ("setpriv", "unshare", "nsenter", "ip", "mount", "ssh", "ssh-keygen")


def why_not() -> str | None:
    """Why there can be no machines here; None if there can."""
    if os.geteuid() != 0:
        return "machines of namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if not Path("/usr/sbin/sshd").exists():
        missing.append("sshd")
    if missing:
        return f"not installed: {', '.join(missing)}"
    probe = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--mount-proc", "--fork"]
    tried = "mount -t tmpfs tmpfs /mnt && ip link add br0 type bridge && ip link add v0 type veth"
    done = subprocess.run(
        [*probe, "sh", "-c", tried], capture_output=True, text=True, check=False, timeout=START_S
    )
    return None if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()}"


class Machine:
    """One of them, running. ``address`` is how the others reach it."""

    def __init__(self, lan: Lan, number: int, name: str, with_sshd: bool) -> None:
        self.name = name
        self.number = number
        self.address = f"{NETWORK}.{number}"
        self.home = lan.folder / name
        self.home.mkdir()
        self._lan = lan
        self._num_runs = 0
        spec = lan.folder / f"{name}.json"
        ready = lan.folder / f"{name}.ready"
        sshd = self._sshd_config() if with_sshd else ""
        spec.write_text(
            json.dumps(
                {
                    "name": name,
                    "home": str(self.home),
                    "hosts": str(lan.hosts_file),
                    "sshd_config": str(sshd),
                    "ready": str(ready),
                    "keep": [str(path) for path in lan.keep],
                }
            ),
            encoding="utf-8",
        )
        flags = ("--net", "--mount", "--uts", "--ipc", "--pid", "--mount-proc", "--fork")
        self._log = (lan.folder / f"{name}.log").open("wb")
        self._holder = subprocess.Popen(
            [
                "setpriv",
                "--pdeathsig",
                "KILL",
                "unshare",
                *flags,
                "--kill-child",
                sys.executable,
                str(INIT),
                str(spec),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_S
        while not ready.exists():
            told = (lan.folder / f"{name}.log").read_text(errors="replace")
            assert self._holder.poll() is None, told
            assert time.monotonic() < deadline, told
            time.sleep(POLL_S)
        (self.init,) = psutil.Process(self._holder.pid).children()

    def _sshd_config(self) -> Path:
        """An sshd that lets the lan's key in as root, and nobody else."""
        folder = self._lan.folder
        host_key = folder / f"{self.name}.hostkey"
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host_key)], check=True
        )
        path = folder / f"{self.name}.sshd"
        path.write_text(
            f"Port 22\nHostKey {host_key}\nAuthorizedKeysFile {folder}/key.pub\n"
            "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
            "PidFile none\nAcceptEnv *\nMaxSessions 100\nMaxStartups 100\n"
            "Subsystem sftp internal-sftp\n",
            encoding="utf-8",
        )
        return path

    def enter(self, *, net_only: bool = False) -> list[str]:
        """The words before a command for it to run here."""
        kinds = ["--net"] if net_only else ["--net", "--mount", "--uts", "--ipc", "--pid"]
        return ["nsenter", "--target", str(self.init.pid), *kinds, "--"]

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """That of a login here."""
        return {**self._lan.environment, "HOME": os.path.expanduser("~"), **(more or {})}

    def start(
        self, command: Sequence[str], log: Path, more: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command; its output goes to a file."""
        with log.open("wb") as out:
            return subprocess.Popen(
                [*self.enter(), *command],
                cwd=REPOSITORY,
                env=self.environment(more),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def run(self, *command: str, within_s: float = 120.0) -> str:
        """Run a command to its end, which must be a good one; its standard output.

        Output goes to files, so that it can be read while the command runs.
        """
        self._num_runs += 1
        base = self._lan.folder / f"{self.name}-{self._num_runs}"
        out, err = base.with_suffix(".out"), base.with_suffix(".err")
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = subprocess.Popen(
                [*self.enter(), *command],
                cwd=REPOSITORY,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
            )
            try:
                code = process.wait(within_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = -1
        said = f"{out.read_text(errors='replace')}\n{err.read_text(errors='replace')}"
        assert code == 0, f"{self.name}: {' '.join(command)} ended with {code}:\n{said}"
        return out.read_text(errors="replace")

    def attached(self, command: Sequence[str]) -> int:
        """Run a command in the repository's folder, with our output; its exit code."""
        return subprocess.run(
            [*self.enter(), "env", f"--chdir={REPOSITORY}", *command],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            check=False,
        ).returncode

    def processes(self) -> list[psutil.Process]:
        """All that run here, but init and its sshd."""
        own = os.readlink(f"/proc/{self.init.pid}/ns/pid")
        found = []
        for process in psutil.process_iter(["pid", "name", "status"]):
            with contextlib.suppress(OSError, psutil.Error):
                inside = os.readlink(f"/proc/{process.pid}/ns/pid") == own
                ended = process.info["status"] == psutil.STATUS_ZOMBIE
                if inside and not ended and process.pid != self.init.pid:
                    found.append(process)
        return [each for each in found if each.info["name"] != "sshd"]

    def cut(self) -> None:
        """Pull the plug out of the switch."""
        self._lan.switch_ip("link", "set", f"port{self.number}", "down")

    def mend(self) -> None:
        """Put it back."""
        self._lan.switch_ip("link", "set", f"port{self.number}", "up")

    def switch_off(self) -> None:
        """Every process here ends at once, and the network with them."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.init.send_signal(signal.SIGKILL)
        self._holder.wait(START_S)
        self._log.close()


class Lan:
    """A switch and machines on it; a context manager that leaves nothing.

    Args:
        names: of the machines; the first is number 1.
        keep: paths that machines are to see even where they lie below /tmp.
        environment: of a login on any of them.
    """

    def __init__(
        self, names: Sequence[str], keep: Sequence[Path], environment: Mapping[str, str]
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvf-hosts-"))
        self.keep = [self.folder, *keep]
        self.environment = dict(environment)
        self.hosts_file = self.folder / "hosts"
        self._names = names
        self.machines: dict[str, Machine] = {}
        self.switch: Machine | None = None

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        names = [f"{NETWORK}.{at} {name}" for at, name in enumerate(self._names, 1)]
        self.hosts_file.write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
        key = str(self.folder / "key")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        self.switch = Machine(self, SWITCH_HOST, "switch", with_sshd=False)
        self.switch_ip("link", "add", "br0", "type", "bridge")
        self.switch_ip("addr", "add", f"{self.switch.address}/24", "dev", "br0")
        self.switch_ip("link", "set", "br0", "up")
        for number, name in enumerate(self._names, 1):
            machine = Machine(self, number, name, with_sshd=True)
            self.machines[name] = machine
            port, pid = f"port{number}", str(machine.init.pid)
            self.switch_ip(
                "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid
            )
            self.switch_ip("link", "set", port, "master", "br0", "up")
            for words in (
                ("addr", "add", f"{machine.address}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("route", "add", "default", "via", self.switch.address),
            ):
                subprocess.run([*machine.enter(net_only=True), "ip", *words], check=True)

    def switch_ip(self, *words: str) -> None:
        """``ip`` in the switch."""
        assert self.switch is not None
        subprocess.run([*self.switch.enter(net_only=True), "ip", *words], check=True)

    def __exit__(self, *exc_info: object) -> None:
        for machine in [*self.machines.values(), self.switch]:
            if machine is not None:
                machine.switch_off()
        shutil.rmtree(self.folder, ignore_errors=True)
