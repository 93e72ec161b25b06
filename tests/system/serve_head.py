"""A Ray cluster with a Serve that runs our application: ``python -m tests.system.serve_head JSON``.

JSON: the application's arguments. Prints one line of JSON, where the application answers, when it
is healthy; on SIGTERM deletes it, says ``deleted``, and ends on a second one.
"""

import json
import os
import signal
import socket
import sys

import ray
from ray import serve

from kvferry.cluster.ray_serve import build

NAME = "kvferry"


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        num_cpus=4,
    )
    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(json.loads(sys.argv[1])), name=NAME, route_prefix=f"/{NAME}")
    print(json.dumps({"url": f"http://127.0.0.1:{port}/{NAME}"}), flush=True)
    signal.sigwait([signal.SIGTERM])
    serve.delete(NAME)
    print("deleted", flush=True)
    signal.sigwait([signal.SIGTERM])
    serve.shutdown()
    ray.shutdown()
