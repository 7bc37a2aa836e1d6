"""The built-in architectures by their name in `architectures` of a Hugging Face `config.json`, and `forward`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from nanovllm.config import ModelConfig
from nanovllm.models import ernie4_5, gemma, gemma2, gemma3, gpt2, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe
from nanovllm.models import transformers as fallback
from nanovllm.models.common import decoder
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.params import Params
from nanovllm.models.fast import cpu
from nanovllm.models.fast.choice import FastChoice, by_layer
from nanovllm.models.spec import ModelSpec
from nanovllm.ops.backends import FLASHINFER_HEAD_DIMS, attention_backend
from nanovllm.state.kv_cache import KVState
from nanovllm.types import Float, Tensor

REGISTRY: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "Qwen2ForCausalLM": ModelSpec(config_from_hf=qwen2.config_from_hf, param_table=qwen2.param_table, known="Qwen2, Qwen2.5, QwQ"),
        "Qwen3ForCausalLM": ModelSpec(config_from_hf=qwen3.config_from_hf, param_table=qwen3.param_table, known="Qwen3 from 0.6B to 32B"),
        "Qwen3MoeForCausalLM": ModelSpec(
            config_from_hf=qwen3_moe.config_from_hf, param_table=qwen3_moe.param_table, known="Qwen3 30B-A3B and 235B-A22B, Qwen3-Coder",
        ),
        "LlamaForCausalLM": ModelSpec(
            config_from_hf=llama.config_from_hf, param_table=llama.param_table, known="Llama 1 to 3.3, TinyLlama, SmolLM and SmolLM2",
        ),
        "MistralForCausalLM": ModelSpec(
            config_from_hf=mistral.config_from_hf, param_table=mistral.param_table, known="Mistral 7B, Mistral Nemo, Zephyr",
        ),
        "MixtralForCausalLM": ModelSpec(
            config_from_hf=mixtral.config_from_hf, param_table=mixtral.param_table, known="Mixtral 8x7B and 8x22B",
        ),
        "Phi3ForCausalLM": ModelSpec(
            config_from_hf=phi3.config_from_hf, param_table=phi3.param_table, known="Phi-3 and Phi-3.5 mini, Phi-4, Phi-4-mini",
        ),
        "GemmaForCausalLM": ModelSpec(
            config_from_hf=gemma.config_from_hf, param_table=gemma.param_table, known="Gemma 2B and 7B, CodeGemma",
        ),
        "Gemma2ForCausalLM": ModelSpec(
            config_from_hf=gemma2.config_from_hf, param_table=gemma2.param_table, known="Gemma 2 from 2B to 27B",
        ),
        "Gemma3ForCausalLM": ModelSpec(config_from_hf=gemma3.config_from_hf, param_table=gemma3.param_table, known="Gemma 3 270M and 1B"),
        "Gemma3ForConditionalGeneration": ModelSpec(
            config_from_hf=gemma3.config_from_hf_with_vision, param_table=gemma3.param_table,
            checkpoint_name=gemma3.checkpoint_name, config_to_hf=gemma3.config_to_hf_with_vision,
            known="Gemma 3 from 4B to 27B, texts alone",
        ),
        "Ernie4_5ForCausalLM": ModelSpec(
            config_from_hf=ernie4_5.config_from_hf, param_table=ernie4_5.param_table, known="ERNIE 4.5 0.3B",
        ),
        "Ernie4_5_MoeForCausalLM": ModelSpec(
            config_from_hf=ernie4_5.config_from_hf_moe, param_table=ernie4_5.param_table, known="ERNIE 4.5 21B-A3B",
            checkpoint_name=ernie4_5.checkpoint_name,
        ),
        "GPT2LMHeadModel": ModelSpec(
            config_from_hf=gpt2.config_from_hf, param_table=gpt2.param_table, layer=gpt2.layer, head=gpt2.head,
            checkpoint_name=gpt2.checkpoint_name, config_to_hf=gpt2.config_to_hf, known="GPT-2 in all sizes, DistilGPT-2",
        ),
    }
)  # fmt: skip


def fitted(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> ModelConfig:
    """The config for a model on a device: narrow heads are padded with zero channels to a width that the attention kernels support.

    A config stays as it is if the kernels support its width, if the architecture's table cannot pad, or if a norm of a head would count
    the zeros.

    Args:
        config: The config of the checkpoint.
        device: The device that the weights will be on.
        dtype: The dtype that the weights will have.

    Returns:
        `config` itself, or a config with a wider `head_dim` and the original width in `stored_head_dim`.

    Examples:
        >>> from nanovllm.models import fitted
        >>> fitted(model.config, model.device, model.dtype) is model.config
        True
    """
    served = attention_backend(device, dtype, config.head_dim, 16) == "flashinfer"
    wider = [width for width in FLASHINFER_HEAD_DIMS if width > config.head_dim]
    if served or not wider or attention_backend(device, dtype, wider[0], 16) != "flashinfer" or config.architecture not in REGISTRY:
        return config
    ropes = _turning(config, lambda partial: partial * (config.head_dim / wider[0]))
    padded = replace(config, head_dim=wider[0], stored_head_dim=config.head_dim, attention_scale=config.scale, **ropes)
    layer = REGISTRY[config.architecture].param_table(padded).layers[0]
    return padded if layer.qkv.channels and layer.q_norm is None else config


def unfitted(config: ModelConfig) -> ModelConfig:
    """The config of the checkpoint, from a config that `fitted` may have changed: its inverse."""
    if not config.stored_head_dim:
        return config
    scale = 0.0 if config.scale == config.stored_head_dim**-0.5 else config.attention_scale
    ropes = _turning(config, lambda partial: partial / (config.stored_head_dim / config.head_dim))  # exact: head_dim is a power of two
    return replace(config, head_dim=config.stored_head_dim, stored_head_dim=0, attention_scale=scale, **ropes)


def _turning(config: ModelConfig, changed: Callable[[float], float]) -> dict[str, Any]:
    """The rotary embeddings of a config, with `changed` applied to the rotated part of a head."""
    ropes = {name: getattr(config, name) for name in ("rope", "local_rope", "long_rope")}
    return {name: rope and replace(rope, partial=changed(rope.partial)) for name, rope in ropes.items()}


def forward(
    params: Params[Tensor],
    kv: KVState,
    batch: Batch,
    config: ModelConfig,
    *,
    layer: Callable[..., Tensor] | None = None,
    fast: FastChoice | None = None,
) -> tuple[Float[Tensor, "R V"], KVState]:
    """Donates `kv`. Run one step's tokens through the model.

    On a CPU with a C compiler, decode batches run in C (`models/fast/cpu.py`). All other batches run in plain PyTorch. On a GPU, slots
    and page tables are not checked against the size of the pool.

    Args:
        params: The weights, `model.params`.
        kv: The KV memory. It is overwritten; use the returned value.
        batch: The tokens of the step.
        config: The model's config, `model.config`.
        layer: A compiled form of the architecture's layer function. With it, the C kernels are not used.
        fast: The layers that may run in C, and whether the head may. None means all.

    Returns:
        The logits `[R, V]` in the model's dtype, and the KV state that holds the new keys and values. R is the length of
        `batch.logit_indices`, or the number of tokens if that is None.

    Raises:
        KeyError: `config.architecture` is not in `nanovllm.models.REGISTRY`.
        IndexError: On a CPU, a slot or a page of a decode batch is outside the pool. Nothing was written.
        TypeError: On a CPU, a weight of a decode batch has another dtype than the embedding table.

    Examples:
        Run the first three tokens of a sequence on page 0:

        >>> def ints(*values):
        ...     return torch.tensor(values, dtype=torch.int32)
        >>> batch = nv.Batch(
        ...     input_ids=ints(5, 6, 7), positions=ints(0, 1, 2), slots=ints(0, 1, 2), page_tables=ints([0]), seq_lens=ints(3),
        ...     cu_seqlens=ints(0, 3),
        ... )
        >>> logits, kv = nv.forward(model.params, state.kv, batch, model.config)
        >>> tuple(logits.shape)
        (3, 4096)
    """
    if isinstance(params, fallback.ForeignParams):
        return fallback.forward(params, kv, batch, config)
    spec = REGISTRY[config.architecture]
    if layer is None and cpu.serves(params, kv, batch, config):
        if fast is None:
            return decoder.forward(params, kv, batch, config, layer=cpu.decode_layer, head=cpu.head)
        chosen = by_layer(cpu.decode_layer, spec.layer, fast.layers)
        return decoder.forward(params, kv, batch, config, layer=chosen, head=cpu.head if fast.head else spec.head)
    return spec.forward(params, kv, batch, config, layer=layer)
