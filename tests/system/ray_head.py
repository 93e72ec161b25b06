"""A Ray cluster that is not ours: ``python -m tests.system.ray_head`` prints its address.

Runs until SIGTERM. Ray asks for its own token, as it does by default.
"""

import os
import signal

import ray

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
    print(ray.get_runtime_context().gcs_address, flush=True)
    signal.sigwait([signal.SIGTERM])
    ray.shutdown()
