"""A Ray cluster with a Serve that runs our application: ``python -m tests.system.serve_head JSON``.

JSON: the application's arguments. Prints one line of JSON, where the application answers, when it
is healthy. On standard input ``lose`` ends the keeper for good, ``delete`` deletes the application,
and a line of JSON updates it; each is answered by ``done``. The end of the input ends everything.
"""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import TextIO

import ray
from ray import serve

from kvferry.cluster.ours import find_keeper
from kvferry.cluster.ray_serve import build

NAME = "kvferry"


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main(say: TextIO) -> None:
    """Serve until the end of standard input."""
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
    print(json.dumps({"url": f"http://127.0.0.1:{port}/{NAME}"}), file=say, flush=True)
    for line in sys.stdin:
        if line.strip() == "delete":
            serve.delete(NAME)
        elif line.strip() == "lose":
            ray.kill(find_keeper("kvferry"))
        else:
            serve.run(build(json.loads(line)), name=NAME, route_prefix=f"/{NAME}")
        print("done", file=say, flush=True)
    end: Callable[[], None] = serve.shutdown  # which has no types
    end()
    ray.shutdown()


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # where Ray reports a dead process
        assert sys.__stdout__ is not None
        main(sys.__stdout__)
