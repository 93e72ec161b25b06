"""A Ray cluster that is not ours: ``python -m tests.system.ray_head`` prints its address.

Runs until the end of its input. ``lose`` there ends the keeper for good, ``reserve`` makes a place
of a cluster from this job, which has a Ray namespace of its own; each is answered by ``done``. Ray
asks for its own token, as it does by default.
"""

import os
import sys

import ray

from kvferry.cluster.ours import find_keeper
from kvferry.cluster.ray_places import RayPlaces

if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        num_cpus=4,
    )
    print(ray.get_runtime_context().gcs_address, flush=True)
    for line in sys.stdin:
        if line.strip() == "lose":
            ray.kill(find_keeper("kvferry"))
        else:
            assert line.strip() == "reserve"
            RayPlaces("kvferry").create("decode-9", {"CPU": 1.0}, None)
        print("done", flush=True)
    ray.shutdown()
