"""The fast forms of a decode layer and of the head: which of them a model has here, and for which layers they are used."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..batch import Batch
from ..config import ModelConfig
from ..ops.native import library
from ..ops.rope_attend import FusedDecodePlan
from ..types import Tensor
from . import cpu, fused
from .params import Params

LayerFunction = Callable[..., Tensor]  # with the signature of a model's `layer`
HeadFunction = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # with that of `layers.head`


@dataclass(frozen=True, slots=True, kw_only=True)
class FastPath:
    """What runs decode steps in the place of a model's `layer` and `layers.head`.

    `plan` makes the memory that a batch of so many rows needs and whose handle goes into `Batch.plan`, None where there is no need.
    """

    name: str
    layer: LayerFunction
    head: HeadFunction
    plan: Callable[[int], FusedDecodePlan | None]


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


def fast_path(params: Params[Tensor], config: ModelConfig, num_rows: int) -> FastPath | None:
    """The fast form of a decode step of this many rows; None where the model has none here.

    On a GPU: five kernels a layer (`fused.py`). On a CPU: C (`cpu.py`), in float32 and bfloat16, where there is a compiler.
    """
    device, dtype = params.embed.device, params.embed.dtype
    if device.type == "cuda" and fused.serves(params, num_rows):

        def plan(rows: int) -> FusedDecodePlan:
            return FusedDecodePlan(rows, config.num_heads, config.num_kv_heads, config.head_dim, device)

        return FastPath(name="fused", layer=fused.decode_layer, head=fused.head, plan=plan)
    if device.type == "cpu" and dtype in cpu.DTYPES and library(cpu.SOURCE, cpu.SYMBOLS) is not None:
        return FastPath(name="C", layer=cpu.decode_layer, head=cpu.head, plan=lambda _: None)
    return None


def by_layer(fast: LayerFunction, plain: LayerFunction, layers: tuple[bool, ...], plan: int | None = None) -> LayerFunction:
    """A layer function that is `fast` for the layers chosen and `plain` for the others. `plan` is the handle for the fast ones alone,
    where the batch's own is for the others; None: the batch's own is for both."""
    if all(layers) and plan is None:
        return fast

    def layer(w: object, x: Tensor, pages: Tensor, index: int, cos: Tensor, sin: Tensor, batch: Batch, config: ModelConfig) -> Tensor:
        if not layers[index]:
            return plain(w, x, pages, index, cos, sin, batch, config)
        return fast(w, x, pages, index, cos, sin, batch if plan is None else replace(batch, plan=plan), config)

    return layer
