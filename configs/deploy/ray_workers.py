"""Workers for `rollouts up RECIPE --out DIR --remote-workers 1:64 --host 0.0.0.0`, as tasks of a Ray cluster.

    python configs/deploy/ray_workers.py --join http://head:8700 --workers 64

Every node has this package, the recipe's file, and ROLLOUTS_SERVICE_KEY in the environment of `ray start`. Tasks that
wait for room are the demand that Ray's autoscaler reads; one whose node dies starts on another. A worker that gets
SIGTERM finishes its rollouts and is not replaced. The service has no Ray in its process: if Ray's head dies, Ray ends
this script and these workers, and workers that `rollouts work --join` started elsewhere continue.
"""

from __future__ import annotations

import argparse
import functools
import os


def work(url: str) -> None:
    """Play in the process of a Ray task; its main thread gets SIGTERM."""
    import anyio

    from rollouts.distributed.join import work as join

    anyio.run(functools.partial(join, url, key=os.environ.get("ROLLOUTS_SERVICE_KEY"), say=print))


def main() -> None:
    """Start the workers, and wait until all have left."""
    import ray

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--join", required=True, metavar="URL", help="URL of rollouts up")
    parser.add_argument("--workers", type=int, default=1, help="number of tasks (default: %(default)s)")
    parser.add_argument("--cpus", type=float, default=1.0, help="CPUs that each reserves (default: %(default)s)")
    parser.add_argument("--address", default="auto", help="of the cluster (default: %(default)s)")
    options = parser.parse_args()
    ray.init(address=options.address)
    task = ray.remote(work).options(num_cpus=options.cpus, max_retries=-1, scheduling_strategy="SPREAD")
    ray.get([task.remote(options.join) for _ in range(options.workers)])


if __name__ == "__main__":
    main()
