"""Llama (Touvron et al., 2023; Grattafiori et al., 2024) and TinyLlama: grouped-query attention, rotary positions, a gated MLP.

Legend of shape suffixes: T tokens · R rows of logits · V vocabulary · M hidden_size · H query heads · K key/value heads · D head_dim.
"""

from collections.abc import Callable

import torch.nn.functional as F

from ..batch import Batch
from ..config import HF, ModelConfig, read_bool, read_dtype, read_float, read_ids, read_int, read_rope
from ..errors import CheckpointError
from ..ops.linear import linear
from ..ops.plain import apply_rope, rms_norm
from ..state.kv import KVState
from ..types import Float, Tensor
from .layers import attention, head, mlp, rope_angles
from .params import Layer, ParamInfo, Params, loaded, rope_info


def config_from_hf(hf: HF) -> ModelConfig:
    """The config of a `LlamaForCausalLM` checkpoint. Raises `CheckpointError` for a setting that this file does not implement."""
    hidden_act = hf.get("hidden_act") or "silu"
    if hidden_act != "silu":
        raise CheckpointError(f"config.json: hidden_act={hidden_act!r} is not supported; only silu is")
    num_heads, hidden_size = read_int(hf, "num_attention_heads"), read_int(hf, "hidden_size")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=read_int(hf, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read_int(hf, "intermediate_size"),
        num_layers=read_int(hf, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=read_int(hf, "num_key_value_heads", num_heads),
        head_dim=read_int(hf, "head_dim", hidden_size // max(1, num_heads)),
        rms_norm_eps=read_float(hf, "rms_norm_eps", 1e-6),
        rope=read_rope(hf),
        tie_word_embeddings=read_bool(hf, "tie_word_embeddings", False),
        attention_bias=read_bool(hf, "attention_bias", False),
        mlp_bias=read_bool(hf, "mlp_bias", False),
        max_position_embeddings=read_int(hf, "max_position_embeddings", 2048),
        dtype=read_dtype(hf),
        bos_token_id=next(iter(read_ids(hf, "bos_token_id", 1)), None),
        eos_token_ids=read_ids(hf, "eos_token_id", 2),
    )


def param_table(config: ModelConfig) -> Params[ParamInfo]:
    """Every parameter's shape and its tensors in the checkpoint."""
    c, q, kv = config, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def layer_table(prefix: str) -> Layer[ParamInfo]:
        attn, ffn = f"{prefix}.self_attn", f"{prefix}.mlp"
        return Layer(
            input_norm=loaded("gain", (f"{prefix}.input_layernorm.weight", (c.hidden_size,))),
            qkv=loaded(
                "matrix",
                (f"{attn}.q_proj.weight", (q, c.hidden_size)),
                (f"{attn}.k_proj.weight", (kv, c.hidden_size)),
                (f"{attn}.v_proj.weight", (kv, c.hidden_size)),
            ),
            qkv_bias=loaded("bias", (f"{attn}.q_proj.bias", (q,)), (f"{attn}.k_proj.bias", (kv,)), (f"{attn}.v_proj.bias", (kv,)))
            if c.attention_bias
            else None,
            q_norm=None,
            k_norm=None,
            o=loaded("matrix", (f"{attn}.o_proj.weight", (c.hidden_size, q))),
            o_bias=loaded("bias", (f"{attn}.o_proj.bias", (c.hidden_size,))) if c.attention_bias else None,
            post_norm=loaded("gain", (f"{prefix}.post_attention_layernorm.weight", (c.hidden_size,))),
            gate_up=loaded(
                "matrix",
                (f"{ffn}.gate_proj.weight", (c.intermediate_size, c.hidden_size)),
                (f"{ffn}.up_proj.weight", (c.intermediate_size, c.hidden_size)),
            ),
            gate_up_bias=loaded("bias", (f"{ffn}.gate_proj.bias", (c.intermediate_size,)), (f"{ffn}.up_proj.bias", (c.intermediate_size,)))
            if c.mlp_bias
            else None,
            down=loaded("matrix", (f"{ffn}.down_proj.weight", (c.hidden_size, c.intermediate_size))),
            down_bias=loaded("bias", (f"{ffn}.down_proj.bias", (c.hidden_size,))) if c.mlp_bias else None,
        )

    return Params(
        embed=loaded("table", ("model.embed_tokens.weight", (c.vocab_size, c.hidden_size))),
        layers=tuple(layer_table(f"model.layers.{i}") for i in range(c.num_layers)),
        final_norm=loaded("gain", ("model.norm.weight", (c.hidden_size,))),
        head=None if c.tie_word_embeddings else loaded("matrix", ("lm_head.weight", (c.vocab_size, c.hidden_size))),
        inv_freq=rope_info(c.head_dim),
    )


def layer(w: Layer[Tensor], x_TM: Tensor, pages: Tensor, index: int, cos: Tensor, sin: Tensor, batch: Batch, config: ModelConfig) -> Tensor:
    """One decoder layer, compilable on its own. `pages` is donated: k and v of layer `index` are written into it."""
    h_TM = rms_norm(x_TM, w.input_norm, config.rms_norm_eps)
    heads_TXD = linear(h_TM, w.qkv, w.qkv_bias).unflatten(-1, (-1, config.head_dim))
    q_THD, k_TKD, v_TKD = heads_TXD.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
    q_THD, k_TKD = apply_rope(q_THD, cos, sin), apply_rope(k_TKD, cos, sin)
    a_THD = attention(q_THD, k_TKD, v_TKD, pages, index, batch)
    x_TM = x_TM + linear(a_THD.flatten(1), w.o, w.o_bias)
    h_TM = rms_norm(x_TM, w.post_norm, config.rms_norm_eps)
    return x_TM + mlp(h_TM, w.gate_up, w.gate_up_bias, w.down, w.down_bias)


def forward(
    params: Params[Tensor],
    kv: KVState,
    batch: Batch,
    config: ModelConfig,
    *,
    layer: Callable[..., Tensor] = layer,
    head: Callable[..., Tensor] = head,
) -> tuple[Float[Tensor, "R V"], KVState]:
    """Donates `kv`. Run one step's tokens: logits `[R, V]` in the model's dtype, and the KV state that holds the tokens' keys and values.

    `layer` and `head` may be other forms of this file's `layer` and of `layers.head`: compiled ones, or kernels.
    """
    (pages,) = kv.pools
    cos, sin = rope_angles(batch.positions, params.inv_freq, config.rope)
    x_TM = F.embedding(batch.input_ids, params.embed)
    for index, w in enumerate(params.layers):
        x_TM = layer(w, x_TM, pages, index, cos, sin, batch, config)
    x_RM = x_TM if batch.logit_indices is None else x_TM[batch.logit_indices]
    return head(x_RM, params.final_norm, params.embed if params.head is None else params.head, config.rms_norm_eps), kv
