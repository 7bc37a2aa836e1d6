"""`capture`: a caller's function of a carry as one CUDA graph, with the signature of the function."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nanovllm.errors import CaptureError, InvalidRequestError, NanoVLLMError
from nanovllm.executor.branches import last_pages
from nanovllm.executor.capture_checks import (
    carry_of,
    first_error,
    first_line,
    line_of,
    moving_leaves,
    paired,
    require_alike,
    require_nothing_kept,
    require_unchanged,
    same_place,
    shapes_of,
    storage_of,
    structure_of,
    versions_of,
)
from nanovllm.executor.captured_step import recording
from nanovllm.executor.carry import with_static_addresses
from nanovllm.executor.decode_carry import DecodeCarry
from nanovllm.executor.fresh_carry import engine_of, log_of, note, require_fresh, require_room
from nanovllm.executor.session_lease import Place, SessionLease
from nanovllm.ops.kv_cache.fp8 import as_bytes
from nanovllm.state.device_errors import watched
from nanovllm.types import Tensor, function_name


@torch.no_grad()
def capture(function: Callable[..., Any], carry: DecodeCarry, *inputs: Any) -> Callable[..., Any]:
    """Capture a function of a carry in a CUDA graph, and return a function of the same type that replays the graph.

    The function takes a carry, and after it any number of pytrees of tensors. It returns the next carry, or a tuple whose first element is
    the next carry. It can hold any number of `decode_step`s, code that `torch.compile` has compiled, and anything else that needs nothing
    from the host. It runs twice for the capture, on copies of the carry's tensors: `carry` itself stays as it is.

    The returned function donates the carry. It takes every carry of the engine with tensors of the same shapes, and copies tensors that
    are not in the graph's memory into it. The returned tensors, apart from those of the carry, are copies that no later call changes. On a
    CPU there are no graphs: the function runs once for the capture, and the returned function calls it, with the same checks of the carry
    and of the inputs.

    Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/ (CUDA Graphs).

    Args:
        function: A function of a carry, and of `inputs`. It must not change tensors in place, and must not keep tensors.
        carry: A carry of `begin`, not donated. Its KV memory is the memory of the graph.
        *inputs: Further arguments of the function. Every call passes tensors of the same shapes; other values must stay the same.

    Returns:
        The function that replays the graph.

    Raises:
        CaptureError: The function waits for the device, allocates memory that outlives it, changes a donated tensor, or returns a carry of
            another shape. The message names the caller's line.
        InvalidRequestError: `carry` is not a carry of `begin`, its prompts have not run, or the function returns no carry.
        DonatedStateError: The carry was donated to a step, or committed. The returned function raises it too.

    Examples:
        >>> state, carry = nv.begin(model, state, ["Once upon a time"], nv.SamplingParams(temperature=0), room=3)
        >>> step = nv.capture(lambda carry: nv.decode_step(model.params, carry, model.config), carry)
        >>> for _ in range(3):
        ...     carry, out = step(carry)
        >>> state, (reply,) = nv.commit(model, state, carry)
        >>> reply.text
        ', a boy'
    """
    if not callable(function):
        raise InvalidRequestError(f"function={function!r} must be a function of a carry")
    require_fresh(log_of(carry))
    if carry.prompt is not None:
        raise InvalidRequestError("the prompts of this carry have not run, and later steps have other shapes: run the first step as it is")
    if carry.active.is_cuda:
        with torch.cuda.device(carry.active.device):
            return Captured(function, carry, inputs)
    advanced, own, given = _tried(function, carry, inputs), carry, pytree.tree_flatten(inputs)
    spec, leaves = structure_of(carry), moving_leaves(carry)

    @torch.no_grad()
    def call(carry: DecodeCarry, *inputs: Any) -> Any:
        """Donates `carry`. Call the function."""
        log = log_of(carry)
        require_room(log, require_fresh(log), advanced)
        require_alike(carry, own, spec, leaves)
        paired(inputs, *given)
        before = versions_of(carry)
        result = function(carry, *inputs)
        require_unchanged(function, before, carry)
        return result

    return call


class Captured:
    """A graph, the carry whose memory it reads and writes, and the memory of its other inputs and of its results."""

    def __init__(self, function: Callable[..., Any], carry: DecodeCarry, inputs: tuple[Any, ...]) -> None:
        self._device, self._function, self._carry, self._spec = carry.active.device, function, carry, structure_of(carry)
        leaves, self._inputs_spec = pytree.tree_flatten(inputs)
        self._inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._leaves = moving_leaves(carry)
        self._graph, pool, stream = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)
        here = torch.cuda.current_stream(self._device)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):  # the same stream, because libraries allocate workspaces for each
            self._advanced = _tried(function, carry, inputs)
        try:
            with recording(self._graph, pool, stream):
                self._whole, self._rest, self._rest_spec = self._record(function, carry)
        except Exception as error:  # ending a capture that has failed raises an error of its own
            raise first_error(error) from error
        here.wait_stream(stream)
        require_nothing_kept(function, pool, [leaf for leaf in self._rest if isinstance(leaf, Tensor)])
        lease = _share(carry)
        self._place = Place() if lease is None else lease.place
        self._place.holder = lease

    def _record(self, function: Callable[..., Any], carry: DecodeCarry) -> tuple[bool, list[Any], Any]:
        """Run the function, and write the tensors of its carry into the memory of `carry`. Returns its other results."""
        result = _recorded(function, carry, pytree.tree_unflatten(self._inputs, self._inputs_spec))
        after = carry_of(result)
        rest, spec = pytree.tree_flatten(None if after is result else tuple(result[1:]))
        static = {storage_of(leaf) for leaf in self._leaves}
        # A result may be memory of the carry, which the copies below overwrite.
        rest = [leaf.clone() if isinstance(leaf, Tensor) and storage_of(leaf) in static else leaf for leaf in rest]
        moved = [(old, new) for old, new in zip(self._leaves, moving_leaves(after), strict=True) if not same_place(old, new)]
        _copy([old for old, _ in moved], [new.clone() if storage_of(new) in static else new for _, new in moved])
        return after is result, rest, spec

    @torch.no_grad()
    def __call__(self, carry: DecodeCarry, *inputs: Any) -> Any:
        """Donates `carry`. Replay the graph over a carry and further inputs."""
        log, own = log_of(carry), log_of(self._carry)
        num_steps = require_fresh(log)
        require_room(log, num_steps, self._advanced)
        with watched(engine_of(log)), torch.cuda.device(self._device):
            if not self._owns(carry):
                self._take(carry)
            if inputs or self._inputs:
                self._take_inputs(inputs)
            self._graph.replay()
            rest = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self._rest]
            if not same_place(log.ran, own.ran):
                log.ran.add_(self._advanced)
        # All carries of the graph have the same memory. By the object of its counter the lease knows the newest.
        counter = own.num_steps.view(())
        after = replace(self._carry, log=replace(own, session=log.session, ran=log.ran, num_steps=counter, lease=log.lease))
        torch._dynamo.mark_static_address(counter, guard=False)
        lease = self._place.holder = _share(after)
        if lease is not None:
            lease.place = self._place
        note(log_of(after), num_steps + self._advanced)
        return after if self._whole else (after, *pytree.tree_unflatten(rest, self._rest_spec))

    def fits(self, function: Callable[..., Any], carry: DecodeCarry, *inputs: Any) -> bool:
        """Whether this is a graph of the function for carries and inputs of these shapes, and no session uses it now."""
        given, spec = pytree.tree_flatten(inputs)
        free = self._place.holder is None or self._place.holder.committed
        alike = function == self._function and spec == self._inputs_spec and structure_of(carry) == self._spec
        return free and alike and shapes_of(moving_leaves(carry)) == shapes_of(self._leaves) and shapes_of(given) == shapes_of(self._inputs)

    def _owns(self, carry: DecodeCarry) -> bool:
        """Whether all tensors of this carry are in the memory of the graph."""
        own, log, mine = self._carry, log_of(carry), log_of(self._carry)
        same = carry.batch is own.batch and carry.sampling is own.sampling and carry.active is own.active and carry.kv is own.kv
        logged = log.token_ids is mine.token_ids and log.logprobs is mine.logprobs and same_place(log.num_steps, mine.num_steps)
        others = carry.processing is own.processing and carry.token_ids is own.token_ids and log.branches is mine.branches
        return same and logged and others and carry.forward is own.forward

    def _take(self, carry: DecodeCarry) -> None:
        """Copy the tensors of a carry into the memory of the graph, except those that are there."""
        leaves = require_alike(carry, self._carry, self._spec, self._leaves)
        held = self._place.holder
        if held is not None and held is not log_of(carry).lease and not held.committed:
            raise InvalidRequestError(
                f"the carry of session {held.session} is in the memory of this function: commit it first, or capture the function for "
                "another carry"
            )
        moved = [(old, new) for old, new in zip(self._leaves, leaves, strict=True) if not same_place(old, new)]
        _copy([old for old, _ in moved], [new for _, new in moved])

    def _take_inputs(self, inputs: tuple[Any, ...]) -> None:
        for old, new in paired(inputs, self._inputs, self._inputs_spec):
            old.copy_(new, non_blocking=True)


def _tried(function: Callable[..., Any], carry: DecodeCarry, inputs: tuple[Any, ...]) -> int:
    """Run the function on copies of the tensors, which loads kernels and compiles code. Returns the steps that it takes."""
    kept = {pool.data_ptr() for pool in carry.kv.pools}

    def copy(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) and leaf.data_ptr() not in kept else leaf

    copied, given = pytree.tree_map(copy, (carry, inputs))
    before = versions_of(copied)
    with _kept_pages(carry):
        after = carry_of(function(_unchecked(with_static_addresses(copied)), *given))
    require_unchanged(function, before, copied)
    old, new = moving_leaves(carry), moving_leaves(after)
    if structure_of(after) != structure_of(carry) or shapes_of(old) != shapes_of(new):
        raise CaptureError(f"{function_name(function)} returns a carry of other shapes or another structure than it is given: {after!r}")
    return int(log_of(after).num_steps) - int(log_of(carry).num_steps)


@contextmanager
def _kept_pages(carry: DecodeCarry) -> Iterator[None]:
    """Put back the last page of each row. After one split it is spare, so a second split in a function that is tried overwrites it."""
    lasts = [] if log_of(carry).branches is None else last_pages(carry)
    pools = [as_bytes(pages) for pages in carry.kv.pools]
    kept = [pages[:, last.long()] for pages, last in zip(pools, lasts, strict=False)]
    try:
        yield
    finally:
        for pages, last, values in zip(pools, lasts, kept, strict=False):
            pages[:, last.long()] = values


def _recorded(function: Callable[..., Any], carry: DecodeCarry, inputs: tuple[Any, ...]) -> Any:
    """Run the function while a graph records it. Its errors name the caller's line."""
    try:
        return function(_unchecked(carry), *inputs)
    except NanoVLLMError:
        raise
    except Exception as error:
        raise CaptureError(f"{line_of(function, error)} cannot be part of a CUDA graph: {first_line(error)}") from error


def _unchecked(carry: DecodeCarry) -> DecodeCarry:
    """The carry with a lease that checks nothing, because a check waits for the device."""
    log = log_of(carry)
    return replace(carry, log=replace(log, lease=SessionLease(session=0, checked=False)))


def _share(carry: DecodeCarry) -> SessionLease | None:
    """Let the session's lease know that other carries have the memory of this carry. Returns the lease."""
    log = log_of(carry)
    if log.lease is not None:
        log.lease.share([log.num_steps])
    return log.lease


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, values)  # pyright: ignore[reportPrivateImportUsage]
