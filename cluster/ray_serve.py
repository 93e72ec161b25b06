"""A Ray Serve application that owns a cluster: ``kvferry.cluster.ray_serve:build``.

For ``serve deploy`` and KubeRay's RayService, which then start the cluster, look after it and end
it. Serve is not on the way of a token: clients use the cluster's own doors, and a request to the
application says where those are.

Knows nothing of workers: starting and stopping is ``cluster.launcher``'s, and bringing back single
processes its supervision's. Only when that has not helped for ``patience_s`` does the application
report itself unhealthy, and Serve begins anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from starlette.responses import JSONResponse

from kvferry.cluster.cli.startup import start
from kvferry.cluster.config import ConfigError, load_config, parse_duration
from kvferry.cluster.serve_patience import Patience

GRACE_S = 5.0  # for streams, when the application is deleted
END_S = (
    30.0  # for everything to have ended, then Serve kills the replica; the keeper goes on ending
)
HEALTH_PERIOD_S = 5.0
HEALTH_TIMEOUT_S = 10.0
HEAD_ONLY = {"node:__internal_head__": 0.001}  # Ray's own name for the head; a sliver of it
ARGUMENTS = ("config", "overrides", "patience")

_log = logging.getLogger("ray.serve.kvferry")  # below Serve's own, which goes to the replica's file


class KVFerryCluster:
    """The one replica: a cluster lives as long as it does, and is never an earlier replica's.

    Serve starts a successor while the replica before it is still ending; what that one began ends
    first, so that new arguments count. If Serve kills it while the cluster starts, the keeper finds
    that nobody waits any more, and undoes the start.

    Args:
        config: the configuration file, as the head sees it; None: the defaults.
        overrides: values that stand before the file's, by dotted key.
        patience_s: seconds without readiness after which it reports itself unhealthy.
    """

    def __init__(self, config: str | None, overrides: Mapping[str, Any], patience_s: float) -> None:
        path = None if config is None else Path(config).expanduser()
        read = load_config(path, {"ray.address": "auto", **overrides})
        self._patience = Patience(patience_s)
        self._cluster = start(read, LoggedProgress(), anew=True)
        _log.info("serving gRPC on %s", self._cluster.grpc)

    def check_health(self) -> None:
        """Raise NotReady if the router has not been ready for too long; Serve calls this."""
        self._patience.judge(self._cluster.not_ready_reasons(), time.monotonic())

    def __call__(self, _request: object) -> JSONResponse:
        """Where the doors are, and whether the cluster is ready: 200 or 503."""
        reasons = self._cluster.not_ready_reasons()
        facts = {
            "ready": not reasons,
            "not_ready_reasons": reasons,
            "grpc": self._cluster.grpc,
            "http": self._cluster.http,
            "metrics": self._cluster.metrics,
        }
        return JSONResponse(facts, status_code=503 if reasons else 200)

    def __del__(self) -> None:
        """End the cluster; Serve calls this when the application is deleted or updated."""
        cluster = getattr(self, "_cluster", None)  # a start that failed or ended undoes itself
        if cluster is not None:
            cluster.stop(GRACE_S)


class LoggedProgress:
    """What start-up says, in the replica's log."""

    def __init__(self) -> None:
        self._stage = ""

    def stage(self, name: str, done: int, total: int, detail: str = "") -> None:
        """A line when a stage begins."""
        if name != self._stage:
            _log.info("%s ...", name)
        self._stage = name

    def say(self, message: str) -> None:
        """A line."""
        _log.info("%s", message)


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application, from the ``args`` of Serve's configuration file.

    Args:
        args: ``config``, the path of a configuration file on the head; ``overrides``, a mapping of
            values by dotted key; ``patience`` (default ``60s``), how long the cluster may be not
            ready. Each may be left out.

    Raises:
        ConfigError: an argument is unknown or of the wrong kind.
    """
    if unknown := sorted(set(args) - set(ARGUMENTS)):
        raise ConfigError(f"args: got {', '.join(unknown)}, wanted only {', '.join(ARGUMENTS)}")
    config, overrides = args.get("config"), args.get("overrides", {})
    if not (config is None or isinstance(config, str)):
        raise ConfigError(f"args.config: got {config!r}, wanted the path of a YAML file")
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"args.overrides: got {overrides!r}, wanted values by dotted key")
    try:
        patience_s = parse_duration(args.get("patience", "60s"))
    except ValueError as error:
        raise ConfigError(f"args.patience: got {args['patience']!r}: {error}") from error
    as_deployment = serve.deployment(
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "resources": HEAD_ONLY},
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=END_S,
    )
    return as_deployment(KVFerryCluster).bind(config, dict(overrides), patience_s)
