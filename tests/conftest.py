"""One thread, because machines are shared, and a Hypothesis profile that draws the same examples every time."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports transformers: no test may look at the network

import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
torch.set_grad_enabled(False)

COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", derandomize=True, **COMMON)
settings.register_profile("nightly", **COMMON)  # other examples every time; the machines run many more of them
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def untyped():
    """Without the import hook's type checks, which would speak before our own errors do."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
