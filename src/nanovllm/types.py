"""Axis names and array types for annotations.

Axes: T tokens of a step · B sequences of a step · R rows of logits · V vocabulary · L layers · N pages of a pool, the dummy page
included · K key and value heads · H query heads · D head_dim · S page_size · P width of a page table · M hidden_size ·
F intermediate_size · W last axis of a KV pool: D, or in FP8 D + 4. On a device, ids, positions, slots and lengths are int32, and keys of
the random generator are int64.
"""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int32, Int64
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = [
    "Bool",
    "Float",
    "Float32",
    "Int32",
    "Int64",
    "Tensor",
    "brief",
    "brief_fields",
    "dtype_of",
    "function_name",
    "register_value",
    "writable",
]
C = TypeVar("C")
FLOATS: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)


def register_value(cls: type[C], *, static: tuple[str, ...] = ()) -> type[C]:
    """Register a frozen dataclass as a pytree. All fields are leaves, except `static` ones, which belong to the tree's structure."""
    fields = tuple(cls.__dataclass_fields__)  # pyright: ignore[reportAttributeAccessIssue]
    leaves = tuple(f for f in fields if f not in static)

    def flatten(value: Any):
        return [getattr(value, f) for f in leaves], tuple(getattr(value, f) for f in static)

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        return [(pytree.GetAttrKey(f), getattr(value, f)) for f in leaves], tuple(getattr(value, f) for f in static)

    def unflatten(children: Any, context: Any):
        return cls(**dict(zip(leaves, children, strict=True)), **dict(zip(static, context, strict=True)))

    pytree.register_pytree_node(
        cls, flatten, unflatten, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}", flatten_with_keys_fn=flatten_with_keys
    )
    return cls


def brief(value: Any, depth: int = 4) -> str:
    """A short text for a value; for a tensor its dtype, shape and device. Reads no device memory, and `depth` levels of lists."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}] on {value.device}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        if value and not depth:
            return "(...)"
        shown = ", ".join(brief(part, depth - 1) for part in value[:2])
        return f"({shown}{f', ... {len(value) - 2} more' if len(value) > 2 else ''})"
    if isinstance(value, Mapping) and not isinstance(value, dict):
        return f"{type(value).__name__} of {len(value)}"
    short = reprlib.Repr()
    short.maxstring = short.maxother = 100
    return short.repr(value)


def writable(tensor: Tensor) -> Tensor:
    """The tensor; or a copy of one that was made in `torch.inference_mode`, which only code in that mode may write."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not tensor.is_inference():
        return tensor
    return tensor.clone()


def function_name(function: Any) -> str:
    """A function's name with its file and line; for other objects their `repr`."""
    code = getattr(function, "__code__", None)
    return reprlib.repr(function) if code is None else f"{function.__name__} ({Path(code.co_filename).name}, line {code.co_firstlineno})"


def brief_fields(value: Any) -> str:
    """A dataclass or a named tuple on one short line, for its `__repr__`."""
    names = value._fields if isinstance(value, tuple) else value.__dataclass_fields__  # pyright: ignore[reportAttributeAccessIssue]
    fields = (f"{name}={brief(getattr(value, name))}" for name in names)
    return f"{type(value).__name__}({', '.join(fields)})"


def dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """A torch dtype, given itself or its name such as "bfloat16".

    Raises:
        ValueError: `dtype` is not a floating-point dtype.
    """
    resolved = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise ValueError(f"dtype {dtype!r} is not a floating-point torch dtype; use float32, bfloat16, float16 or float64")
    return resolved
