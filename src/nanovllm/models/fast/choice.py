"""`FastChoice`: which layers run in their fast form, and the layer function that obeys it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.config import ModelConfig
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.params import Params, matrices
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.types import Tensor

LayerFunction = Callable[..., Tensor]  # with the signature of a model's `layer`
HeadFunction = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # with the signature of `layers.head`


@dataclass(frozen=True, slots=True, kw_only=True)
class FastChoice:
    """Which layers run in their fast form, and whether the head does. The fast form is Triton kernels on a GPU and C on a CPU.

    Attributes:
        layers: For each layer, whether it runs in its fast form.
        head: Whether the final norm and the logits run in their fast form.

    Examples:
        >>> from nanovllm.models import FastChoice
        >>> choice = FastChoice(layers=(True, False), head=True)
        >>> choice.all_layers, choice.whole
        (False, False)
    """

    layers: tuple[bool, ...]
    head: bool = True

    @property
    def all_layers(self) -> bool:
        """Whether every layer runs in its fast form."""
        return all(self.layers)

    @property
    def whole(self) -> bool:
        """Whether every layer and the head run in their fast form."""
        return self.head and self.all_layers


def all_fast(config: ModelConfig) -> FastChoice:
    """The choice of the fast form for every layer and the head."""
    return FastChoice(layers=(True,) * config.num_layers)


def by_layer(fast: LayerFunction, plain: LayerFunction, layers: tuple[bool, ...], plan: int | None = None) -> LayerFunction:
    """A layer function that calls `fast` for the chosen layers and `plain` for the others.

    Args:
        fast: The fast form of a layer.
        plain: The plain PyTorch form of a layer.
        layers: For each layer, whether `fast` runs it.
        plan: The attention plan for `fast` only; `plain` gets the plan of the batch. None: both get the plan of the batch.
    """
    if all(layers) and plan is None:
        return fast

    def layer(w: object, x: Tensor, pages: Tensor, index: int, cos: Tensor, sin: Tensor, batch: Batch, config: ModelConfig) -> Tensor:
        if not layers[config.layer_at(batch.window, index)]:
            return plain(w, x, pages, index, cos, sin, batch, config)
        return fast(w, x, pages, index, cos, sin, batch if plan is None else replace(batch, plan=plan), config)

    return layer


def quantised(params: Params[Any]) -> bool:
    """Whether a matrix of the model is quantised."""
    return any(isinstance(matrix, QuantisedMatrix) for matrix in (params.head, *(m for layer in params.layers for m in matrices(layer))))


def beyond(params: Params[Any], config: ModelConfig) -> str:
    """The feature of a model that neither fast form supports; empty if it has none. `params` may be the table.

    `fused.unknown` and `cpu.unknown` add the features that only one of the two forms lacks.
    """
    if not params.layers:
        return "layers that transformers runs"
    with_biases = params.positions is not None or params.layers[0].input_norm_bias is not None
    return "layer norms with biases" if with_biases else ""
