"""`decode_loop`: a loop of decode steps as one call, in the manner of `jax.lax.scan`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nanovllm.engine.donation import enter_with
from nanovllm.errors import InvalidRequestError
from nanovllm.executor.capture import Captured, capture
from nanovllm.executor.decode import decode_step, donated
from nanovllm.executor.decode_carry import DecodeCarry
from nanovllm.executor.fresh_carry import log_of, require_fresh
from nanovllm.models.model import Model
from nanovllm.state.device_errors import watched
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import same_memory
from nanovllm.types import Bool, Tensor, brief

Body = Callable[[DecodeCarry], tuple[DecodeCarry, Any]]
LOOK = 8  # steps between two looks at a GPU's rows


@torch.no_grad()
def decode_loop(
    model: Model,
    state: EngineState,
    carry: DecodeCarry,
    steps: int,
    body: Body | None = None,
    *,
    until: Callable[[Any], Bool[Tensor, "B"]] | None = None,
) -> tuple[DecodeCarry, Any]:
    """Donates `carry`. Run a function of the carry `steps` times, and stack what it returns.

    On a GPU the function is captured once, and each of the steps replays its graph. A function that `capture` returned is replayed as it
    is, so that several loops need one capture. In traced code the loop is unrolled into the caller's graph.

    Source: `jax.lax.scan`, https://docs.jax.dev/en/latest/_autosummary/jax.lax.scan.html.

    Args:
        model: The model of `init_state`.
        state: The newest state of the engine. It is only read, and stays valid.
        carry: A carry of `begin`, or of a later step.
        steps: How often `body` runs, at least 1.
        body: A function from a carry to the next carry and a pytree of tensors, such as
            `lambda carry: decode_step(model.params, carry, model.config)`. None: one `decode_step`, which returns its token ids.
        until: A function from that pytree to bool `[B]`, true for rows that stop. A row that has stopped adds no more tokens to its reply;
            what the body returns for it is of no use. After all rows have stopped, the loop ends. It runs on the device.

    Returns:
        The carry after the last step, and the pytree of stacked tensors `[steps, ...]`. They are zeros for steps after all rows had
        stopped. Leaves that are no tensors, such as None, stay as they are.

    Raises:
        InvalidRequestError: `steps` is no integer of at least 1, the steps exceed the session's room, an argument has the wrong type,
            `body` or `until` returns something else, or the carry began in another engine.
        DonatedStateError: `carry` or `state` was donated.
        CaptureError: `body` or `until` cannot be captured.

    Examples:
        >>> state, carry = nv.begin(model, state, ["Once upon a time", "The cat"], nv.SamplingParams(temperature=0), room=8)
        >>> full_stop = model.tokenizer.encode(".", add_special_tokens=False)[0]
        >>> carry, tokens = nv.decode_loop(model, state, carry, 8, until=lambda tokens: tokens == full_stop)
        >>> tuple(tokens.shape)
        (8, 2)
        >>> state, replies = nv.commit(model, state, carry)
        >>> [reply.text for reply in replies]
        [', a boy named Jonas lived in a', ' is the national animal of Poner']
    """
    body = _plain_step(model) if body is None else body
    step = plain = body if until is None else _stopping(body, until)
    if torch.compiler.is_compiling():
        rows = []
        for _ in range(steps):
            carry, row = _pair(step(carry))
            rows.append(row)
        return carry, _stacked(rows, steps)
    _require(model, state, carry, steps)
    rows, going = [], Rows()
    with watched(state.runtime.lease):
        for count in range(1, steps + 1):
            # The step that runs prompts has shapes of its own.
            if carry.active.is_cuda and carry.prompt is None and step is plain and not isinstance(body, Captured):
                step = capture(plain, carry)
            carry, row = _pair(step(carry))
            rows.append(row)
            if until is not None and going.all_stopped(carry, count):
                break
        return carry, _stacked(rows, steps)


def _plain_step(model: Model) -> Body:
    params, config = model.params, model.config

    def step(carry: DecodeCarry) -> tuple[DecodeCarry, Tensor]:
        carry, out = decode_step(params, carry, config)
        return carry, out.token_ids

    return step


def _stopping(body: Body, until: Callable[[Any], Tensor]) -> Body:
    """The function, with rows that stop as `until` says."""

    def step(carry: DecodeCarry) -> tuple[DecodeCarry, Any]:
        going = (carry.active > 0).any()
        carry, row = _pair(body(carry))
        over = until(row)
        if not isinstance(over, Tensor) or over.shape != carry.active.shape or over.dtype != torch.bool:
            raise InvalidRequestError(f"until returns {brief(over)}: it must return bool {list(carry.active.shape)}, one for each row")
        active = torch.where(over, 0, carry.active)
        row = pytree.tree_map_only(Tensor, lambda tensor: torch.where(going, tensor, torch.zeros_like(tensor)), row)
        return replace(carry, active=donated(carry.active, active)), row

    return step


def _stacked(rows: list[Any], steps: int) -> Any:
    """The trees of tensors as one tree of tensors `[steps, ...]`, with zeros for steps that did not run."""
    missing = steps - len(rows)

    def stacked(*each: Any) -> Any:
        return torch.stack([*each, *[torch.zeros_like(each[0])] * missing]) if isinstance(each[0], Tensor) else each[0]

    return pytree.tree_map(stacked, *rows)


def _pair(result: Any) -> tuple[DecodeCarry, Any]:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], DecodeCarry):
        raise InvalidRequestError(f"body returns {type(result).__name__}: it must return the next carry and a pytree of tensors")
    return result


class Rows:
    """Sees on the host whether all rows have stopped. On a GPU it sees the rows of the look before, so that the device always has work."""

    def __init__(self) -> None:
        self._seen: tuple[torch.cuda.Event, Tensor] | None = None

    def all_stopped(self, carry: DecodeCarry, count: int) -> bool:
        """Whether all rows have stopped after `count` steps, as far as the host knows."""
        if not carry.active.is_cuda:
            return not bool((carry.active > 0).any())
        if count % LOOK:
            return False
        before, event = self._seen, torch.cuda.Event()
        going = torch.empty((), dtype=torch.bool, pin_memory=True).copy_((carry.active > 0).any(), non_blocking=True)
        event.record()
        self._seen = event, going
        if before is None:
            return False
        before[0].synchronize()
        return not bool(before[1])


def _require(model: Model, state: EngineState, carry: DecodeCarry, steps: int) -> None:
    enter_with(model, state)
    log = log_of(carry)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InvalidRequestError(f"steps={steps!r} must be an integer of at least 1")
    if not same_memory(carry.kv, state.kv):
        raise InvalidRequestError("the carry began in another engine: pass the state that begin returned, or a later one")
    num_steps, room = require_fresh(log), log.token_ids.shape[1]
    if num_steps + steps > room:
        raise InvalidRequestError(f"steps={steps} exceed the room of the session: {num_steps} of {room} steps have run")
