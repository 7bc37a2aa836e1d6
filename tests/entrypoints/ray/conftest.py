"""A local Ray for the tests that are marked `ray`, which run one after another in a process of their own."""

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Ray on this machine. Its four CPUs are places for actors, not cores."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["OMP_NUM_THREADS"] = "1"
    ray: Any = pytest.importorskip("ray")
    ray.init(num_cpus=4, num_gpus=0, include_dashboard=False, log_to_driver=False, configure_logging=False, object_store_memory=128 << 20)
    yield ray
    ray.shutdown()
