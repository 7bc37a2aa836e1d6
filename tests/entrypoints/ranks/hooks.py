"""What tests change in the ranks of an engine once it is made: functions that `Settings.hook` names."""

import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nanovllm.config import Mesh
from nanovllm.entrypoints.cli.bench.model_shapes import random_model
from nanovllm.errors import InvalidRequestError
from nanovllm.executor import agreed_memory
from nanovllm.executor.executor import runtime_of
from nanovllm.models.model import Model
from nanovllm.state.engine_state import EngineState
from nanovllm.state.offload import Rates
from nanovllm.testing.models import tiny_config

Made = tuple[Model, EngineState]


class Passes:
    """An executor whose passes over the device are preceded by a function of their number."""

    def __init__(self, inner: Any, before: Callable[[int], None]) -> None:
        self.inner, self.before, self.count = inner, before, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in ("prefill", "score", "decode"):
            return found

        def run(*args: Any, **options: Any) -> Any:
            self.count += 1
            self.before(self.count)
            return self.changed(name, found(*args, **options))

        return run

    def changed(self, name: str, result: Any) -> Any:
        """The result of a pass."""
        return result


class OtherToken(Passes):
    """The third decode step samples another token."""

    def changed(self, name: str, result: Any) -> Any:
        """The result with another token."""
        if name == "decode" and self.count == 4:
            carry, drawn = result
            return carry, replace(drawn, token_ids=drawn.token_ids + 1)
        return result


def _with(state: EngineState, kind: type[Passes], before: Callable[[int], None]) -> None:
    runtime = runtime_of(state)
    runtime.executor = kind(runtime.executor, before)


def together(group: Any) -> None:
    """What a sharded model does in every layer: wait for the other ranks."""
    torch.distributed.all_reduce(torch.ones(4), group=group)


def joined(rank: int, model: Model, state: EngineState, group: Any) -> Made:
    """Every pass waits for the other ranks."""
    _with(state, Passes, lambda count: together(group))
    return model, state


def always_loading(rank: int, model: Model, state: EngineState, group: Any) -> Made:
    """What is in host memory is always loaded, however fast this machine copies; and every pass waits for the other ranks."""
    return joined(rank, model, with_rates(state, Rates(tokens_per_second=1.0, bytes_per_second=1e15)), group)


def with_rates(state: EngineState, rates: Rates) -> EngineState:
    """The state of an engine with other rates of its host memory."""
    host = state.pool.host
    assert host is not None
    return replace(state, pool=replace(state.pool, host=replace(host, rates=rates)))


def slow_then_stuck(rank: int, model: Model, state: EngineState, group: Any) -> Made:
    """Three passes of rank 1 take longer together than ranks may be silent, and it never ends its fifth one."""

    def before(count: int) -> None:
        time.sleep(2.5 if rank and count < 4 else 0.0)
        while rank and count == 5:
            time.sleep(0.01)
        together(group)

    _with(state, Passes, before)
    return model, state


def short_of_memory(rank: int, model: Model, state: EngineState, group: Any) -> Made:
    """Rank 1 runs out of device memory in its third pass."""

    def before(count: int) -> None:
        if rank and count == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        together(group)

    _with(state, Passes, before)
    return model, state


def leader_short(rank: int, model: Model, state: EngineState, group: Any) -> Made:
    """Rank 0 runs out of device memory in its third pass, while rank 1 waits for it."""

    def before(count: int) -> None:
        if not rank and count == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        together(group)

    _with(state, Passes, before)
    return model, state


def collects_little(rank: int, model: Model, state: EngineState, group: Any) -> Made:
    """Rank 1 fails if what it has made is not excluded from garbage collections."""

    def before(count: int) -> None:
        if rank and gc.get_freeze_count() < 10_000:
            raise RuntimeError("a full collection would go over the whole engine")

    _with(state, Passes, before)
    return model, state


def other_token(rank: int, model: Model, state: EngineState, group: Any) -> Made:
    """Rank 1 samples another token."""
    _with(state, OtherToken if rank else Passes, lambda count: None)
    return model, state


def other_state(rank: int, model: Model, state: EngineState, group: Any) -> Made:
    """Rank 1 has learned another length of replies."""
    return model, replace(state, expected_reply=state.expected_reply + rank)


def exits(rank: int, model: Model, state: EngineState, group: Any) -> Made:
    """Rank 1 ends while it starts."""
    if rank:
        print("what the library said at last", flush=True)
        os._exit(7)
    time.sleep(0.1)
    return model, state


def refuses(rank: int, model: Model, state: EngineState, group: Any) -> Made:
    """Rank 1 cannot start, while rank 0 waits for it."""
    if rank:
        raise InvalidRequestError("there is no cuda:1")
    together(group)
    return model, state


SMALL = tiny_config(max_position_embeddings=1024)


def small_weights(name: str, *, device: torch.device, mesh: Mesh, **rounding: Any) -> Model:
    """What `random_weights` makes, with a shape that processes of tests know."""
    return random_model(f"{name} (random weights)", SMALL, device=device, dtype=rounding["dtype"], mesh=mesh)


def other_weights(name: str, *, device: torch.device, mesh: Mesh, **rounding: Any) -> Model:
    """As `small_weights`, but rank 1 has other values in its part of one matrix."""
    model = small_weights(name, device=device, mesh=mesh, **rounding)
    if mesh.rank:
        model.params.layers[1].o.mul_(1.01)
    return model


class Short:
    """In place of `take_memory`: some of its calls find too little memory."""

    def __init__(self, calls: range) -> None:
        self.calls, self.count = calls, 0

    def __call__(self, device: torch.device, num_bytes: int) -> None:
        self.count += 1
        if self.count in self.calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def short_before_a_pass(rank: int, model: Model, state: EngineState, group: Any) -> Made:
    """Rank 1 finds before its first and fourth pass that it lacks the memory. The process of rank 0 is that of the test, and stays."""
    if rank:
        agreed_memory.take_memory = Short(range(1, 5, 3))
    return model, state


def short_for_five_passes(rank: int, model: Model, state: EngineState, group: Any) -> Made:
    """Rank 1 lacks the memory of its first five passes."""
    if rank:
        agreed_memory.take_memory = Short(range(1, 6))
    return model, state
