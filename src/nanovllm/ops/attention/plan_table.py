"""The one table of the package: plans by integer, because custom ops take integers.

A plan (FlashInfer's buffers and schedule for one shape of batch) belongs to the runtime that made it. The table only refers to it
weakly: a handle dies with its plan and is never given out again.
"""

import itertools
from typing import TypeVar
from weakref import WeakValueDictionary

from nanovllm.errors import NanoVLLMError

P = TypeVar("P")

_PLANS: WeakValueDictionary[int, object] = WeakValueDictionary()
_HANDLES = itertools.count(2)  # 0 is "no plan"; compiled code is specialised on 0 and 1, and follows any other integer


class UnknownPlanError(NanoVLLMError):
    """An op was given the handle of a plan that was never registered, or whose owner has let it go."""


class PlanMismatchError(NanoVLLMError):
    """An op was given a plan of another kind or for another shape of batch."""


def register(plan: object) -> int:
    """A new handle, at least 2, for a plan that the caller keeps alive."""
    handle = next(_HANDLES)
    _PLANS[handle] = plan
    return handle


def lookup(handle: int, kind: type[P] = object) -> P:
    """The plan behind a handle.

    Raises `UnknownPlanError` for 0, an unknown handle or one whose plan is gone, `PlanMismatchError` for a plan of another kind.
    """
    plan = _PLANS.get(handle)
    if plan is None:
        raise UnknownPlanError(f"no live attention plan has handle {handle}; live handles: {sorted(_PLANS) or 'none'}")
    if not isinstance(plan, kind):
        raise PlanMismatchError(f"plan {handle} is a {type(plan).__name__}, this op takes a {kind.__name__}")
    return plan
