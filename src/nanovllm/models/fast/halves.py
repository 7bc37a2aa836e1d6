"""One pass over prompts as two, whose layers take turns: while the ranks sum the output of one half, the other half computes.

Both halves run on the current stream, so they share all scratch memory, and the second one finds what the first one has written. Only the
sums run beside, on the stream of NCCL, from their beginning to the step of their half that needs them:

    half A   attention | sum                | MLP | sum                | attention ...
    half B             | attention | sum          | MLP       | sum    ...
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import torch

from nanovllm.config import ModelConfig
from nanovllm.models.common import decoder, layers
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.params import Params
from nanovllm.models.fast.choice import FastChoice
from nanovllm.models.fast.cuts import DEFAULT, Cuts
from nanovllm.models.fast.fused import Steps, wide_layer_steps
from nanovllm.ops.elementwise.decode_rows import capped_logits
from nanovllm.ops.linear.linear import linear
from nanovllm.ops.linear.linear_add_norm import norm_add
from nanovllm.state.kv_cache import KVState
from nanovllm.types import Float, Tensor

R = TypeVar("R")


def forward(
    params: Params[Tensor],
    kv: KVState,
    halves: Sequence[Batch],
    config: ModelConfig,
    *,
    choice: FastChoice | None = None,
    cuts: Cuts | None = None,
) -> tuple[Float[Tensor, "R V"], KVState]:
    """Donates `kv`. Run prompts as `fused.forward` does, in two passes whose layers take turns.

    Args:
        params: The weights. `fused.serves` them.
        kv: The KV memory. It is overwritten; use the returned value.
        halves: Batches of prompts. A batch may attend to KV that an earlier one writes, but not to that of a later one.
        config: The model's config.
        choice: Whether the head runs in its fast form; None means that it does. All layers do.
        cuts: The tile configurations of the kernels; None for the defaults.

    Returns:
        The logits of the first half and then those of the second, and the KV state that holds the new keys and values.
    """
    ended = in_turns([_half(params, kv, half, config, cuts) for half in halves])
    x, h = (torch.cat(parts) for parts in zip(*ended, strict=True))
    if choice is not None and not choice.head:
        return decoder.logits(layers.head, x, params, config, cap=capped_logits), kv
    own = linear(h, params.embed if params.head is None else params.head)
    return capped_logits(decoder.gathered(own, config), config.logit_softcap), kv


def in_turns(computations: Sequence[Steps[R]]) -> list[R]:
    """Run computations step by step, in turns, and return what each returns.

    Examples:
        >>> def count(name, steps):
        ...     for step in range(steps):
        ...         print(name, step)
        ...         yield
        ...     return name
        >>> in_turns([count("A", 1), count("B", 2)])
        A 0
        B 0
        B 1
        ['A', 'B']
    """
    running, results = dict(enumerate(computations)), dict[int, R]()
    while running:
        for number, steps in list(running.items()):
            try:
                next(steps)
            except StopIteration as end:
                results[number] = end.value
                del running[number]
    return [results[number] for number in range(len(results))]


def _half(params: Params[Tensor], kv: KVState, batch: Batch, config: ModelConfig, cuts: Cuts | None) -> Steps[tuple[Tensor, Tensor]]:
    """The last layer's output for the tokens whose logits are returned, and its final norm. Yields wherever another half may run."""
    given = layers.given_each(params, batch, config)  # before the embedding, as in `fused.forward`
    x = layers.embed(params, batch, config)
    h = norm_add(x, params.layers[0].input_norm, None, config.rms_norm_eps)
    here = DEFAULT if cuts is None else cuts.at(len(x))
    yield  # the sum over the ranks of the other half's embedding comes before all sums that are begun ahead
    gains = (*(w.input_norm for w in params.layers), params.final_norm)
    each = zip(params.layers, pairwise(gains), config.places, given, strict=False)
    for at, (w, (_, gain), (pool, index), (cos, sin, view)) in enumerate(each):
        wanted = batch.logit_indices if at == len(params.layers) - 1 else None
        x, h = yield from wide_layer_steps(
            w, x, h, gain, kv.pools[pool], index, cos, sin, view, config, wanted=wanted, cuts=here, ahead=True
        )  # fmt: skip
    return x, h
