"""The models to compare: every architecture with usual settings, with unusual settings and with numerically hard weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

Changes = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model with random weights.

    Attributes:
        architecture: A key of `models.REGISTRY`.
        setting: A short description of the unusual setting. The weights' seed is computed from it and `kind`.
        kind: A key of `KINDS`.
        changes: Keys of transformers' config that differ from the small sizes of `kind`. `rope` is merged into the rotary parameters.
        weights: A key of `weights.HARD`, or empty for ordinary weights.
        stored: A key of `stored.REWRITES`: how the checkpoint differs from a folder that transformers saves; empty if it does not.
        max_model_len: The argument of `load_model`.
    """

    architecture: str
    setting: str
    kind: str
    changes: Changes = field(default_factory=dict)
    weights: str = ""
    stored: str = ""
    max_model_len: int | None = None


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SHORT, LONG = [1.0, 1.25, 1.5, 2.0, 3.0, 4.5], [1.0, 2.0, 4.0, 7.5, 11.0, 16.0]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "partial_rotary_factor": 0.75}
WINDOWED = {"use_sliding_window": True, "sliding_window": 9}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
GEMMA_HEADS = {**HEADS, "head_dim": 16}
TWO_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
SLOWED = {**TWO_ROPES, "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0}}
FULL, SLIDING = "full_attention", "sliding_attention"

# kind: (architecture, name of transformers' config class, name of its model class, changes in all cases). Plain cases have sizes that fill
# whole vector registers, so a row's bits do not depend on the batch. Other cases are small, and no two of their sizes are equal.
KINDS: Mapping[str, tuple[str, str, str, Changes]] = MappingProxyType(
    {
        "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", "Qwen2ForCausalLM", HEADS),
        "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", "Qwen3ForCausalLM", {**HEADS, "head_dim": 16}),
        "qwen3_moe": (
            "Qwen3MoeForCausalLM", "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
            {**HEADS, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 3, "norm_topk_prob": True},
        ),
        "llama": ("LlamaForCausalLM", "LlamaConfig", "LlamaForCausalLM", HEADS),
        "mistral": ("MistralForCausalLM", "MistralConfig", "MistralForCausalLM", {**HEADS, "sliding_window": None}),
        "mixtral": ("MixtralForCausalLM", "MixtralConfig", "MixtralForCausalLM", {**HEADS, "num_local_experts": 16}),
        "phi3": ("Phi3ForCausalLM", "Phi3Config", "Phi3ForCausalLM", {**HEADS, "pad_token_id": 0}),
        "gemma": ("GemmaForCausalLM", "GemmaConfig", "GemmaForCausalLM", GEMMA_HEADS),
        "gemma2": (
            "Gemma2ForCausalLM", "Gemma2Config", "Gemma2ForCausalLM",
            {
                **GEMMA_HEADS, "sliding_window": 6, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 4.0,
                "final_logit_softcapping": 7.0,
            },
        ),
        "gemma3": (
            "Gemma3ForCausalLM", "Gemma3TextConfig", "Gemma3ForCausalLM",
            {
                **GEMMA_HEADS, "sliding_window": 6, "query_pre_attn_scalar": 20, "rope_parameters": TWO_ROPES,
                "layer_types": [SLIDING, FULL, SLIDING],
            },
        ),
        "gemma3_vision": (
            "Gemma3ForConditionalGeneration", "Gemma3Config", "Gemma3ForConditionalGeneration",
            {**GEMMA_HEADS, "sliding_window": 6, "rope_parameters": SLOWED, "layer_types": [SLIDING, SLIDING, FULL]},
        ),
        "ernie4_5": ("Ernie4_5ForCausalLM", "Ernie4_5Config", "Ernie4_5ForCausalLM", {**HEADS, "head_dim": 16}),
        "ernie4_5_moe": (
            "Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM",
            {**HEADS, "moe_intermediate_size": 32, "moe_num_experts": 16, "moe_k": 3, "moe_layer_start_index": 1},
        ),
        "gpt2": ("GPT2LMHeadModel", "GPT2Config", "GPT2LMHeadModel", {"n_layer": 3, "n_head": 4, "n_positions": 256}),
    }
)  # fmt: skip
PLAIN = {"vocab_size": 304, "hidden_size": 64, "intermediate_size": 80}
ODD = {"vocab_size": 300, "hidden_size": 40, "intermediate_size": 72}

# kind: {setting: changes}, on top of the sizes `ODD`. "weights", "stored" and "max_model_len" are fields of `Case`, not of the config.
SETTINGS: Mapping[str, Mapping[str, Changes]] = MappingProxyType(
    {
        "qwen2": {
            "7 query heads a key head, tied": {
                "hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "tie_word_embeddings": True
            },
            "windows from layer 1 on": {**WINDOWED, "max_window_layers": 1},
            "windows by layer type": {**WINDOWED, "layer_types": [SLIDING, FULL, SLIDING]},
            "yarn": {"rope": YARN},
        },
        "qwen3": {
            "head_dim 24, tied": {"head_dim": 24, "tie_word_embeddings": True},
            "7 query heads a key head, biases": {"num_attention_heads": 7, "num_key_value_heads": 1, "attention_bias": True},
            "3 key heads, yarn": {"head_dim": 32, "num_attention_heads": 3, "num_key_value_heads": 3, "rope": YARN},
            "windows from layer 1 on": {**WINDOWED, "max_window_layers": 1},
            "k_norm gains to 96.5": {"weights": "gains"},
        },
        "qwen3_moe": {
            "weights of experts not normalised, biases": {"norm_topk_prob": False, "attention_bias": True, "num_experts": 6},
            "layer 1 without experts": {"mlp_only_layers": [1], "num_experts": 6},
            "experts in every second layer": {"decoder_sparse_step": 2, "num_experts_per_tok": 1},
            "windows": {**WINDOWED, "num_experts": 6},
            "k_norm gains to 96.5": {"weights": "gains"},
        },
        "llama": {
            "llama3 rope": {"rope": LLAMA3},
            "linear rope, 7 query heads a key head, tied": {
                "hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "tie_word_embeddings": True,
                "rope": {"rope_type": "linear", "factor": 2.5},
            },
            "biases": {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
            "head_dim 22": {"head_dim": 22},
        },
        "mistral": {
            "window 7": {"sliding_window": 7},
            "window 1": {"sliding_window": 1},
            "head_dim 24": {"head_dim": 24},
        },
        "mixtral": {
            "2 of 5 experts": {"num_local_experts": 5},
            "1 of 3 experts, window 11": {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 11},
        },
        "phi3": {
            "3/4 of a head turn": {"hidden_size": 64, "rope": {"partial_rotary_factor": 0.75}},
            "half of a head turns, window 9": {"hidden_size": 64, "rope": {"partial_rotary_factor": 0.5}, "sliding_window": 9},
            "longrope, short": {"hidden_size": 64, "rope": LONGROPE, "original_max_position_embeddings": 160},
            "longrope, long": {
                "hidden_size": 64, "rope": LONGROPE, "original_max_position_embeddings": 64, "max_model_len": 256,
            },
            "longrope as su, 3/4 beside it": {
                "hidden_size": 64, "rope": LONGROPE, "original_max_position_embeddings": 64, "max_model_len": 65, "stored": "su"
            },
        },
        "gemma": {
            "one key head, gelu": {"num_key_value_heads": 1, "hidden_act": "gelu"},
            "gelu_new, untied": {"hidden_act": "gelu_new", "tie_word_embeddings": False},
            "biases, head_dim 18": {"attention_bias": True, "head_dim": 18},
        },
        "gemma2": {
            "no soft caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            "windows in all layers, biases": {"layer_types": [SLIDING] * 3, "attention_bias": True},
            "windows longer than the context": {"sliding_window": 4096},
        },
        "gemma3": {
            "linear rope of full layers": {"rope_parameters": SLOWED},
            "flat keys, a pattern of 2": {
                "layer_types": None, "sliding_window_pattern": 2, "rope_parameters": SLOWED, "stored": "flat",
                "final_logit_softcapping": 7.0,
            },
            "windows longer than the context": {"sliding_window": 4096},
            "biases, untied": {"attention_bias": True, "tie_word_embeddings": False},
            "k_norm gains to 96.5": {"weights": "gains"},
        },
        "gemma3_vision": {"names of older checkpoints": {"stored": "language_model"}},
        "ernie4_5": {
            "biases, head_dim 18": {"use_bias": True, "head_dim": 18},
            "7 query heads a key head, untied": {
                "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 10, "tie_word_embeddings": False
            },
        },
        "ernie4_5_moe": {
            "no shared experts": {"moe_num_shared_experts": 0, "moe_num_experts": 6},
            "experts in layer 1 of 4": {
                "num_hidden_layers": 4, "moe_layer_interval": 2, "moe_layer_end_index": 2, "moe_num_experts": 6
            },
            "least sum of weights 0.9": {"moe_norm_min": 0.9},
        },
        "gpt2": {
            "names without a prefix": {"stored": "bare"},
            "buffers of old checkpoints": {"stored": "buffers", "n_inner": 56},
            "scores not scaled, gelu": {"scale_attn_weights": False, "activation_function": "gelu"},
            "untied": {"tie_word_embeddings": False},
        },
    }
)  # fmt: skip
HARD = {"large": "large activations", "zeros": "zero rows, heads and experts", "padded": "padded vocabulary"}
# A small soft cap would make large logits equal.
HARD_CHANGES: Mapping[tuple[str, str], Changes] = MappingProxyType(
    {("", "padded"): {"vocab_size": 389}, ("gemma2", "large"): {"final_logit_softcapping": 2000.0}}
)


def _cases() -> Iterator[tuple[str, Case]]:
    for kind, (architecture, _, _, own) in KINDS.items():

        def made(setting: str, sizes: Changes, changes: Changes, kind=kind, architecture=architecture, own=own) -> tuple[str, Case]:
            outside = {name: changes[name] for name in ("weights", "stored", "max_model_len") if name in changes}
            inside = {name: value for name, value in changes.items() if name not in outside}
            case = Case(architecture=architecture, setting=setting, kind=kind, changes={**sizes, **own, **inside}, **outside)
            return f"{kind}: {setting}", case

        yield made("plain", PLAIN, {})
        for setting, changes in SETTINGS[kind].items():
            yield made(setting, ODD, changes)
        for weights, setting in HARD.items() if kind != "gemma3_vision" else ():
            yield made(setting, PLAIN, {"weights": weights, **HARD_CHANGES.get((kind, weights), HARD_CHANGES.get(("", weights), {}))})


CASES: Mapping[str, Case] = MappingProxyType(dict(_cases()))
