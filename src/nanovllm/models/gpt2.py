"""GPT-2 (Radford et al., 2019): learned positions, layer norms, biases everywhere, an MLP without a gate; matrices stored `[in, out]`.

Legend of shape suffixes: T tokens · R rows of logits · M hidden_size · H heads · D head_dim · X all heads of q, k and v.
"""

from typing import Any

import torch.nn.functional as F

from nanovllm.config import ModelConfig, RopeConfig
from nanovllm.errors import CheckpointError
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.hf_config import HF, read_bool, read_int, read_sizes
from nanovllm.models.common.layers import ENGINE, PLAIN, Functions, activation, attention
from nanovllm.models.common.params import Layer, ParamInfo, Params, loaded, rope_info
from nanovllm.ops.distributed.collectives import all_reduce
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.types import Tensor

NAMES = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size", "activation_function": "hidden_act", "layer_norm_epsilon": "rms_norm_eps",
}  # fmt: skip
BUFFERS = (".attn.bias", ".attn.masked_bias")  # causal masks in old checkpoints


def config_from_hf(hf: HF) -> ModelConfig:
    """The config of a `GPT2LMHeadModel` checkpoint. Raises `CheckpointError` for a setting that this file does not implement."""
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if read_bool(hf, name, False):
            raise CheckpointError(f"config.json: {name}=true is not supported")
    for name in ("n_layer", "n_positions", "n_inner"):
        if hf.get(name) is not None:
            read_int(hf, name)  # so that a message has the checkpoint's own name
    given = {"num_key_value_heads": None, **{ours: hf.get(name) for name, ours in NAMES.items()}}
    hidden, heads, scaled = read_int(hf, "n_embd"), read_int(hf, "n_head"), read_bool(hf, "scale_attn_weights", True)
    if heads < 1 or hidden % heads:
        raise CheckpointError(f"config.json: n_embd={hidden} must be a multiple of n_head={heads}")
    if given["intermediate_size"] is None:
        given["intermediate_size"] = 4 * hidden
    scale, positions = 0.0 if scaled else 1.0, RopeConfig(kind="learned")
    more: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "attention_scale": scale, "rope": positions}
    defaults: dict[str, Any] = {"eps": 1e-5, "tied": True, "max_positions": 1024, "bos": 50256, "eos": 50256, "act": "gelu_new"}
    return read_sizes({**hf, **given, "head_dim": None}, "GPT2LMHeadModel", **defaults, **more)


def config_to_hf(config: ModelConfig) -> HF:
    """The `config.json` that `config_from_hf` reads back as `config`."""
    same = {"vocab_size", "tie_word_embeddings", "dtype", "bos_token_id"}
    sizes = (
        config.hidden_size, config.num_layers, config.num_heads, config.max_position_embeddings, config.intermediate_size,
        {"gelu_tanh": "gelu_new"}.get(config.hidden_act, config.hidden_act), config.rms_norm_eps,
    )  # fmt: skip
    return {
        **{name: getattr(config, name) for name in sorted(same)},
        **dict(zip(NAMES, sizes, strict=True)),
        "architectures": [config.architecture],
        "model_type": "gpt2",
        "eos_token_id": list(config.eos_token_ids),
        "scale_attn_weights": not config.attention_scale,
    }


def checkpoint_name(name: str) -> str | None:
    """The name in the table of a checkpoint tensor, whose prefix may be missing; None for causal masks, which are not used."""
    if name.endswith(BUFFERS):
        return None
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def param_table(c: ModelConfig) -> Params[ParamInfo]:
    """Every parameter's shape and its tensors in the checkpoint."""
    m, f = c.hidden_size, c.intermediate_size

    def matrix(name: str, outputs: int, inputs: int) -> ParamInfo:
        return loaded("matrix", (f"{name}.weight", (inputs, outputs)), shape=(outputs, inputs), transposed=True)

    def vector(name: str, part: str, size: int) -> ParamInfo:
        return loaded("gain" if part == "weight" else "bias", (f"{name}.{part}", (size,)))

    def layer_table(prefix: str) -> Layer[ParamInfo]:
        attn, mlp, first, second = (f"{prefix}.{part}" for part in ("attn", "mlp", "ln_1", "ln_2"))
        return Layer(
            input_norm=vector(first, "weight", m),
            input_norm_bias=vector(first, "bias", m),
            qkv=matrix(f"{attn}.c_attn", 3 * m, m),
            qkv_bias=vector(f"{attn}.c_attn", "bias", 3 * m),
            q_norm=None,
            k_norm=None,
            o=matrix(f"{attn}.c_proj", m, m),
            o_bias=vector(f"{attn}.c_proj", "bias", m),
            post_norm=vector(second, "weight", m),
            post_norm_bias=vector(second, "bias", m),
            gate_up=matrix(f"{mlp}.c_fc", f, m),
            gate_up_bias=vector(f"{mlp}.c_fc", "bias", f),
            down=matrix(f"{mlp}.c_proj", m, f),
            down_bias=vector(f"{mlp}.c_proj", "bias", m),
        )

    return Params(
        embed=loaded("table", ("transformer.wte.weight", (c.vocab_size, m))),
        positions=loaded("table", ("transformer.wpe.weight", (c.max_position_embeddings, m))),
        layers=tuple(layer_table(f"transformer.h.{i}") for i in range(c.num_layers)),
        final_norm=vector("transformer.ln_f", "weight", m),
        final_norm_bias=vector("transformer.ln_f", "bias", m),
        head=None if c.tie_word_embeddings else loaded("matrix", ("lm_head.weight", (c.vocab_size, m))),
        inv_freq=rope_info(c.rope, c.head_dim),
    )


def layer(
    w: Layer[Tensor], x_TM: Tensor, pages: Tensor | None, index: int, cos: Tensor, sin: Tensor, batch: Batch, config: ModelConfig
) -> Tensor:
    """Donates `pages`. One decoder layer, which can be compiled alone. Writes k and v into layer `index`; ignores `cos` and `sin`."""
    eps, linear = config.rms_norm_eps, (PLAIN if pages is None else ENGINE).linear
    assert w.gate_up is not None and w.down is not None
    h_TM = F.layer_norm(x_TM, x_TM.shape[-1:], w.input_norm, w.input_norm_bias, eps)
    q_THD, k_THD, v_THD = linear(h_TM, w.qkv, w.qkv_bias).unflatten(-1, (-1, config.head_dim)).chunk(3, dim=1)
    a_THD = attention(q_THD, k_THD, v_THD, pages, index, batch, config)
    x_TM = x_TM + all_reduce(linear(a_THD.flatten(1), w.o, w.o_bias), config.mesh)
    h_TM = F.layer_norm(x_TM, x_TM.shape[-1:], w.post_norm, w.post_norm_bias, eps)
    f_TM = activation(linear(h_TM, w.gate_up, w.gate_up_bias), config.hidden_act)
    return x_TM + all_reduce(linear(f_TM, w.down, w.down_bias), config.mesh)


def head(
    x_RM: Tensor, gain: Tensor, weight: Tensor | QuantisedMatrix, eps: float, bias: Tensor | None = None, *, functions: Functions = ENGINE
) -> Tensor:
    """The final norm and the logits, `[R, V]`."""
    return functions.linear(F.layer_norm(x_RM, x_RM.shape[-1:], gain, bias, eps), weight)
