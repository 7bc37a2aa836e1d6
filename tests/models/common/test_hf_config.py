"""Reading `config.json`: both forms of the rotary settings, and a refusal for every setting that would be computed wrongly."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.config import EngineConfig, ModelConfig, RopeConfig, for_length
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.models.common.hf_config import config_to_hf, read_rope
from nanovllm.models.common.layers import inverse_frequencies
from nanovllm.models.registry import REGISTRY, unfitted
from nanovllm.testing.models import tiny_config

ROPES = {
    "default": RopeConfig(theta=5e5),
    "linear": RopeConfig(theta=1e4, kind="linear", factor=3.0),
    "llama3": RopeConfig(
        theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "yarn": RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position_embeddings=128, attention_factor=1.25, beta_fast=20.0),
}


@pytest.mark.parametrize("architecture", REGISTRY)
@pytest.mark.parametrize("rope", ROPES)
def test_what_is_written_is_read_back(architecture: str, rope: str) -> None:
    learned = architecture == "GPT2LMHeadModel" or (architecture == "Phi3ForCausalLM" and rope not in ("default", "linear"))
    own = {} if learned else {"rope": ROPES[rope]}
    biased = {"LlamaForCausalLM", "Qwen3ForCausalLM", "GemmaForCausalLM"}
    config = tiny_config(
        architecture,
        **own,
        **({"attention_bias": True} if architecture in biased else {}),
        tie_word_embeddings=True,
        bos_token_id=3,
        eos_token_ids=(7, 8),
        dtype="bfloat16",
    )
    assert REGISTRY[architecture].config_from_hf(json.loads(json.dumps(REGISTRY[architecture].config_to_hf(config)))) == config


def test_both_forms_of_rope_are_one() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    old = {"rope_theta": 1e6, "rope_scaling": scaling, "max_position_embeddings": 2048}
    new = {"rope_parameters": dict(scaling, rope_type="yarn", rope_theta=1e6), "max_position_embeddings": 2048}
    assert read_rope(old) == read_rope(new)
    assert (
        read_rope({"rope_theta": 1e6})
        == read_rope({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}})
        == RopeConfig(theta=1e6)
    )
    assert read_rope({}) == RopeConfig(theta=10000.0)


def test_both_forms_of_rope_at_once_are_merged() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    merged = {
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4},
        "max_position_embeddings": 2048,
    }
    assert read_rope(merged) == read_rope({"rope_theta": 1000000, "rope_scaling": scaling, "max_position_embeddings": 2048})
    for more in ({"rope_theta": 1e4}, {"rope_scaling": {"type": "linear"}}, {"rope_scaling": {"factor": 8.0}}):
        with pytest.raises(CheckpointError, match="disagree"):
            read_rope({**merged, **more})


YARNS = [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 128, "beta_fast": 20.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False, "attention_factor": 0.7},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.8, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 32},
]


@pytest.mark.parametrize("rope", YARNS, ids=repr)
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_frequencies_equal_those_of_transformers(rope: dict[str, Any], theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = LlamaConfig(hidden_size=96, num_attention_heads=2, max_position_embeddings=256, rope_parameters=dict(rope, rope_theta=theta))
    expected, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, torch.device("cpu"))
    ours = read_rope({"rope_parameters": dict(rope, rope_theta=theta), "max_position_embeddings": 256})
    torch.testing.assert_close(inverse_frequencies(ours, 48), expected, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize("factor", [1.0, 1.25, 4.0])
@pytest.mark.parametrize("original", [32768, 10240, None])
@pytest.mark.parametrize("saved", [True, False])  # whether the file that the scaling is added to was written by transformers 5
def test_yarn_is_added_as_the_model_cards_of_qwen_say(factor: float, original: int | None, saved: bool) -> None:
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    added = {"rope_type": "yarn", "factor": factor, **({} if original is None else {"original_max_position_embeddings": original})}
    base = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}} if saved else {"rope_theta": 1000000}
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 999, "num_hidden_layers": 2, "num_attention_heads": 16}
    hf = {**sizes, "num_key_value_heads": 8, "max_position_embeddings": 40960, **base, "rope_scaling": added}
    theirs = Qwen3Config(**json.loads(json.dumps({**hf, "rope_theta": 1000000})))
    expected, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    ours = REGISTRY["Qwen3ForCausalLM"].config_from_hf(hf)
    torch.testing.assert_close(inverse_frequencies(ours.rope, 128), expected, rtol=1e-6, atol=0)
    assert ours.rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    assert ours.max_position_embeddings == max(40960, int(factor * (original or 40960)))
    assert REGISTRY["Qwen3ForCausalLM"].config_from_hf(config_to_hf(ours)) == ours


def test_windows_shorter_than_a_stretched_context_are_kept() -> None:
    hf = {**config_to_hf(tiny_config("MistralForCausalLM")), "sliding_window": 512, "max_position_embeddings": 512}
    read: Callable[[Any], ModelConfig] = REGISTRY["MistralForCausalLM"].config_from_hf
    assert read(hf).windows == ()
    assert read({**hf, "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}).windows == (512, 512)


REFUSED = {
    "dynamic rope": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    "longrope": ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "longrope"),
    "rope by layer type": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer type"),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "rope factor": ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
    "rope as text": ({"rope_parameters": "yarn"}, "flat object"),
    "turns of yarn": ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1.0}}, "beta_fast=-1.0"),
    "theta": ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta"),
    "activation": ({"hidden_act": "relu", "activation_function": "relu"}, "relu"),
    "no vocabulary": ({"vocab_size": None}, "vocab_size"),
    "text for a size": ({"hidden_size": "32"}, "hidden_size"),
    "no heads": ({"num_attention_heads": 0, "num_key_value_heads": None, "head_dim": None}, "num_heads=0"),
    "no layers": ({"num_hidden_layers": 0, "layer_types": None, "n_layer": 0}, "num_layers"),
    "head ratio": ({"num_key_value_heads": 3}, "num_kv_heads"),
    "odd head_dim": ({"head_dim": 15}, "head_dim"),
    "dtype": ({"dtype": "int8"}, "int8"),
    "eos": ({"eos_token_id": ["x"]}, "eos_token_id"),
    "tie": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
}


FLAT = [name for name in REGISTRY if name not in ("GPT2LMHeadModel", "Gemma3ForConditionalGeneration")]  # with the usual keys
OWN_ROPE = {
    "Phi3ForCausalLM": ("partial rope", "rope as text", "theta", "longrope", "rope by layer type", "turns of yarn"),
    "Gemma3ForCausalLM": ("rope by layer type", "rope as text", "rope factor", "turns of yarn"),
}


@pytest.mark.parametrize("architecture", FLAT)
@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_settings_are_named(architecture: str, case: str) -> None:
    if case in OWN_ROPE.get(architecture, ()):
        pytest.skip("this architecture reads it by itself")
    change, named = REFUSED[case]
    hf = config_to_hf(tiny_config(architecture))
    if "rope_scaling" in change:
        del hf["rope_parameters"]
    with pytest.raises(CheckpointError, match=named):
        REGISTRY[architecture].config_from_hf({**hf, **change})


def test_qwen3_has_windows_where_they_are_switched_on() -> None:
    hf = {**config_to_hf(tiny_config("Qwen3ForCausalLM")), "sliding_window": 9}
    read: Callable[[Any], ModelConfig] = REGISTRY["Qwen3ForCausalLM"].config_from_hf
    assert read({**hf, "use_sliding_window": False}).windows == ()
    upper = {**hf, "use_sliding_window": True, "layer_types": None, "max_window_layers": 1}
    assert read(upper).windows == (0, 9)
    assert read({**upper, "max_window_layers": 2}).windows == ()
    assert read({**upper, "sliding_window": 512}).windows == ()  # no shorter than all that the model can hold
    assert read({**hf, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}).windows == (9, 0)
    for layer_types in (["chunked_attention"] * 2, ["full_attention"], "full_attention"):
        with pytest.raises(CheckpointError, match="layer_types"):
            read({**hf, "layer_types": layer_types})
    for window in (0, -1, True, "9"):
        with pytest.raises(CheckpointError, match="sliding_window"):
            read({**upper, "sliding_window": window})


def test_windows_of_gemma3_are_kept_for_the_rope_that_comes_with_them() -> None:
    hf = config_to_hf(tiny_config("Gemma3ForCausalLM"))
    read: Callable[[Any], ModelConfig] = REGISTRY["Gemma3ForCausalLM"].config_from_hf
    assert read({**hf, "sliding_window": 9}).windows == (9, 0)
    assert read({**hf, "sliding_window": 4096}).windows == (4096, 0)
    assert read({**hf, "sliding_window": None}).windows == (512, 0)
    assert read({**hf, "layer_types": ["full_attention"] * 2}).windows == ()


def test_longrope_beyond_what_a_model_has_is_one_rope() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    hf = {**config_to_hf(tiny_config("Phi3ForCausalLM")), "rope_parameters": rope}
    read: Callable[[Any], ModelConfig] = REGISTRY["Phi3ForCausalLM"].config_from_hf
    assert read({**hf, "original_max_position_embeddings": 512}).long_rope is None
    long = read({**hf, "original_max_position_embeddings": 128})
    assert long.long_rope is not None
    assert for_length(long, 128) == for_length(long, None) == replace(long, long_rope=None, max_position_embeddings=128)
    assert for_length(long, 129) == replace(long, rope=long.long_rope, long_rope=None)


def test_longrope_and_padded_heads_are_written_as_a_checkpoint_has_them() -> None:
    short, long = (RopeConfig(kind="longrope", factors=(f,) * 6, original_max_position_embeddings=128) for f in (1.0, 2.0))
    read: Callable[[Any], ModelConfig] = REGISTRY["Phi3ForCausalLM"].config_from_hf
    config = tiny_config("Phi3ForCausalLM", head_dim=12, rope=short, long_rope=long)
    assert read(json.loads(json.dumps(config_to_hf(config)))) == config
    usual = for_length(config, None)
    assert read(config_to_hf(usual)) == usual
    padded = replace(usual, head_dim=16, stored_head_dim=12, attention_scale=usual.scale, rope=replace(short, partial=0.75))
    assert unfitted(padded) == usual and unfitted(usual) is usual
    assert unfitted(replace(padded, attention_scale=0.3)) == replace(usual, attention_scale=0.3)
    for width in (98, 196, 206, 214):  # shares that floats do not hold the inverse of
        wide = replace(usual, head_dim=256, stored_head_dim=width, rope=replace(short, partial=width / 256))
        assert unfitted(wide).rope.partial == 1.0


@pytest.mark.parametrize("partial", [0.2, 0.0, 1.5])
def test_a_part_of_a_head_that_cannot_turn_is_named(partial: float) -> None:
    hf = {**config_to_hf(tiny_config("Phi3ForCausalLM")), "rope_parameters": None, "partial_rotary_factor": partial}
    with pytest.raises(CheckpointError, match=rf"partial_rotary_factor={partial}"):  # 3 of 16 channels; none; more than there are
        REGISTRY["Phi3ForCausalLM"].config_from_hf(hf)


@pytest.mark.parametrize("architecture", FLAT)
def test_defaults_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    import transformers

    name = {"Gemma3ForCausalLM": "Gemma3TextConfig"}.get(architecture, architecture.replace("ForCausalLM", "Config"))
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "pad_token_id": 0}
    theirs = getattr(transformers, name)(**sizes)
    ours = REGISTRY[architecture].config_from_hf(sizes)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64 // 4)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    ropes = theirs.rope_parameters if architecture == "Gemma3ForCausalLM" else {"full_attention": theirs.rope_parameters}
    assert ours.rope.theta == ropes["full_attention"]["rope_theta"]
    assert ours.local_rope is None or ours.local_rope.theta == ropes["sliding_attention"]["rope_theta"]
    assert ours.windows == tuple(_windows(theirs))
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.bos_token_id == theirs.bos_token_id
    assert (list(ours.eos_token_ids) or [None])[0] == theirs.eos_token_id


def _windows(theirs: Any) -> list[int]:
    window = getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    given = [window if window and kind == "sliding_attention" else 0 for kind in types]
    return given if any(given) else []


@pytest.mark.usefixtures("untyped")
def test_limits_of_an_engine_are_named() -> None:
    good = EngineConfig(num_pages=1, page_size=1, max_model_len=1, max_num_seqs=1, max_num_batched_tokens=1, seed=2**63 - 1)
    for name, values in {"seed": (-1, 1.5, True, 2**63, 2**64), "page_size": (0, True, 1.5)}.items():
        for value in values:
            with pytest.raises(InvalidRequestError, match=f"{name}="):
                replace(good, **{name: value})
