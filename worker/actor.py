"""What every worker actor does; the roles' rooms add which roles to attach.

A plain class: the launcher wraps it with ``ray.remote``. Its methods are control only; tokens and
blocks never pass through Ray.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvferry.kv_transfer.choosing import endpoints_of
from kvferry.worker.build import WorkerSettings, build_worker
from kvferry.worker.cores import CoreClaim, own_cores, pin
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
        self._described: WorkerDescription | None = None
        self._claim = CoreClaim((), "")
        self._watch = threading.Condition()
        self._num_watchers = 0
        self._has_ended = False

    def start(
        self, node_id: str | None = None, host: str | None = None, placement: str = ""
    ) -> WorkerDescription:
        """Load the model, allocate the pool, listen, serve.

        ``host`` is the address to listen on, where it is not that of the settings.
        """
        if host is not None:
            self._settings = replace(self._settings, host=host)
        if self._settings.pin_cores:
            self._claim = own_cores(self._settings.threads)
            placement = f"{placement}; {self._claim.why}" if placement else self._claim.why
        if self._claim.cores:
            pin(self._claim.cores)
        built = build_worker(self._settings)
        worker = built.worker
        for role in self._roles:
            worker.attach(role(worker))
        self._process = WorkerProcess(
            worker,
            self._settings.host,
            self._settings.audit_every_step,
            self._end,
            key=self._settings.key,
        )
        self._process.start()
        info = worker.connector.local_info()
        member = Member(
            worker.ref,
            tuple(role.role for role in worker.roles),
            self._process.address,
            info,
        )
        self._described = WorkerDescription(
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
            placement=placement,
            cores=self._claim.cores,
        )
        return self._described

    def description(self) -> WorkerDescription | None:
        """What ``start`` returned, for whoever finds this worker; None: it does not serve."""
        return None if self._has_ended else self._described

    def wait(self) -> str:
        """Return when the worker has ended by itself; a pending call tells of its death.

        Or when somebody else waits: one watcher at a time, so that those that have died do not
        take all of the actor's threads.
        """
        with self._watch:
            self._num_watchers += 1
            mine = self._num_watchers
            self._watch.notify_all()
            self._watch.wait_for(lambda: self._has_ended or self._num_watchers != mine)
            return "the engine thread has ended" if self._has_ended else "somebody else watches"

    def _end(self) -> None:
        with self._watch:
            self._has_ended = True
            self._watch.notify_all()

    def stop(self) -> None:
        """Stop serving and give the pool back; idempotent."""
        if self._process is not None:
            self._process.stop()
        self._end()
        self._claim.release()
