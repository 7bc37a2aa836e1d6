"""One thread, because machines are shared, and a Hypothesis profile that draws the same examples every time."""

import os
import signal
from importlib.util import find_spec

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports transformers: no test may look at the network

import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:  # its processes ignore Ctrl-C, and so would those that tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)
torch.set_grad_enabled(False)

COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", derandomize=True, **COMMON)
settings.register_profile("nightly", **COMMON)  # other examples every time; the machines run many more of them
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Triton's interpreter is chosen when a kernel is defined: a process that did not start with it skips what it would run."""
    missing = [] if find_spec("triton") else ["triton"]
    missing += [] if os.environ.get("TRITON_INTERPRET") == "1" else ["TRITON_INTERPRET=1"]
    for item in items:
        if missing and item.get_closest_marker("interpret"):
            item.add_marker(pytest.mark.skip(reason=f"needs {' and '.join(missing)}"))


@pytest.fixture
def untyped():
    """Without the import hook's type checks, which would speak before our own errors do."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
