"""What every worker actor does; the roles' rooms add which roles to attach.

A plain class: the launcher wraps it with ``ray.remote``. Its methods are control only; tokens and
blocks never pass through Ray.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence

from kvferry.kv_transfer.choosing import endpoints_of
from kvferry.worker.build import WorkerSettings, build_worker
from kvferry.worker.description import WorkerDescription
from kvferry.worker.logs import LogSettings, set_up_logging
from kvferry.worker.messages import Member
from kvferry.worker.process import WorkerProcess
from kvferry.worker.worker import RoleHandler, Worker

RoleFactory = Callable[[Worker], RoleHandler]


class WorkerActor:
    """One worker in this process. ``start`` once, then it serves until ``stop``."""

    def __init__(
        self,
        settings: WorkerSettings,
        roles: Sequence[RoleFactory],
        logs: LogSettings,
    ) -> None:
        set_up_logging(logs, settings.ref.node_id)
        self._settings = settings
        self._roles = roles
        self._process: WorkerProcess | None = None
        self._ended = threading.Event()

    def start(self, node_id: str | None = None) -> WorkerDescription:
        """Load the model, allocate the pool, listen, serve."""
        built = build_worker(self._settings)
        worker = built.worker
        for role in self._roles:
            worker.attach(role(worker))
        self._process = WorkerProcess(
            worker,
            self._settings.host,
            self._settings.audit_every_step,
            self._ended.set,
            self._settings.key,
        )
        self._process.start()
        info = worker.connector.local_info()
        member = Member(
            worker.ref,
            tuple(role.role for role in worker.roles),
            self._process.address,
            info,
        )
        return WorkerDescription(
            member=member,
            pid=os.getpid(),
            host=socket.gethostname(),
            threads=self._settings.threads,
            kernels=built.kernels.implementation,
            isa=built.kernels.isa,
            connectors=tuple(endpoint.connector for endpoint in endpoints_of(info)),
            model=built.model,
            size=built.size,
            layout=built.layout,
            dtype=self._settings.dtype,
            max_model_len=built.max_model_len,
            pool_arithmetic=built.pool.arithmetic,
            node_id=node_id,
            kernels_warning=built.kernels.warning,
        )

    def wait(self) -> str:
        """Return when the worker has ended by itself; a pending call tells of its death."""
        self._ended.wait()
        return "the engine thread has ended"

    def stop(self) -> None:
        """Stop serving and give the pool back; idempotent."""
        if self._process is not None:
            self._process.stop()
        self._ended.set()
