"""Each machine finds the faults that are planted for it, within a bounded number of examples."""

import pytest
from hypothesis.errors import Flaky

from nanovllm.testing.faults import FAULTS, Fault, find, planted


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_machine_finds(fault: Fault):
    with planted(fault):
        failure = find(fault.machine, max_examples=200)
    assert failure is not None, f"{fault.machine.__name__} did not find {fault.name}"
    assert not isinstance(failure, Flaky), failure
