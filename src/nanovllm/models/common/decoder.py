"""The forward pass of a decoder: embed, one layer after the other, the head. All architectures share it."""

from collections.abc import Callable

from nanovllm.config import ModelConfig
from nanovllm.models.common import layers
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.params import Params
from nanovllm.ops.elementwise.norm_rope import soft_cap
from nanovllm.state.kv_cache import KVState
from nanovllm.types import Float, Tensor


def forward(
    params: Params[Tensor],
    kv: KVState,
    batch: Batch,
    config: ModelConfig,
    *,
    layer: Callable[..., Tensor] = layers.layer,
    head: Callable[..., Tensor] = layers.head,
) -> tuple[Float[Tensor, "R V"], KVState]:
    """Donates `kv`. Run one step's tokens: logits `[R, V]` in the model's dtype, and the KV state that holds the tokens' keys and values.

    `layer` is an architecture's, and it and `head` may be other forms of these: compiled ones, or kernels.
    """
    # Not strict: some callers run the first layers alone.
    x_TM = layers.embed(params, batch, config)
    for w, (pool, index), given in zip(params.layers, config.places, layers.given_each(params, batch, config), strict=False):
        cos, sin, view = given
        x_TM = layer(w, x_TM, kv.pools[pool], index, cos, sin, view, config)
    x_RM = x_TM if batch.logit_indices is None else x_TM[batch.logit_indices]
    return logits(head, x_RM, params, config), kv


def logits(
    head: Callable[..., Tensor],
    x_RM: Float[Tensor, "R M"],
    params: Params[Tensor],
    config: ModelConfig,
    *,
    cap: Callable[[Tensor, float], Tensor] = soft_cap,
) -> Float[Tensor, "R V"]:
    """What a form of the head makes of the last layer's output, soft-capped by `cap` where the model does that."""
    weight = params.embed if params.head is None else params.head
    bias = () if params.final_norm_bias is None else (params.final_norm_bias,)
    return cap(head(x_RM, params.final_norm, weight, config.rms_norm_eps, *bias), config.logit_softcap)
