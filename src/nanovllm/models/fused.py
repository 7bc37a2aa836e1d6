"""A decode step of few rows on a GPU: a layer as five kernels that follow each other closely.

They stand where a model's `layer` and `layers.head` stand and agree with them within rounding.
"""

import torch.nn.functional as F

from ..batch import Batch
from ..config import ModelConfig
from ..ops import norm_linear as few
from ..ops.linear import linear
from ..ops.norm_linear import norm_linear
from ..ops.rope_attend import rope_attend
from ..types import Float, Float32, Tensor
from .params import Layer, Params


def serves(params: Params[Tensor], num_rows: int) -> bool:
    """Whether the kernels can run every product of a decode step of this many rows."""
    first, embed = params.layers[0], params.embed
    shapes = ((first.qkv, False), (first.o, False), (first.gate_up, True), (first.down, False))
    plain = first.gate_up_bias is None
    return plain and all(few.serves(embed.device, embed.dtype, num_rows, w.shape[1], gated) for w, gated in shapes)


def decode_layer(
    w: Layer[Tensor],
    x: Float[Tensor, "B M"],
    pages: Float[Tensor, "L N 2 K S D"],
    index: int,
    cos: Float32[Tensor, "B 1 D"],
    sin: Float32[Tensor, "B 1 D"],
    batch: Batch,
    config: ModelConfig,
) -> Float[Tensor, "B M"]:
    """One decoder layer with the signature of a model's `layer`; donates `pages`, where k and v of layer `index` are written."""
    eps, scale = config.rms_norm_eps, config.head_dim**-0.5
    qkv = norm_linear(x, w.qkv, gain=w.input_norm, bias=w.qkv_bias, eps=eps)
    tables, seq_lens, slots = batch.page_tables, batch.seq_lens, batch.slots
    a = rope_attend(qkv, w.q_norm, w.k_norm, cos, sin, pages, index, tables, seq_lens, slots, scale, eps, batch.plan)
    x = norm_linear(a, w.o, bias=w.o_bias, residual=x)
    h = norm_linear(x, w.gate_up, gain=w.post_norm, eps=eps, gated=True)
    return norm_linear(h, w.down, bias=w.down_bias, residual=x)


def head(x: Float[Tensor, "R M"], gain: Float[Tensor, "M"], weight: Float[Tensor, "V M"], eps: float) -> Float[Tensor, "R V"]:
    """The final norm and the logits: `layers.head`."""
    if x.shape[0] <= few.FEW:
        return norm_linear(x, weight, gain=gain, eps=eps)
    return linear(F.rms_norm(x, x.shape[-1:], None, eps) * gain, weight)  # rounded between, as `rms_norm` does, in fewer launches
