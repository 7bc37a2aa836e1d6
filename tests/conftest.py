"""One thread, because machines are shared; the same random tensors and, by a Hypothesis profile, the same examples every time.

`HYPOTHESIS_PROFILE` chooses the profile. `ci`, the default, shrinks a failing example for a few seconds at most. `dev` has the same
examples and shrinks them without this limit, up to five minutes. `nightly` has other examples every time.
"""

import os
import signal
import zlib
from importlib.util import find_spec

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports transformers: no test may look at the network

import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import engine, providers

if "PYTEST_XDIST_WORKER" in os.environ:  # its processes ignore Ctrl-C, and so would those that tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)
torch.set_grad_enabled(False)

COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
SHRINKING = 20  # seconds
# One failure is enough. The phase that explains it traces every line of every smaller example, which takes most of the time of shrinking.
SOON = {"report_multiple_bugs": False, "phases": [phase for phase in Phase if phase is not Phase.explain]}
settings.register_profile("ci", derandomize=True, **SOON, **COMMON)
settings.register_profile("dev", derandomize=True, **COMMON)
settings.register_profile("nightly", **COMMON)  # the machines run many more examples
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(PROFILE)
if PROFILE != "nightly":  # else examples have constants of the modules that a process happens to have loaded, by the tests before
    providers._get_local_constants = lambda: providers._local_constants
if PROFILE == "ci":
    engine.MAX_SHRINKING_SECONDS = SHRINKING  # Hypothesis lets users change it; its warning speaks of five minutes all the same


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Triton's interpreter is chosen when a kernel is defined: a process that did not start with it skips what it would run."""
    missing = [] if find_spec("triton") else ["triton"]
    missing += [] if os.environ.get("TRITON_INTERPRET") == "1" else ["TRITON_INTERPRET=1"]
    for item in items:
        if missing and item.get_closest_marker("interpret"):
            item.add_marker(pytest.mark.skip(reason=f"needs {' and '.join(missing)}"))


# Which tests a process runs, and in which order, differs from run to run. So the random tensors of a test depend on its name, and those of
# the fixtures of a module on its file. Examples of Hypothesis after the first in a test go on with the same generator.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed torch for fixtures."""
    torch.manual_seed(zlib.crc32(item.path.name.encode()))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Seed torch for the test."""
    torch.manual_seed(zlib.crc32(item.name.encode()))


@pytest.fixture
def untyped():
    """Without the import hook's type checks, which would speak before our own errors do."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
