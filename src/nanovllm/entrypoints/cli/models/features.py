"""The features of a model that a plain Llama lacks, in words, read from its config and the table of its weights."""

from collections.abc import Iterator

from nanovllm.config import ModelConfig
from nanovllm.models.common.params import Layer, ParamInfo, Params
from nanovllm.models.registry import REGISTRY


def features(config: ModelConfig) -> tuple[str, ...]:
    """The features of a model of a built-in architecture that a plain Llama lacks."""
    return tuple(_of_config(config)) + tuple(_of_table(REGISTRY[config.architecture].param_table(config), config))


def layers_of(count: int, num_layers: int) -> str:
    """`count` of `num_layers` layers, in words."""
    return "all layers" if count == num_layers else f"{count} of {num_layers} layers"


def _of_config(c: ModelConfig) -> Iterator[str]:
    for window in sorted(set(c.windows) - {0}):
        yield f"sliding windows of {window:,} tokens in {layers_of(c.windows.count(window), c.num_layers)}"
    if c.local_rope is not None:
        yield "another rotary embedding in sliding-window layers"
    if c.moe is not None:
        shared = ", and shared experts" if c.moe.shared_size else ""
        where = layers_of(len(c.moe.layers), c.num_layers)
        yield f"{c.moe.top_k} of {c.moe.num_experts} experts per token in {where}{shared}"
    if c.rope.kind == "learned":
        yield "learned positions"
    elif c.rope.kind != "default":
        yield f"{c.rope.kind} rotary positions"
    stored = c.stored_head_dim or c.head_dim
    if int(c.head_dim * c.rope.partial) != stored:
        yield f"{int(c.head_dim * c.rope.partial)} of {stored} channels of a head are rotated"
    if stored != c.head_dim:
        yield f"heads of {stored} channels padded to {c.head_dim}"
    if c.attention_softcap:
        yield "a soft cap on scores"
    if c.logit_softcap:
        yield "a soft cap on logits"
    if c.embed_scale != 1.0:
        yield "scaled embeddings"
    if c.hidden_act != "silu":
        yield f"the activation {c.hidden_act}"
    if c.tie_word_embeddings:
        yield "the embedding table as the head"


def _of_table(table: Params[ParamInfo], c: ModelConfig) -> Iterator[str]:
    layer: Layer[ParamInfo] = table.layers[0]
    if layer.input_norm_bias is not None:
        yield "layer norms with biases"
    if layer.q_norm is not None:
        yield "norms of query and key heads"
    if layer.o_norm is not None:
        yield "norms after attention and MLP too"
    if layer.input_norm.offset:
        yield f"norm weights stored minus {layer.input_norm.offset:g}"
    where = {"q, k, v": layer.qkv_bias, "attention's output": layer.o_bias, "the MLP": layer.gate_up_bias}
    if biased := [name for name, info in where.items() if info is not None]:
        yield f"biases of {' and '.join(biased)}"
    if layer.gate_up is not None and layer.gate_up.shape[0] == c.intermediate_size:
        yield "an MLP without a gate"
    if layer.qkv.transposed:
        yield "matrices stored transposed"
    if len(layer.qkv.sources) == 1:
        yield "q, k and v stored as one"
    if layer.qkv.channels and not c.stored_head_dim:
        yield "channels of heads reordered when loaded"
