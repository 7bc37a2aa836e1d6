"""Layers that the architectures share: rotary angles, the common decoder layer and its parts, the head.

Legend of shape suffixes: T tokens · R rows of logits · M hidden_size · H query heads · K key/value heads · D head_dim · X any heads ·
F intermediate_size · E experts · k experts per token.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.config import ModelConfig, MoEConfig, RopeConfig
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.params import Experts, Layer, Params
from nanovllm.ops import kv_write, paged_decode, paged_prefill, route
from nanovllm.ops.attention.whole_prompts import attend_prompts
from nanovllm.ops.distributed.collectives import all_reduce
from nanovllm.ops.elementwise.decode_rows import angles, rotary_angles
from nanovllm.ops.elementwise.norm_rope import apply_rope, rms_norm
from nanovllm.ops.linear.linear import linear
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.linear.quantised_linear import plain_linear
from nanovllm.ops.moe.quantised_experts import any_experts, plain_experts
from nanovllm.ops.moe.route import plain_route
from nanovllm.types import Float, Float32, Tensor


class Functions(NamedTuple):
    """The functions of a decoder that have two forms: `ENGINE` and `PLAIN`."""

    angles: Callable[..., tuple[Tensor, Tensor]]
    linear: Callable[..., Tensor]
    route: Callable[..., tuple[Tensor, Tensor]]
    experts: Callable[..., Tensor]


ENGINE = Functions(rotary_angles, linear, route, any_experts)  # ops for kernels, and rows whose bits do not depend on the batch
PLAIN = Functions(angles, plain_linear, plain_route, plain_experts)  # plain torch, which `torch.func` can transform


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Float32[Tensor, "half"]:
    """The rotation speed of each pair of channels, `[D/2]` float32, in radians per position.

    If only a part of a head is rotated, the last pairs have speed 0.
    Source: Su et al., 2021; `llama3` from the Llama 3.1 reference code; `yarn` from Peng et al., 2023, "NTK-by-parts"; `longrope` from
    Ding et al., 2024.
    """
    turning = int(head_dim * rope.partial)
    if turning < head_dim:
        return F.pad(inverse_frequencies(replace(rope, partial=1.0), turning), (0, (head_dim - turning) // 2))
    speed = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.kind:
        case "default":
            return speed
        case "learned":
            return torch.zeros_like(speed)
        case "longrope":
            return speed / torch.tensor(rope.factors, dtype=torch.float32)
        case "linear":
            return speed / rope.factor
        case "llama3":
            wavelength = 2 * math.pi / speed
            longest = rope.original_max_position_embeddings / rope.low_freq_factor
            shortest = rope.original_max_position_embeddings / rope.high_freq_factor
            smooth = (rope.original_max_position_embeddings / wavelength - rope.low_freq_factor) / (
                rope.high_freq_factor - rope.low_freq_factor
            )
            blended = (1 - smooth) * speed / rope.factor + smooth * speed
            slowed = torch.where(wavelength > longest, speed / rope.factor, speed)
            return torch.where((wavelength >= shortest) & (wavelength <= longest), blended, slowed)
        case "yarn":
            low, high = (_yarn_channel(rope, head_dim, turns) for turns in (rope.beta_fast, rope.beta_slow))
            if rope.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, head_dim - 1)
            span = high - low if high != low else 0.001  # a step instead of a ramp, without dividing by zero
            interpolated = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
            return speed / rope.factor * interpolated + speed * (1 - interpolated)
        case kind:
            raise ValueError(f"rope kind {kind!r} is not one of default, linear, llama3, yarn, longrope, learned")


def _yarn_channel(rope: RopeConfig, head_dim: int, turns: float) -> float:
    """The index of the channel pair that makes `turns` full rotations over the original context."""
    return head_dim * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def rope_angles(
    positions_T: Tensor, inv_freq: Float32[Tensor, "half"], rope: RopeConfig, functions: Functions = ENGINE
) -> tuple[Float32[Tensor, "T 1 D"], Float32[Tensor, "T 1 D"]]:
    """Cosines and sines of every token's angles, times the attention factor, `[T, 1, D]` float32.

    The sines have the sign of the second term of `apply_rope`. They are computed once per forward, and all layers share them.
    """
    return functions.angles(positions_T, inv_freq, rope.attention_factor)


def embed(params: Params[Tensor], batch: Batch, config: ModelConfig, rows: Float[Tensor, "T M"] | None = None) -> Float[Tensor, "T M"]:
    """The tokens' embeddings, times the config's scale rounded to the model's dtype, plus learned positions if the model has them.

    `rows` are taken in place of the rows of the embedding table.
    """
    x_TM = looked_up(params.embed, batch.input_ids, config) if rows is None else rows.to(params.embed.dtype)
    if config.embed_scale != 1.0:
        x_TM = x_TM * torch.full((), config.embed_scale, dtype=x_TM.dtype, device=x_TM.device)
    return x_TM if params.positions is None else x_TM + F.embedding(batch.positions, params.positions)


def looked_up(table: Tensor, input_ids: Tensor, config: ModelConfig) -> Float[Tensor, "T M"]:
    """The rows of the embedding table. If ranks share it, each gives zeros for the tokens of the others, and the sum is exact."""
    if (mesh := config.mesh) is None:
        return F.embedding(input_ids, table)
    wanted = input_ids - mesh.rank * table.shape[0]
    near = wanted.clamp(0, table.shape[0] - 1)
    return all_reduce(torch.where((near == wanted).unsqueeze(1), F.embedding(near, table), 0.0), mesh)


def given_each(
    params: Params[Tensor], batch: Batch, config: ModelConfig, functions: Functions = ENGINE
) -> list[tuple[Tensor, Tensor, Batch]]:
    """The arguments of each layer for a step: cosines, sines, and the batch with the layer's window and the tables of its pool."""
    far = rope_angles(batch.positions, params.inv_freq, config.rope, functions)
    if not config.windows:
        return [(*far, batch)] * config.num_layers
    near = far
    if params.local_inv_freq is not None and config.local_rope is not None:
        near = rope_angles(batch.positions, params.local_inv_freq, config.local_rope, functions)
    tables, own = replace(batch, windowed=None), batch.windowed
    of_pool = (tables, tables if own is None else replace(tables, page_tables=own.page_tables, slots=own.slots, plan=own.plan))
    views = {window: replace(of_pool[1 if window else 0], window=window) for window in set(config.windows)}
    return [(*(near if window else far), views[window]) for window in config.windows]


def layer(
    w: Layer[Tensor], x_TM: Tensor, pages: Tensor | None, index: int, cos: Tensor, sin: Tensor, batch: Batch, config: ModelConfig
) -> Tensor:
    """Donates `pages`. The decoder layer that most architectures share: norm, attention, residual sum, norm, feed-forward, residual sum.

    It writes k and v of layer `index` into `pages`, and can be compiled alone. Parts without weights are skipped: norms of query and key
    heads, norms before a residual sum, biases, experts. Without `pages` all functions are plain torch, which `torch.func` can transform.
    """
    eps, functions = config.rms_norm_eps, PLAIN if pages is None else ENGINE
    h_TM = rms_norm(x_TM, w.input_norm, eps)
    heads_TXD = functions.linear(h_TM, w.qkv, w.qkv_bias).unflatten(-1, (-1, config.head_dim))
    q_THD, k_TKD, v_TKD = heads_TXD.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
    q_THD = apply_rope(q_THD if w.q_norm is None else rms_norm(q_THD, w.q_norm, eps), cos, sin)
    k_TKD = apply_rope(k_TKD if w.k_norm is None else rms_norm(k_TKD, w.k_norm, eps), cos, sin)
    a_THD = attention(q_THD, k_TKD, v_TKD, pages, index, batch, config)
    a_TM = all_reduce(functions.linear(a_THD.flatten(1), w.o, w.o_bias), config.mesh)
    x_TM = x_TM + (a_TM if w.o_norm is None else rms_norm(a_TM, w.o_norm, eps))
    f_TM = all_reduce(feed_forward(rms_norm(x_TM, w.post_norm, eps), w, config, functions), config.mesh)
    return x_TM + (f_TM if w.down_norm is None else rms_norm(f_TM, w.down_norm, eps))


def attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, pages: Tensor | None, index: int, batch: Batch, config: ModelConfig) -> Tensor:
    """Donates `pages`. Write k and v of layer `index` into their slots, then attend over the page tables. Returns `[T, H, D]`.

    Without `pages` nothing is written, and the tokens of each prompt attend to one another.
    """
    how = {"window": batch.window, "softcap": config.attention_softcap}
    if pages is None:
        assert batch.cu_seqlens is not None
        return attend_prompts(q_THD, k_TKD, v_TKD, batch.cu_seqlens, config.scale, **how)
    kv_write(pages, index, k_TKD, v_TKD, batch.slots)
    tables, lens = batch.page_tables, batch.seq_lens
    if batch.cu_seqlens is None:
        return paged_decode(q_THD, pages, index, tables, lens, config.scale, batch.plan, **how)
    return paged_prefill(q_THD, pages, index, tables, lens, batch.cu_seqlens, config.scale, batch.plan, **how)


def feed_forward(x_TM: Tensor, w: Layer[Tensor], config: ModelConfig, functions: Functions = ENGINE) -> Tensor:
    """A layer's gated MLP, its experts, or the sum of both, `[T, M]`. If ranks share the layer, it is this rank's part of the sum."""
    routed_TM = None
    if w.experts is not None and config.moe is not None:
        routed_TM = mixture(x_TM, w.experts, config.moe, config.hidden_act, functions)
    if w.gate_up is None or w.down is None:
        assert routed_TM is not None
        return routed_TM
    dense_TM = mlp(x_TM, w.gate_up, w.gate_up_bias, w.down, w.down_bias, config.hidden_act, functions)
    return dense_TM if routed_TM is None else routed_TM + dense_TM


def mlp(
    x_TM: Tensor,
    gate_up: Tensor | QuantisedMatrix,
    gate_up_bias: Tensor | None,
    down: Tensor | QuantisedMatrix,
    down_bias: Tensor | None,
    act: str = "silu",
    functions: Functions = ENGINE,
) -> Tensor:
    """The gated feed-forward layer `down(act(gate x) * up x)` (Shazeer, 2020), `[T, M]`."""
    gate_TF, up_TF = functions.linear(x_TM, gate_up, gate_up_bias).chunk(2, dim=-1)
    return functions.linear(activation(gate_TF, act) * up_TF, down, down_bias)


def mixture(x_TM: Tensor, w: Experts[Tensor], moe: MoEConfig, act: str, functions: Functions = ENGINE) -> Tensor:
    """The weighted sum of the outputs of each token's experts (Shazeer et al., 2017), `[T, M]`."""
    logits_TE = functions.linear(x_TM.to(w.router.dtype), w.router)
    chosen_Tk, weights_Tk = functions.route(logits_TE, w.bias, moe.top_k, moe.normalise, moe.least_sum)
    return functions.experts(x_TM, w.gate_up, w.down, chosen_Tk, weights_Tk, act)


def activation(x: Tensor, act: str) -> Tensor:
    """The activation function `act`: `silu`, `gelu`, or `gelu_tanh`, the approximation of gelu by tanh."""
    return F.silu(x) if act == "silu" else F.gelu(x, approximate="tanh" if act == "gelu_tanh" else "none")


def head(x_RM: Tensor, gain: Tensor, weight: Tensor | QuantisedMatrix, eps: float, *, functions: Functions = ENGINE) -> Tensor:
    """The final norm and the logits, `[R, V]`."""
    return functions.linear(rms_norm(x_RM, gain, eps), weight)
