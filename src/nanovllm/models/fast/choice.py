"""Which layers run in their fast form."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.config import ModelConfig
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.params import Params
from nanovllm.types import Tensor

LayerFunction = Callable[..., Tensor]  # with the signature of a model's `layer`
HeadFunction = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # with that of `layers.head`


@dataclass(frozen=True, slots=True, kw_only=True)
class FastChoice:
    """Which layers run in their fast form, and whether the head does."""

    layers: tuple[bool, ...]
    head: bool = True

    @property
    def all_layers(self) -> bool:
        """Whether no layer falls back."""
        return all(self.layers)

    @property
    def whole(self) -> bool:
        """Whether nothing falls back."""
        return self.head and self.all_layers


def all_fast(config: ModelConfig) -> FastChoice:
    """Everything in its fast form."""
    return FastChoice(layers=(True,) * config.num_layers)


def by_layer(fast: LayerFunction, plain: LayerFunction, layers: tuple[bool, ...], plan: int | None = None) -> LayerFunction:
    """A layer function that is `fast` for the layers chosen and `plain` for the others. `plan` is the handle for the fast ones alone,
    where the batch's own is for the others; None: the batch's own is for both."""
    if all(layers) and plan is None:
        return fast

    def layer(w: object, x: Tensor, pages: Tensor, index: int, cos: Tensor, sin: Tensor, batch: Batch, config: ModelConfig) -> Tensor:
        if not layers[config.layer_at(batch.window, index)]:
            return plain(w, x, pages, index, cos, sin, batch, config)
        return fast(w, x, pages, index, cos, sin, batch if plan is None else replace(batch, plan=plan), config)

    return layer


def beyond(params: Params[Any], config: ModelConfig) -> str:
    """What a model has that no fast form knows; empty where there is nothing. `params` may be the table.

    What is beyond one of them alone its own `unknown` says.
    """
    if not params.layers:
        return "layers that transformers runs"
    with_biases = params.positions is not None or params.layers[0].input_norm_bias is not None
    return "layer norms with biases" if with_biases else ""
