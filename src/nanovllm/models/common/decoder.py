"""The forward pass of a decoder: embedding, layers, head. All architectures share it."""

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
    """Donates `kv`. Run one step's tokens.

    Args:
        params: The weights.
        kv: The KV memory. It is overwritten; use the returned value.
        batch: The tokens of the step.
        config: The model's config.
        layer: The architecture's layer function, or another form of it: compiled, or a kernel.
        head: The architecture's head, or another form of it.

    Returns:
        The logits `[R, V]` in the model's dtype, and the KV state that holds the new keys and values.
    """
    # Not strict: some callers run only the first layers.
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
    """The logits of the last layer's output, computed by `head`, and soft-capped by `cap` if the model has a soft cap."""
    weight = params.embed if params.head is None else params.head
    bias = () if params.final_norm_bias is None else (params.final_norm_bias,)
    return cap(head(x_RM, params.final_norm, weight, config.rms_norm_eps, *bias), config.logit_softcap)
