"""Each machine finds the faults that are planted for it, within a bounded number of examples."""

import pytest
from hypothesis.errors import Flaky

from tests.property.faults.async_llm import ASYNC_FAULTS
from tests.property.faults.cascade import CASCADE_FAULTS
from tests.property.faults.chunks import CHUNK_FAULTS
from tests.property.faults.disk import DISK_FAULTS
from tests.property.faults.disk_windows import DISK_WINDOW_FAULTS
from tests.property.faults.engine import FAULTS, Fault, find, planted
from tests.property.faults.failures import FAILURE_FAULTS
from tests.property.faults.host_memory import HOST_FAULTS
from tests.property.faults.host_windows import HOST_WINDOW_FAULTS, FailedSteps
from tests.property.faults.windows import WINDOW_FAULTS

pytestmark = pytest.mark.unhooked  # the import hook's checks would double the minutes that these tests take

# Draws and their examples. Of many examples Hypothesis makes the first tenth small, up to 50: draws of few examples soon have large ones.
SOON, OTHERS, LATE = 30, [(draw, 20) for draw in range(12)], 8
ALL = [
    *FAULTS,
    *FAILURE_FAULTS,
    *CHUNK_FAULTS,
    *CASCADE_FAULTS,
    *WINDOW_FAULTS,
    *HOST_FAULTS,
    *HOST_WINDOW_FAULTS,
    *DISK_FAULTS,
    *DISK_WINDOW_FAULTS,
    *ASYNC_FAULTS,
]


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name.replace(" ", "-"))
def test_machine_finds(fault: Fault, untyped: None):
    with planted(fault):
        tries = [(fault.draw, SOON), *OTHERS, *((fault.draw + more, 600) for more in range(LATE))]
        failure = next((found for draw, count in tries if (found := find(fault.machine, max_examples=count, draw=draw)) is not None), None)
    assert failure is not None, f"{fault.machine.__name__} did not find {fault.name}"
    assert not isinstance(failure, Flaky), failure


def test_a_step_that_only_copies_pages_in_ends_its_requests_if_the_device_has_no_memory(untyped: None):
    """Draw 2 has a request that copies pages in, and for which there is no room afterwards: the step runs no token of anybody."""
    assert find(FailedSteps, max_examples=20, draw=2) is None
