"""Error messages for unknown keyword arguments."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from nanovllm.errors import InvalidRequestError
from nanovllm.sampling.params import SamplingParams, closest, show

P = ParamSpec("P")
R = TypeVar("R")


def explain_unknown_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Turn an unknown keyword into an `InvalidRequestError` that names it, the closest valid keyword, and all valid ones."""
    names = tuple(name for name in inspect.signature(function).parameters if name != "self")

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
