"""The memory of a pass over the layers, for ranks that share a model: all of them have it, or none begins the pass.

A rank that runs out of memory between two sums over the ranks leaves the others waiting. So each rank takes the memory of a pass before it
begins, gives it back to torch's allocator, from which the pass gets it, and tells the others whether it had so much. Replays of CUDA
graphs, whose memory is taken when they are captured, do without. Sampling after a replayed prompt takes memory and does without, too: a
shortage there ends the engine.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from nanovllm.config import ModelConfig
from nanovllm.errors import EngineDeadError
from nanovllm.executor.distributed import left, of_each_rank
from nanovllm.models.model import Model
from nanovllm.state.device_errors import fatal, out_of_memory

R = TypeVar("R")
WIDE = 4  # bytes of a number in float32, in which tokens are sampled
SAMPLED = 256  # rows of logits in float32, at most: those that are scored go in pieces
SHORT, BROKEN = 1, 2  # what a rank tells the others: it has too little memory, or it failed otherwise


class SharedShortage(torch.OutOfMemoryError):
    """A rank lacks the memory of a pass. All ranks raise this before the pass, so that all go on in the same way."""


def prepared(model: Model, num_tokens: int, num_logits: int, make: Callable[[], R]) -> R:
    """Make the inputs of a pass, and see that it has memory on all ranks, which call this at the same time. On one rank: only make them.

    Args:
        model: The model.
        num_tokens: Tokens that run through the layers.
        num_logits: Tokens whose logits are computed.
        make: Makes the inputs on the device.

    Raises:
        SharedShortage: A rank has too little memory.
        EngineDeadError: Another rank failed otherwise, and raises its own error.
    """
    mesh = model.config.mesh
    if mesh is None or mesh.size == 1:
        return make()
    made, failure = list[R](), None
    try:
        made.append(make())
        take_memory(model.device, pass_bytes(model.config, model.dtype.itemsize, num_tokens, num_logits))
    except Exception as error:
        if fatal(error) is not None or not out_of_memory(error):
            with suppress(EngineDeadError):  # others have failed, too
                of_each_rank(mesh, BROKEN)  # the others would wait
            left(mesh)  # their engines are dead now, so this rank must not wait for them either
            raise
        failure = error.with_traceback(None)  # which holds what `make` has made
    told = of_each_rank(mesh, SHORT if failure is not None else 0)
    if broken := [rank for rank, one in enumerate(told) if one == BROKEN]:
        raise EngineDeadError(f"rank {broken[0]} of {mesh.size} failed before a pass of {num_tokens} tokens")
    if short := [rank for rank, one in enumerate(told) if one]:
        which = f"rank{'s' * (len(short) > 1)} {', '.join(map(str, short))} of {mesh.size}"
        raise SharedShortage(f"out of memory on {which}: a pass of {num_tokens} tokens does not fit") from failure
    return made[0]


def take_memory(device: torch.device, num_bytes: int) -> None:
    """Let the allocator of a GPU take memory from the device, unless it has it, and keep it for what follows.

    Raises:
        torch.OutOfMemoryError: The device has too little.
    """
    if device.type == "cuda":
        torch.empty(num_bytes, dtype=torch.uint8, device=device)


def pass_bytes(config: ModelConfig, itemsize: int, num_tokens: int, num_logits: int) -> int:
    """About the most bytes that a pass holds at once: at the widest point of a layer, or while the ranks' logits are put together.

    Args:
        config: The config of a rank.
        itemsize: The bytes of an activation.
        num_tokens: Tokens that run through the layers.
        num_logits: Tokens whose logits are computed.
    """
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    feed_forward = 3 * config.intermediate_size
    if config.moe is not None:
        routed = config.moe.top_k * (3 * config.moe.intermediate_size + config.hidden_size)
        feed_forward = max(feed_forward, routed + 3 * config.moe.shared_size)
    layer = num_tokens * itemsize * (4 * config.hidden_size + max(attention, feed_forward))
    own = -(-config.vocab_size // (1 if config.mesh is None else config.mesh.size))
    logits = num_logits * itemsize * (own + config.vocab_size)
    sampling = min(num_logits, SAMPLED) * config.vocab_size * 2 * WIDE
    return max(layer, logits + sampling)
