"""The parts of most architectures' tables of weights. Matrices in a checkpoint are `[out, in]`."""

from collections.abc import Callable
from typing import Any

import torch

from nanovllm.config import ModelConfig
from nanovllm.models.common.params import Experts, Layer, ParamInfo, Params, loaded, rope_info


def decoder(c: ModelConfig, layer: Callable[[str, int], Layer[ParamInfo]], **gains) -> Params[ParamInfo]:
    """The table of a decoder. `layer("model.layers.i", i)` describes layer i; `gains` are fields of the final norm's description."""
    return Params(
        embed=loaded("table", ("model.embed_tokens.weight", (c.vocab_size, c.hidden_size))),
        layers=tuple(layer(f"model.layers.{i}", i) for i in range(c.num_layers)),
        final_norm=gain("model.norm", c.hidden_size, **gains),
        head=None if c.tie_word_embeddings else loaded("matrix", ("lm_head.weight", (c.vocab_size, c.hidden_size))),
        inv_freq=rope_info(c.rope, c.head_dim),
        local_inv_freq=None if c.local_rope is None else rope_info(c.local_rope, c.head_dim),
    )


def gain(name: str, size: int, **how) -> ParamInfo:
    """The description of a norm weight. `how` are other fields of `ParamInfo`."""
    return loaded("gain", (f"{name}.weight", (size,)), **how)


def heads(c: ModelConfig, *, interleaved: bool = False) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """The layout of heads: their width in the checkpoint, and fields of the descriptions of q, k, v and of the output projection.

    All code that rotates keys uses channels i and i + D/2 of a head as a pair. In a checkpoint, the first R channels are rotated. A pair
    is i and i + R/2, or 2i and 2i + 1 if `interleaved`. The channels that are not rotated, and zeros, fill the rest of the head.
    """
    stored, turning = c.stored_head_dim or c.head_dim, int(c.head_dim * c.rope.partial)
    first, second = (range(0, turning, 2), range(1, turning, 2)) if interleaved else (range(turning // 2), range(turning // 2, turning))
    rest, missing = list(range(turning, c.head_dim)), (c.head_dim - turning) // 2
    order = (*first, *rest[:missing], *second, *rest[missing:])
    if order == tuple(range(stored)):
        return stored, {}, {}
    kept: dict[str, Any] = {"channels": tuple(i if i < stored else -1 for i in order), "stored_dim": stored}
    out_fields = {} if stored == c.head_dim else {**kept, "columns": True, "shape": (c.hidden_size, c.num_heads * c.head_dim)}
    return stored, {**kept, "turned": c.num_heads + c.num_kv_heads}, out_fields


def attention(c: ModelConfig, prefix: str, *, qkv_bias: bool = False, o_bias: bool = False, interleaved: bool = False) -> dict[str, Any]:
    """The descriptions of the attention projections of `prefix`. `interleaved`: see `heads`."""
    width, kept, out_fields = heads(c, interleaved=interleaved)
    parts = (("q_proj", c.num_heads * width), ("k_proj", c.num_kv_heads * width), ("v_proj", c.num_kv_heads * width))
    rows = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    weights = ((f"{prefix}.{name}.weight", (size, c.hidden_size)) for name, size in parts)
    biases = ((f"{prefix}.{name}.bias", (size,)) for name, size in parts)
    return {
        "qkv": loaded("matrix", *weights, shape=(rows, c.hidden_size), **kept),
        "qkv_bias": loaded("bias", *biases, shape=(rows,), **kept) if qkv_bias else None,
        "o": loaded("matrix", (f"{prefix}.o_proj.weight", (c.hidden_size, c.num_heads * width)), **out_fields),
        "o_bias": loaded("bias", (f"{prefix}.o_proj.bias", (c.hidden_size,))) if o_bias else None,
    }


def gated_mlp(c: ModelConfig, prefix: str, size: int, *, bias: bool = False) -> dict[str, Any]:
    """The descriptions of the gated MLP `prefix` with `size` intermediate channels."""
    parts = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
    return {
        "gate_up": loaded("matrix", *((f"{part}.weight", (size, c.hidden_size)) for part in parts)),
        "gate_up_bias": loaded("bias", *((f"{part}.bias", (size,)) for part in parts)) if bias else None,
        "down": loaded("matrix", (f"{prefix}.down_proj.weight", (c.hidden_size, size))),
        "down_bias": loaded("bias", (f"{prefix}.down_proj.bias", (c.hidden_size,))) if bias else None,
    }


def no_mlp() -> dict[str, Any]:
    """The fields of `gated_mlp` for a layer that has only experts: None for each."""
    return dict.fromkeys(("gate_up", "gate_up_bias", "down", "down_bias"))


def mixture(
    c: ModelConfig, prefix: str, *, parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"), bias: str = ""
) -> Experts[ParamInfo]:
    """The descriptions of the router `prefix.gate` and of the experts of `prefix`, with one checkpoint tensor per matrix.

    `bias` is the name of the tensor that corrects the router's choice, or empty.
    """
    assert c.moe is not None
    count, size, (gate, up, down) = c.moe.num_experts, c.moe.intermediate_size, parts
    wide = torch.float32 if c.moe.wide_router else None
    names = [f"{prefix}.experts.{e}" for e in range(count)]
    halves = [(f"{name}.{part}.weight", (size, c.hidden_size)) for name in names for part in (gate, up)]
    downs = [(f"{name}.{down}.weight", (c.hidden_size, size)) for name in names]
    return Experts(
        router=loaded("matrix", (f"{prefix}.gate.weight", (count, c.hidden_size)), dtype=wide),
        bias=loaded("bias", (bias, (1, count)), shape=(count,), dtype=torch.float32) if bias else None,
        gate_up=loaded("matrix", *halves, shape=(count, 2 * size, c.hidden_size)),
        down=loaded("matrix", *downs, shape=(count, c.hidden_size, size)),
    )
