"""Arguments of calls as bytes: JSON, and after it the bytes of arrays. What comes from bytes is data alone, never code.

A value in JSON is itself if it is None, a bool, an integer, a float or a text; every other value is a list that begins with its kind.
"""

import json
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from struct import Struct
from typing import Any

import numpy as np
import torch

from nanovllm.errors import InvalidRequestError
from nanovllm.sampling.grammar import Grammar
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.chunk import Chunk

HEAD = Struct("<I")  # the length of the JSON
DEFAULTS = SamplingParams()
OPTIONS = tuple(SamplingParams.__dataclass_fields__)
NUMBERS = "iufb"  # kinds of arrays
TENSORS = frozenset((torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64))


def encode(value: Any) -> bytes:
    """A value as bytes.

    Raises:
        InvalidRequestError: A part of it is of a type that other processes cannot be told.
    """
    buffers = list[bytes]()
    text = json.dumps([_plain(value, buffers), [len(each) for each in buffers]], separators=(",", ":")).encode()
    return b"".join((HEAD.pack(len(text)), text, *buffers))


def decode(data: bytes | memoryview, chunk: Callable[[int], Chunk]) -> Any:
    """The value of `encode`.

    Args:
        data: The bytes.
        chunk: The chunk with a `liveness` number.
    """
    view = memoryview(data)
    (size,) = HEAD.unpack_from(view)
    at = HEAD.size + size
    plain, lengths = json.loads(bytes(view[HEAD.size : at]))
    buffers = list[memoryview]()
    for length in lengths:
        buffers.append(view[at : at + length])
        at += length
    return _value(plain, buffers, chunk)


def _plain(value: Any, buffers: list[bytes]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return _list(value, buffers)
    if kind is torch.Tensor and not value.requires_grad and value.dtype in TENSORS:
        array_of = value.cpu().contiguous().numpy()
        buffers.append(array_of.tobytes())
        return ["tensor", array_of.dtype.str, list(array_of.shape), len(buffers) - 1]
    if kind is tuple:
        return ["tuple", *[_plain(each, buffers) for each in value]]
    if isinstance(value, Chunk):
        return ["chunk", value.liveness]
    if kind is SamplingParams:
        given = {name: getattr(value, name) for name in OPTIONS}
        return ["sampling", {name: _plain(one, buffers) for name, one in given.items() if one != getattr(DEFAULTS, name)}]
    if kind is Grammar:
        return ["grammar", value.form, value.source]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in NUMBERS:
        buffers.append(value.tobytes())
        return ["array" if isinstance(value, np.ndarray) else "scalar", value.dtype.str, list(value.shape), len(buffers) - 1]
    if isinstance(value, PurePath):
        return ["path", str(value)]
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return ["dict", {key: _plain(each, buffers) for key, each in value.items()}]
    raise InvalidRequestError(f"a value of type {kind.__name__} cannot be sent to the other ranks of this engine")


def _list(value: list[Any], buffers: list[bytes]) -> Any:
    """A list; one of small integers alone, such as token ids, as bytes."""
    if set(map(type, value)) == {int}:
        try:
            buffers.append(array("q", value).tobytes())
        except OverflowError:
            return ["list", *value]
        return ["ints", len(buffers) - 1]
    return ["list", *[_plain(each, buffers) for each in value]]


def _value(plain: Any, buffers: list[memoryview], chunk: Callable[[int], Chunk]) -> Any:
    if not isinstance(plain, list):
        return plain
    match plain[0], plain[1:]:
        case "list", items:
            return [_value(each, buffers, chunk) for each in items]
        case "tuple", items:
            return tuple([_value(each, buffers, chunk) for each in items])
        case "ints", [at]:
            return np.frombuffer(buffers[at], np.int64).tolist()
        case "chunk", [liveness]:
            return chunk(liveness)
        case "sampling", [given]:
            return SamplingParams(**{name: _value(one, buffers, chunk) for name, one in given.items()})
        case "grammar", [form, source]:
            return Grammar(form=form, source=source)
        case "array", [dtype, shape, at]:
            return np.frombuffer(buffers[at], dtype).reshape(shape)
        case "tensor", [dtype, shape, at]:
            return torch.from_numpy(np.frombuffer(buffers[at], dtype).reshape(shape).copy())
        case "scalar", [dtype, _, at]:
            return np.frombuffer(buffers[at], dtype)[0]
        case "path", [text]:
            return Path(text)
        case "dict", [items]:
            return {key: _value(each, buffers, chunk) for key, each in items.items()}
    raise ValueError(f"no value is of the kind {plain[0]!r}")
