"""What the architectures share: rotary angles, attention through the pages, the gated MLP, the head.

Legend of shape suffixes: T tokens · M hidden_size · H query heads · K key/value heads · D head_dim · X any heads · F intermediate_size.
"""

import math

import torch
import torch.nn.functional as F

from ..batch import Batch
from ..config import RopeConfig
from ..ops import kv_write, paged_decode, paged_prefill
from ..ops.linear import linear
from ..ops.plain import rms_norm
from ..ops.rows import rotary_angles
from ..types import Float32, Tensor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Float32[Tensor, "half"]:
    """The rotation speed of each pair of channels, `[D/2]` float32, in radians a token.

    Source: Su et al., 2021; `llama3` from the Llama 3.1 reference code; `yarn` from Peng et al., 2023, "NTK-by-parts".
    """
    speed = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.kind:
        case "default":
            return speed
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
            raise ValueError(f"rope kind {kind!r} is not one of default, linear, llama3, yarn")


def _yarn_channel(rope: RopeConfig, head_dim: int, turns: float) -> float:
    """The channel pair that makes `turns` full turns over the original context."""
    return head_dim * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def rope_angles(
    positions_T: Tensor, inv_freq: Float32[Tensor, "half"], rope: RopeConfig
) -> tuple[Float32[Tensor, "T 1 D"], Float32[Tensor, "T 1 D"]]:
    """cos, and sin with the sign of `apply_rope`'s second term, of every token's angles: `[T, 1, D]` float32, times the attention factor.

    Once a forward: all layers share them.
    """
    return rotary_angles(positions_T, inv_freq, rope.attention_factor)


def attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, pages: Tensor, index: int, batch: Batch) -> Tensor:
    """Write k and v of layer `index` into their slots (`pages` is donated), then attend over the page tables; `[T, H, D]`."""
    kv_write(pages, index, k_TKD, v_TKD, batch.slots)
    scale = q_THD.shape[-1] ** -0.5
    if batch.cu_seqlens is None:
        return paged_decode(q_THD, pages, index, batch.page_tables, batch.seq_lens, scale, batch.plan)
    return paged_prefill(q_THD, pages, index, batch.page_tables, batch.seq_lens, batch.cu_seqlens, scale, batch.plan)


def mlp(x_TM: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None) -> Tensor:
    """The gated feed-forward layer `down(silu(gate x) * up x)` (Shazeer, 2020), `[T, M]`."""
    gate_TF, up_TF = linear(x_TM, gate_up, gate_up_bias).chunk(2, dim=-1)
    return linear(F.silu(gate_TF) * up_TF, down, down_bias)


def head(x_RM: Tensor, gain: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The final norm and the logits, `[R, V]`."""
    return linear(rms_norm(x_RM, gain, eps), weight)
