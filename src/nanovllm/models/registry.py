"""The built-in architectures by their name in `architectures` of a Hugging Face `config.json`, and `forward`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, overload

import torch

from nanovllm.config import ModelConfig
from nanovllm.models import ernie4_5, gemma, gemma2, gemma3, gpt2, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe
from nanovllm.models import transformers as fallback
from nanovllm.models.common import decoder
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.decoder import KV
from nanovllm.models.common.params import Params
from nanovllm.models.fast import cpu
from nanovllm.models.fast.choice import FastChoice, all_fast, by_layer
from nanovllm.models.spec import ModelSpec
from nanovllm.ops.backends import FLASHINFER_HEAD_DIMS, attention_backend
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


@overload
def forward(
    params: Params[Tensor],
    kv: KV,
    batch: Batch,
    config: ModelConfig,
    *,
    layer: Callable[..., Tensor] | None = None,
    fast: FastChoice | None = None,
    inputs_embeds: Float[Tensor, "..."] | None = None,
    add_hidden: Mapping[int, Float[Tensor, "..."]] | None = None,
    capture_hidden: None = None,
) -> tuple[Float[Tensor, "R V"], KV]: ...


@overload
def forward(
    params: Params[Tensor],
    kv: KV,
    batch: Batch,
    config: ModelConfig,
    *,
    layer: Callable[..., Tensor] | None = None,
    fast: FastChoice | None = None,
    inputs_embeds: Float[Tensor, "..."] | None = None,
    add_hidden: Mapping[int, Float[Tensor, "..."]] | None = None,
    capture_hidden: Sequence[int],
) -> tuple[Float[Tensor, "R V"], KV, tuple[Float[Tensor, "_T M"], ...]]: ...


def forward(
    params: Params[Tensor],
    kv: KV,
    batch: Batch,
    config: ModelConfig,
    *,
    layer: Callable[..., Tensor] | None = None,
    fast: FastChoice | None = None,
    inputs_embeds: Float[Tensor, "..."] | None = None,
    add_hidden: Mapping[int, Float[Tensor, "..."]] | None = None,
    capture_hidden: Sequence[int] | None = None,
) -> tuple[Float[Tensor, "R V"], KV] | tuple[Float[Tensor, "R V"], KV, tuple[Float[Tensor, "_T M"], ...]]:
    """Donates `kv`. Run one step's tokens through the model.

    On a CPU with a C compiler, decode batches run in C (`models/fast/cpu.py`). All other batches run in plain PyTorch. On a GPU, slots
    and page tables are not checked against the size of the pool.

    With `kv=None` the tokens of each prompt attend to one another and nothing is written. Then all is plain PyTorch, which autograd,
    `torch.func` and `torch.compile` can transform. Attention takes memory for the square of the number of all tokens of the batch, and
    every expert of a mixture runs all tokens.

    Args:
        params: The weights, `model.params`.
        kv: The KV memory. It is overwritten; use the returned value. None: no memory, for a batch of whole prompts such as
            `Batch.of_prompts` makes. The batch's `slots`, `page_tables` and `seq_lens` are not read then.
        batch: The tokens of the step.
        config: The model's config, `model.config`.
        layer: A compiled form of the architecture's layer function. With it, the C kernels are not used.
        fast: The layers that may run in C, and whether the head may. None means all.
        inputs_embeds: Rows in place of `params.embed[batch.input_ids]`, `[T, M]`. The scale of embeddings and learned positions, if the
            model has them, are applied to these rows.
        add_hidden: Tensors to add to the outputs of layers, which the next layers read. The key is a layer's index, and the tensor is
            `[M]` or `[T, M]`.
        capture_hidden: Indices of layers. Their outputs (the residual stream, after `add_hidden`) are returned. It costs nothing if None.

    Returns:
        The logits `[R, V]` in the model's dtype, and the KV state that holds the new keys and values, or None. R is the length of
        `batch.logit_indices`, or the number of tokens if that is None. With `capture_hidden`, a third element: a tuple of the layers'
        outputs for all tokens, `[T, M]` each, in the order of the indices.

    Raises:
        InvalidRequestError: `kv` is None for a decode batch. A layer is not in 0 ... `num_layers` - 1. A tensor has another shape.
            `inputs_embeds` or a tensor of `add_hidden` requires a gradient, and `kv` is not None. The model runs through the transformers
            fallback, which supports neither `kv=None` nor the last three arguments.
        KeyError: `config.architecture` is not in `nanovllm.models.REGISTRY`.
        IndexError: On a CPU, a slot or a page of a decode batch is outside the pool. Nothing was written.
        TypeError: On a CPU, a weight of a decode batch has another dtype than the embedding table.
        ValueError: On a CPU, a weight of a decode batch has another shape than the config says.

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

        The outputs of two layers for a whole prompt, without KV memory:

        >>> prompt = nv.Batch.of_prompts([[5, 6, 7]])
        >>> logits, _, hidden = nv.forward(model.params, None, prompt, model.config, capture_hidden=(2, 7))
        >>> [tuple(output.shape) for output in hidden]
        [(3, 256), (3, 256)]

        The logits of the last token for four vectors added to the output of layer 2:

        >>> def last(vector):
        ...     return nv.forward(model.params, None, prompt, model.config, add_hidden={2: vector})[0][-1]
        >>> tuple(torch.func.vmap(last)(torch.randn(4, 256)).shape)
        (4, 4096)
    """
    hidden: dict[str, Any] = {"inputs_embeds": inputs_embeds, "add_hidden": add_hidden, "capture_hidden": capture_hidden}
    if isinstance(params, fallback.ForeignParams):
        return fallback.forward(params, fallback.require_supported(kv, **hidden), batch, config)[0], kv
    spec = REGISTRY[config.architecture]
    if layer is None and kv is not None and cpu.serves(params, kv, batch, config):
        choice = all_fast(config) if fast is None else fast
        if choice.whole and batch.logit_indices is None and all(asked is None for asked in hidden.values()):
            return cpu.forward(params, kv, batch, config)[0], kv
        chosen, head = by_layer(cpu.decode_layer, spec.layer, choice.layers), cpu.head if choice.head else spec.head
        return decoder.forward(params, kv, batch, config, layer=chosen, head=head, **hidden)
    return spec.forward(params, kv, batch, config, layer=layer, **hidden)
