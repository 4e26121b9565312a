"""Run units as tasks of a Ray cluster: that of RAY_ADDRESS, else one of this machine alone.

Nodes need this checkout and its environment at the same paths, and the recipe's inputs and outputs on
a shared disk or behind URLs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from typing import Any

from data_mixtures import store
from data_mixtures.shards import Json
from data_mixtures.stages.stage import AGAIN, Stage, Unit, attempt_unit

RETRIES = 3  # of a unit whose node or worker was lost
# of a cluster that is started here: tasks return a failure or nothing
OBJECT_STORE_BYTES = 80 << 20


def outcomes(work: Stage, units: list[Unit], workers: int) -> Generator[Json | None]:
    """Yield the result of `attempt_unit` for each unit as it finishes; closing cancels running units.

    Args:
        workers: units at a time; 0 to keep all CPUs of the cluster busy, also of nodes that join later.

    Raises:
        ValueError: names a unit that was lost RETRIES + 1 times.
    """
    ray = _connect()
    # Ray repeats the units of a lost node or killed worker; a second run writes the same bytes
    remote_attempt = ray.remote(num_cpus=1, max_retries=RETRIES)(attempt_unit)
    place = store.place(work.out)
    waiting = list(reversed(units))
    running = dict[Any, Unit]()
    try:
        while waiting or running:
            limit = workers or 2 * int(ray.cluster_resources().get("CPU", 1))
            while waiting and len(running) < limit:
                unit = waiting.pop()
                running[remote_attempt.remote(work, unit, place)] = unit
            (finished, *_), _ = ray.wait(list(running))
            unit = running.pop(finished)
            try:
                failure = ray.get(finished)
            except ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[0]
                raise ValueError(
                    f"{work.name} {unit}: its worker was lost {RETRIES + 1} times: {type(error).__name__}: {reason} "
                    f"(out of memory? Ray's logs are in /tmp/ray of its node); {AGAIN}"
                ) from error
            yield failure
    finally:
        for task in running:
            ray.cancel(task, force=True)


def _connect() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        missing = f"--executor ray needs a package that is missing ({error})"
        raise ValueError(f"{missing}: pip install 'laneformer[ray]'") from error
    if not ray.is_initialized():
        options: Json = (
            {} if os.environ.get("RAY_ADDRESS") else {"object_store_memory": OBJECT_STORE_BYTES}
        )
        ray.init(log_to_driver=False, logging_level=logging.WARNING, **options)
    return ray
