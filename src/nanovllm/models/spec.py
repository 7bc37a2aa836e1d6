"""`ModelSpec`: what is an architecture's own."""

from collections.abc import Callable
from dataclasses import dataclass

from nanovllm.config import ModelConfig
from nanovllm.models import transformers as fallback
from nanovllm.models.common import decoder, layers
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.hf_config import HF, config_to_hf
from nanovllm.models.common.params import ParamInfo, Params
from nanovllm.state.kv_cache import KVState
from nanovllm.types import Float, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What is an architecture's own. `layer` stands alone so that it can be compiled once for all layers; `head` is the plain one.

    `checkpoint_name` gives a checkpoint's tensor the name by which the table asks for it, None where it is not wanted. `config_to_hf` is
    `config_from_hf` backwards. `known` are models that people know by the architecture.
    """

    config_from_hf: Callable[[HF], ModelConfig]
    param_table: Callable[[ModelConfig], Params[ParamInfo]]
    layer: Callable[..., Tensor] = layers.layer
    head: Callable[..., Tensor] = layers.head
    checkpoint_name: Callable[[str], str | None] = str
    config_to_hf: Callable[[ModelConfig], HF] = config_to_hf
    known: str = ""

    def forward(
        self, params: Params[Tensor], kv: KVState, batch: Batch, config: ModelConfig, *, layer: Callable[..., Tensor] | None = None
    ) -> tuple[Float[Tensor, "R V"], KVState]:
        """Donates `kv`. `decoder.forward` with the architecture's plain layers, or with `layer`."""
        if isinstance(params, fallback.ForeignParams):
            return fallback.forward(params, kv, batch, config)
        return decoder.forward(params, kv, batch, config, layer=self.layer if layer is None else layer, head=self.head)
