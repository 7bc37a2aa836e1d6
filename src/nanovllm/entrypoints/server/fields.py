"""Values of a request as decoded from JSON: read with their types, or refused with their path."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from nanovllm.entrypoints.server.chat_limits import MAX_DEPTH, MAX_DIGITS, MAX_NODES
from nanovllm.errors import InvalidRequestError
from nanovllm.tokenizer.tokenizer import check_text

BITS = int(MAX_DIGITS * math.log2(10))


class InvalidParamError(InvalidRequestError):
    """A field of a request is wrong. The message begins with its path.

    Attributes:
        param: The path, such as `messages[3].content[0].type`: the `param` of OpenAI's error objects.
    """

    def __init__(self, param: str, problem: str):
        InvalidRequestError.__init__(self, f"{param} {problem}")
        self.param = param


def mapping(value: Any, param: str) -> Mapping[str, Any]:
    """The value, an object."""
    if not isinstance(value, Mapping):
        raise InvalidParamError(param, f"is {reprlib.repr(value)}; it must be an object")
    for key in value:
        if not isinstance(key, str):
            raise InvalidParamError(param, f"has the key {reprlib.repr(key)}; keys must be strings")
    return value


def listed(value: Any, param: str, most: int, *, least: int = 0) -> list[Any] | tuple[Any, ...]:
    """The value, an array of `least` to `most` elements."""
    if not isinstance(value, list | tuple):
        raise InvalidParamError(param, f"is {reprlib.repr(value)}; it must be an array")
    if not least <= len(value) <= most:
        raise InvalidParamError(param, f"has {len(value)} elements; it must have {least} to {most}")
    return value


def text(value: Any, param: str, most: int | None = None) -> str:
    """The value, a string of valid Unicode with at most `most` characters."""
    if not isinstance(value, str):
        raise InvalidParamError(param, f"is {reprlib.repr(value)}; it must be a string")
    if most is not None and len(value) > most:
        raise InvalidParamError(param, f"has {len(value)} characters; at most {most} are allowed")
    try:
        return check_text(value)
    except InvalidRequestError as error:
        raise InvalidParamError(param, f"is not valid Unicode: {error}") from None


def flag(value: Any, param: str, default: bool) -> bool:
    """The value, a boolean; null stands for the default."""
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidParamError(param, f"is {reprlib.repr(value)}; it must be true or false")
    return value


def check_json(value: Any, param: str) -> int:
    """Check that templates and JSON writers can handle a value: its types, depth, size, numbers and strings. Returns its characters.

    Raises:
        InvalidParamError: They cannot. The message names the path of the first fault.
    """
    total, waiting = 0, [(value, param, 0)]
    for count in range(1, MAX_NODES + 2):
        if not waiting:
            return total
        if count > MAX_NODES:
            break
        item, path, depth = waiting.pop()
        total += 8
        if depth > MAX_DEPTH:
            raise InvalidParamError(path, f"is nested deeper than {MAX_DEPTH} levels")
        if isinstance(item, str):
            total += len(text(item, path))
        elif isinstance(item, Mapping):
            for key in item:
                total += len(text(key, f"{path}, one of its keys,"))
            waiting += [(inner, f"{path}.{key}", depth + 1) for key, inner in reversed([*item.items()])]
        elif isinstance(item, list | tuple):
            waiting += [(inner, f"{path}[{place}]", depth + 1) for place, inner in reversed([*enumerate(item)])]
        elif isinstance(item, float) and not math.isfinite(item):
            raise InvalidParamError(path, f"is {item}, which JSON does not have")
        elif isinstance(item, int) and not isinstance(item, bool) and item.bit_length() > BITS:
            raise InvalidParamError(path, f"is an integer of more than {MAX_DIGITS} digits")
        elif not isinstance(item, float | int | None):
            raise InvalidParamError(path, f"is a {type(item).__name__}, which JSON does not have")
    raise InvalidParamError(param, f"has more than {MAX_NODES} values")
