"""The table of plans: handles are never reused and die with their plan."""

import gc

import pytest

from nanovllm.errors import NanoVLLMError
from nanovllm.ops.plans import UnknownPlanError, lookup, register


class Plan:
    pass


def test_a_handle_finds_its_plan():
    a, b = Plan(), Plan()
    ha, hb = register(a), register(b)
    assert lookup(ha) is a
    assert lookup(hb) is b
    assert 0 not in (ha, hb)


def test_a_handle_dies_with_its_plan_and_is_not_given_out_again():
    plan = Plan()
    handle = register(plan)
    del plan
    gc.collect()
    with pytest.raises(UnknownPlanError, match=str(handle)):
        lookup(handle)
    other = Plan()
    assert register(other) > handle


@pytest.mark.parametrize("handle", [0, -1, 10**9])
def test_an_unknown_handle_is_a_typed_error(handle):
    with pytest.raises(NanoVLLMError, match=f"handle {handle};"):
        lookup(handle)
