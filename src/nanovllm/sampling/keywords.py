"""Error messages for unknown keyword arguments."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from nanovllm.errors import InvalidRequestError
from nanovllm.sampling.params import SamplingParams, closest, show

P = ParamSpec("P")
R = TypeVar("R")


def explain_unknown_keywords(function: Callable[P, R], passed_to: Callable[..., Any] | None = None) -> Callable[P, R]:
    """Turn an unknown keyword into an `InvalidRequestError` that names it, the closest valid keyword, and all valid ones.

    Args:
        function: The function.
        passed_to: The function to which it passes its other keywords.
    """
    known = [p for each in (function, passed_to) if each is not None for p in inspect.signature(each).parameters.values()]
    names = tuple(dict.fromkeys(p.name for p in known if p.name != "self" and p.kind is not p.VAR_KEYWORD))

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        for name, value in options.items():
            if name not in names:
                raise _unknown(name, value, names)
        return function(*args, **options)

    return checked


def _unknown(name: str, value: object, names: tuple[str, ...]) -> InvalidRequestError:
    sampling = tuple(SamplingParams.__dataclass_fields__)
    where = "" if "sampling_params" in names else " to a call that samples, such as generate"
    if name in sampling:
        return InvalidRequestError(f"{name!r} is a sampling option: pass SamplingParams({name}={show(value)}){where}")
    close = closest(name, (*names, *sampling))
    if close in names:
        hint = f": did you mean {close!r}?"
    elif close is not None:
        hint = f": did you mean the sampling option {close!r}? Pass SamplingParams({close}={show(value)}){where}."
    else:
        hint = "."
    return InvalidRequestError(f"unknown option {show(name)}{hint} Valid options: {', '.join(names)}")
