"""Each machine finds the faults that are planted for it, within a bounded number of examples."""

import pytest
from hypothesis.errors import Flaky

from nanovllm.testing.cascade_faults import CASCADE_FAULTS
from nanovllm.testing.chunk_faults import CHUNK_FAULTS
from nanovllm.testing.faults import FAULTS, Fault, find, planted
from nanovllm.testing.window_faults import WINDOW_FAULTS


@pytest.mark.parametrize("fault", [*FAULTS, *CHUNK_FAULTS, *CASCADE_FAULTS, *WINDOW_FAULTS], ids=lambda fault: fault.name.replace(" ", "-"))
def test_machine_finds(fault: Fault, untyped: None):
    with planted(fault):
        failure = find(fault.machine, max_examples=600)
    assert failure is not None, f"{fault.machine.__name__} did not find {fault.name}"
    assert not isinstance(failure, Flaky), failure
