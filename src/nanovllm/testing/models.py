"""Small models for tests: a config, random weights, a byte-level tokenizer, and a Hugging Face folder with all of them."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch.utils import _pytree as pytree

from nanovllm.config import Mesh, ModelConfig, MoEConfig, RopeConfig
from nanovllm.loading.load_model import resolve_device
from nanovllm.models.common.params import ParamInfo
from nanovllm.models.common.sharding import sharded_config
from nanovllm.models.init_params import random_fingerprint, random_params
from nanovllm.models.model import Model
from nanovllm.models.registry import REGISTRY
from nanovllm.tokenizer.tokenizer import Tokenizer, make_tokenizer
from nanovllm.types import Tensor, dtype_of

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
BYTE_VOCAB = 256 + len(SPECIAL)  # the smallest vocabulary for `byte_tokenizer`
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

EXPERTS = MoEConfig(num_experts=6, top_k=2, intermediate_size=24, layers=(0, 1))
GEMMA = {"hidden_act": "gelu_tanh", "embed_scale": math.sqrt(32)}
SCALED = {"attention_scale": 0.2, "windows": (8, 0)}
GEMMA3 = {**GEMMA, **SCALED, "local_rope": RopeConfig(theta=500.0)}
# Fields that an architecture sets in a config of two layers, besides the sizes.
OWN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Qwen2ForCausalLM": {"attention_bias": True},
        "Qwen3MoeForCausalLM": {"moe": replace(EXPERTS, layers=(1,), normalise=False)},
        "MistralForCausalLM": {"windows": (8, 8)},
        "MixtralForCausalLM": {"moe": replace(EXPERTS, intermediate_size=48)},
        "GemmaForCausalLM": GEMMA,
        "Gemma2ForCausalLM": {**GEMMA, **SCALED, "attention_softcap": 5.0, "logit_softcap": 8.0},
        "Gemma3ForCausalLM": GEMMA3,
        "Gemma3ForConditionalGeneration": GEMMA3,
        "Ernie4_5_MoeForCausalLM": {"moe": replace(EXPERTS, layers=(1,), least_sum=1e-12, wide_router=True, shared_size=48)},
        "GPT2LMHeadModel": {"rope": RopeConfig(kind="learned"), "num_kv_heads": 4, "head_dim": 8, "attention_bias": True, "mlp_bias": True},
    }
)


def tiny_config(architecture: str = "Qwen3ForCausalLM", **changes: Any) -> ModelConfig:
    """Return a config of two layers that runs in milliseconds, with the fields that the architecture always sets.

    `changes` are fields of `ModelConfig`. The vocabulary may have any size from 1 on.
    """
    config = ModelConfig(
        architecture=architecture,
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=10000.0),
        tie_word_embeddings=False,
        max_position_embeddings=512,
    )
    own = dict(OWN.get(architecture, {}))
    if "windows" in own:  # repeat the windows of two layers
        own["windows"] = tuple(own["windows"][i % 2] for i in range(changes.get("num_layers", 2)))
    return replace(config, **{**own, **changes})


def random_model(
    config: ModelConfig,
    seed: int = 0,
    dtype: torch.dtype | str = "float32",
    *,
    device: torch.device | str = "cpu",
    std: float = 0.2,
    tokenizer: Tokenizer | None = None,
    mesh: Mesh | None = None,
) -> Model:
    """Return a model with random weights.

    Without a `tokenizer` the model gets the byte-level tokenizer if its vocabulary is large enough, else none. `std` is large so that the
    most probable tokens are clearly apart. With a `mesh`, the model is one rank's part of the same model.
    """
    if tokenizer is None and config.vocab_size >= BYTE_VOCAB:
        tokenizer = byte_tokenizer()
    target, kind = resolve_device(device), dtype_of(dtype)
    return Model(
        name=f"random-{seed}",
        config=config if mesh is None else sharded_config(config, mesh),
        params=random_params(config, seed=seed, device=target, dtype=kind, std=std, mesh=mesh),
        tokenizer=tokenizer,
        spec=REGISTRY[config.architecture],
        generation_config={},
        fingerprint=random_fingerprint(config, seed, std),
        device=target,
        dtype=kind,
    )


def save_hf_folder(path: Path, config: ModelConfig, seed: int = 0, dtype: torch.dtype | str = "float32", *, num_shards: int = 1) -> Path:
    """Write a Hugging Face folder with random weights and the byte-level tokenizer, with an index for several shards; return `path`."""
    path.mkdir(parents=True, exist_ok=True)
    saved = replace(config, dtype=str(dtype_of(dtype)).removeprefix("torch."))
    (path / "config.json").write_text(json.dumps(REGISTRY[config.architecture].config_to_hf(saved)))
    save_tokenizer(path)
    tensors = random_tensors(config, seed, dtype_of(dtype))
    if num_shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    names = sorted(tensors)
    places = {name: f"model-{i % num_shards + 1:05}-of-{num_shards:05}.safetensors" for i, name in enumerate(names)}
    for shard in sorted(set(places.values())):
        save_file({name: tensors[name] for name in names if places[name] == shard}, path / shard, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def random_tensors(config: ModelConfig, seed: int, dtype: torch.dtype, std: float = 0.2) -> dict[str, Tensor]:
    """Return random tensors by checkpoint name, in the shapes of the architecture's parameter table."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for info in pytree.tree_leaves(REGISTRY[config.architecture].param_table(config)):
        if isinstance(info, ParamInfo):
            for name, shape in zip(info.sources, info.source_shapes, strict=True):
                mean = 1.0 - info.offset if info.kind == "gain" else 0.0
                tensors[name] = torch.empty(shape).normal_(mean, std, generator=generator).to(dtype)
    return tensors


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte, then the special tokens `SPECIAL`, and a chat template that can disable thinking."""
    return make_tokenizer(_byte_backend(), {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, CHAT_TEMPLATE)


def save_tokenizer(path: Path) -> None:
    """Write the byte-level tokenizer and its chat template into a folder."""
    _byte_backend().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _byte_backend() -> tokenizers.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL[:3]])
    backend.add_tokens([AddedToken(token, special=False) for token in SPECIAL[3:]])
    return backend
