"""The only global table of the package: attention plans, and model functions of steps, by integer handle. Custom ops take integers alone.

A plan (for example FlashInfer's buffers and schedule for one shape of batch) belongs to the runtime that made it. The table has only a weak
reference. A handle ends with its plan and is never used again.
"""

import itertools
from typing import TypeVar
from weakref import WeakValueDictionary

from nanovllm.errors import NanoVLLMError

P = TypeVar("P")

_PLANS: WeakValueDictionary[int, object] = WeakValueDictionary()
_HANDLES = itertools.count(2)  # 0 means no plan; torch.compile specialises code on 0 and 1, but not on other integers


class UnknownPlanError(NanoVLLMError):
    """An op got a handle of a plan that was never registered, or that was deleted."""


class PlanMismatchError(NanoVLLMError):
    """An op got a plan of another kind or for another shape of batch."""


def register(plan: object) -> int:
    """Return a new handle, at least 2, for a plan that the caller keeps alive."""
    handle = next(_HANDLES)
    _PLANS[handle] = plan
    return handle


def lookup(handle: int, kind: type[P] = object) -> P:
    """Return the plan of a handle.

    Raises:
        UnknownPlanError: The handle is 0 or unknown, or its plan was deleted.
        PlanMismatchError: The plan is of another kind.
    """
    plan = _PLANS.get(handle)
    if plan is None:
        raise UnknownPlanError(f"no live attention plan has handle {handle}; live handles: {sorted(_PLANS) or 'none'}")
    if not isinstance(plan, kind):
        raise PlanMismatchError(f"plan {handle} is a {type(plan).__name__}, but this op takes a {kind.__name__}")
    return plan
