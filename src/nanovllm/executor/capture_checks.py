"""What a captured function may not do, and which carries and inputs it takes: the checks of `capture`."""

import os
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nanovllm.errors import CaptureError, InvalidRequestError, NanoVLLMError
from nanovllm.executor.captured_step import MOVED
from nanovllm.executor.decode_carry import DecodeCarry
from nanovllm.executor.fresh_carry import log_of
from nanovllm.state.kv_cache import same_memory
from nanovllm.types import Tensor, function_name

INSIDE = (str(Path(__file__).parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep)  # code that is not the caller's


def require_alike(carry: DecodeCarry, own: DecodeCarry, spec: Any, own_leaves: list[Tensor]) -> list[Tensor]:
    """Require a carry like the captured one, `own`. Returns its tensors."""
    if not same_memory(carry.kv, own.kv):
        raise InvalidRequestError("this carry has other KV memory than the captured carry: capture the function for each engine")
    leaves = own_leaves if carry is own else moving_leaves(carry)
    if carry is not own and (structure_of(carry) != spec or shapes_of(leaves) != shapes_of(own_leaves)):
        raise InvalidRequestError(f"{carry!r} has other shapes, options or plans than the captured carry: capture the function again")
    return leaves


def paired(inputs: tuple[Any, ...], before: list[Any], spec: Any) -> list[tuple[Tensor, Tensor]]:
    """The tensors among the inputs of the capture and of a call. Other inputs must be equal."""
    leaves, given = pytree.tree_flatten(inputs)
    if given != spec:
        raise InvalidRequestError(
            f"{len(inputs)} inputs with {len(leaves)} values are built in another way than those of the capture, which had "
            f"{len(before)} values: pass the same tree of inputs in every call"
        )
    for place, (old, new) in enumerate(zip(before, leaves, strict=True)):
        if not isinstance(old, Tensor):
            if isinstance(new, Tensor) or (old is not new and old != new):
                raise InvalidRequestError(f"input {place} is {new!r}, but was {old!r} at the capture: pass values that change as tensors")
        elif not isinstance(new, Tensor) or old.shape != new.shape or old.dtype != new.dtype:
            shown = f"{new.dtype} {list(new.shape)}" if isinstance(new, Tensor) else repr(new)
            raise InvalidRequestError(f"input {place} is {shown}, but was {old.dtype} {list(old.shape)} at the capture")
    return [(old, new) for old, new in zip(before, leaves, strict=True) if isinstance(old, Tensor)]


def line_of(function: Callable[..., Any], error: BaseException) -> str:
    """The innermost line of the caller's code in a traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*INSIDE, "<"))]
    if not frames:
        return function_name(function)
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, `{frames[-1].line}`,"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def first_error(error: BaseException) -> BaseException:
    """The package's own error among an error and those before it, or the error."""
    before: BaseException | None = error
    while before is not None and not isinstance(before, NanoVLLMError):
        before = before.__context__
    return before or error


def structure_of(carry: DecodeCarry) -> Any:
    """All of a carry that is no tensor, apart from its session."""
    return pytree.tree_flatten(replace(carry, log=replace(log_of(carry), lease=None)))[1]


def moving_leaves(carry: DecodeCarry) -> list[Tensor]:
    """The tensors of a carry, apart from the KV memory, and from the number and the count of steps that belong to the session."""
    log = log_of(carry)
    kept = {id(tensor) for tensor in (*carry.kv.pools, log.session, log.ran)}
    return [leaf for leaf in pytree.tree_leaves(carry) if isinstance(leaf, Tensor) and id(leaf) not in kept]


def versions_of(carry: DecodeCarry) -> dict[str, tuple[Tensor, int]]:
    """How often each tensor was written that a step leaves as it is, by its name."""
    batch, sampling, log = carry.batch, carry.sampling, log_of(carry)
    tensors: dict[str, Any] = {f"sampling.{name}": getattr(sampling, name) for name in sampling.__dataclass_fields__}
    tensors |= {"active": carry.active, "batch.page_tables": batch.page_tables}
    if not carry.active.is_cuda:  # on a GPU a traced step writes these in place
        tensors |= {f"batch.{name}": getattr(batch, name) for name in MOVED} | {"log.token_ids": log.token_ids}
    # Tensors of `torch.inference_mode` do not count the writes to them.
    return {name: (t, t._version) for name, t in tensors.items() if isinstance(t, Tensor) and not t.is_inference()}


def require_unchanged(function: Callable[..., Any], before: dict[str, tuple[Tensor, int]], carry: DecodeCarry) -> None:
    """Raise `CaptureError` if a tensor was written that a step leaves as it is. `before` is what `versions_of` gave."""
    for name, (tensor, version) in before.items():
        if tensor._version != version:
            raise CaptureError(f"{function_name(function)} changed carry.{name} in place: return a carry with a new tensor instead")


def require_nothing_kept(function: Callable[..., Any], pool: Any, results: list[Tensor]) -> None:
    """Require that of the memory of the graph only its results are still in use."""
    known, kept = {storage_of(tensor) for tensor in results}, 0
    for segment in torch.cuda.memory_snapshot(pool):
        blocks = segment["blocks"] if tuple(segment["segment_pool_id"]) == tuple(pool) else ()
        kept += sum(block["size"] for block in blocks if block["state"] == "active_allocated" and block["address"] not in known)
    if kept:
        raise CaptureError(
            f"{function_name(function)} keeps {kept} bytes that it allocated, in a list for example, and every replay overwrites them: "
            "return such tensors"
        )


def shapes_of(tensors: list[Any]) -> list[Any]:
    """The shapes and dtypes of tensors; other values as they are."""
    return [(tensor.shape, tensor.dtype) if isinstance(tensor, Tensor) else tensor for tensor in tensors]


def same_place(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors begin at the same address."""
    return one is other or one.data_ptr() == other.data_ptr()


def storage_of(tensor: Tensor) -> int:
    """The address of a tensor's memory, which its views share."""
    return tensor.untyped_storage().data_ptr()


def carry_of(result: Any) -> DecodeCarry:
    """The carry in the result of the caller's function."""
    first = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(first, DecodeCarry):
        raise InvalidRequestError(
            f"the function returns {type(first).__name__}: it must return the next carry, or a tuple whose first element is the next carry"
        )
    return first
