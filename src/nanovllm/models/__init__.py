"""The architectures: one file each, found by the name that a Hugging Face `config.json` gives in `architectures`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..batch import Batch
from ..config import HF, ModelConfig
from ..state.kv import KVState
from ..types import Float, Tensor
from . import cpu, fused, layers, llama, qwen3
from .choice import FastChoice, by_layer
from .params import Layer, ParamInfo, Params

__all__ = ["REGISTRY", "FastChoice", "Layer", "ModelSpec", "ParamInfo", "Params", "forward", "fused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The four functions of one architecture; `layer` stands alone so that it can be compiled once for all layers."""

    config_from_hf: Callable[[HF], ModelConfig]
    param_table: Callable[[ModelConfig], Params[ParamInfo]]
    layer: Callable[..., Tensor]
    forward: Callable[..., tuple[Tensor, KVState]]


REGISTRY: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "Qwen3ForCausalLM": ModelSpec(
            config_from_hf=qwen3.config_from_hf, param_table=qwen3.param_table, layer=qwen3.layer, forward=qwen3.forward
        ),
        "LlamaForCausalLM": ModelSpec(
            config_from_hf=llama.config_from_hf, param_table=llama.param_table, layer=llama.layer, forward=llama.forward
        ),
    }
)


def forward(
    params: Params[Tensor],
    kv: KVState,
    batch: Batch,
    config: ModelConfig,
    *,
    layer: Callable[..., Tensor] | None = None,
    fast: FastChoice | None = None,
) -> tuple[Float[Tensor, "R V"], KVState]:
    """Donates `kv`. Run one step's tokens through the model: logits `[R, V]` in the model's dtype, and the new KV state.

    R is the length of `batch.logit_indices`, or every token when that is None. `layer` replaces the architecture's own layer function
    by a compiled form of it. On a CPU decode batches run in C where there is a compiler (`cpu.py`), all layers of them or those of `fast`;
    an architecture's own `forward` never does.
    """
    spec = REGISTRY[config.architecture]
    if layer is None and cpu.serves(params, kv, batch):
        if fast is None:
            return spec.forward(params, kv, batch, config, layer=cpu.decode_layer, head=cpu.head)
        chosen = by_layer(cpu.decode_layer, spec.layer, fast.layers)
        return spec.forward(params, kv, batch, config, layer=chosen, head=cpu.head if fast.head else layers.head)
    return spec.forward(params, kv, batch, config, layer=spec.layer if layer is None else layer)
