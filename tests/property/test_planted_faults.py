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
from tests.property.faults.host_windows import HOST_WINDOW_FAULTS
from tests.property.faults.windows import WINDOW_FAULTS

pytestmark = pytest.mark.unhooked  # the import hook's checks would double the minutes that these tests take

DRAWS = 8  # a rare fault may escape one draw
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
        draws = range(fault.draw, fault.draw + DRAWS)
        failure = next((found for draw in draws if (found := find(fault.machine, max_examples=600, draw=draw)) is not None), None)
    assert failure is not None, f"{fault.machine.__name__} did not find {fault.name}"
    assert not isinstance(failure, Flaky), failure
