"""From a configuration to a running cluster: the model, then the workers.

The only module here that reaches the launcher and the model store, and it loads them when it is
called: they bring torch and ray.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from kvferry.cluster.config import Config
from kvferry.worker.logs import set_up_logging


class RunningCluster(Protocol):
    """What commands need of ``kvferry.cluster.launcher.Cluster``.

    ``config`` is what it runs by, which on a Ray that was joined may not be what was asked for.
    ``grpc``, ``http`` and ``metrics`` (None: no such door) are HOST:PORT; ``startup_s`` is the
    seconds from the call to readiness.
    """

    config: Config
    grpc: str
    http: str | None
    metrics: str | None
    ray_address: str
    startup_s: float

    def ended(self) -> bool:
        """Whether somebody else has ended it. Raises NotReady if it runs on, but not watched."""

    def begin_stop(self, grace_s: float) -> None:
        """See to it that the cluster ends even if this process is ended before ``stop`` returns."""

    def stop(self, grace_s: float) -> None:
        """Let streams finish for ``grace_s`` seconds, then end every process that was started."""

    def not_ready_reasons(self) -> list[str]:
        """Why no request could be served now; empty when ready."""


class Progress(Protocol):
    """What takes the news of a start: ``cluster.cli.progress.ProgressLine``, or a log."""

    def stage(self, name: str, done: int, total: int, detail: str = "") -> None:
        """``done`` of ``total`` units of a stage; a total of 0 is unknown."""

    def say(self, message: str) -> None:
        """News without a count."""


def start(config: Config, progress: Progress, anew: bool = False) -> RunningCluster:
    """Resolve the model, fetching it if it must be, and start the workers.

    On a Ray that is joined a cluster that runs there already is taken up instead; with ``anew`` it
    is not, see ``KeptCluster.join``.

    Raises ModelMissing and its kin, PortUnavailable, or whatever kept a worker from starting.
    """
    # Ray's own token, which it asks for by default when it starts a cluster, it does not send by
    # default when it joins one; and it looks at this variable once, when it is loaded.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if config.logging.format == "json":  # else what this process logs is Python's to print
        settings = import_module("kvferry.cluster.settings")
        set_up_logging(settings.log_settings(config), "launcher")
    if config.ray.address is not None:
        kept = import_module("kvferry.cluster.kept")
        joined = kept.KeptCluster.join(
            config, lambda: _resolved(config, progress), progress.say, anew
        )
        return cast(RunningCluster, joined)
    launcher = import_module("kvferry.cluster.launcher")
    config, folder = _resolved(config, progress)
    return cast(RunningCluster, launcher.Cluster.start(config, folder, progress.say))


def _resolved(config: Config, progress: Progress) -> tuple[Config, Path]:
    """The model's folder, and the configuration with the name that clients are to call it."""
    store = import_module("kvferry.engine.weights.store")
    folder = store.resolve_model(
        config.model.name,
        config.model.path,
        store.default_cache_dir(os.environ),
        progress.stage,
        revision=config.model.revision,
    )
    if config.model.served_name is None:  # what it was asked for by, not what it was made from
        model = config.model.model_copy(update={"served_name": folder.name})
        config = config.model_copy(update={"model": model})
    return config, folder.path


class Leavable(Protocol):
    """A cluster that can run on without the process that has started it."""

    def leave(self) -> None:
        """Let it run."""


def leave(cluster: RunningCluster) -> None:
    """Let a cluster on a joined Ray run on."""
    cast(Leavable, cluster).leave()
