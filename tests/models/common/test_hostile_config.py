"""Hostile values in `config.json`: reading ends soon, with a config whose table is small or in a typed error."""

import json
import math
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.errors import CheckpointError
from nanovllm.loading.load_model import find_spec
from nanovllm.models.common.layers import inverse_frequencies
from nanovllm.models.registry import REGISTRY
from nanovllm.testing.models import tiny_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 64, "low_freq_factor": 1, "high_freq_factor": 4}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "attention_factor": None}
SELDOM = (
    "decoder_sparse_step", "sliding_window_pattern", "max_window_layers", "rope_theta", "sliding_window", "partial_rotary_factor",
    "original_max_position_embeddings", "rope_local_base_freq", "n_inner", "query_pre_attn_scalar", "rms_norm_eps", "mscale",
)  # fmt: skip
HUGE = (10**5, 10**6, 10**9, 10**12, 10**18, 10**400, 2**31 - 1, 2**31)
VALUES = st.one_of(
    st.sampled_from(
        (*HUGE, *(-value for value in HUGE), 0, -1, True, False, "7", "", math.nan, math.inf, -math.inf, 1e-320, 1e308, [], {})
    ),
    st.integers(-(2**40), 2**40),
    st.floats(),
)


def written(architecture: str, rope: dict[str, Any] | None) -> dict[str, Any]:
    hf = json.loads(json.dumps(REGISTRY[architecture].config_to_hf(tiny_config(architecture))))
    text = hf.get("text_config", hf)
    if rope is not None:
        rope = json.loads(json.dumps(rope))  # a copy, because a value in it is changed
        text["rope_parameters"] = {"full_attention": rope} if architecture.startswith("Gemma3") else rope
    return hf


def numeric(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numeric(inner, (*path, key))
    if path and not isinstance(value, str):
        yield path


def changed(hf: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    inner = hf
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return hf


def read(architecture: str, hf: dict[str, Any]) -> None:
    try:
        config = REGISTRY[architecture].config_from_hf(hf)
    except CheckpointError as error:
        assert len(str(error)) < 1000
        return
    REGISTRY[architecture].param_table(config)
    for rope in (config.rope, config.local_rope, config.long_rope):
        assert rope is None or inverse_frequencies(rope, config.head_dim).isfinite().all()


@pytest.mark.parametrize("architecture", REGISTRY)
@settings(max_examples=150, deadline=5000)  # machines are shared; a size that is taken for memory takes much longer
@given(data=st.data())
def test_any_value_for_a_number_is_read_or_refused_soon(architecture: str, data: st.DataObject) -> None:
    hf = written(architecture, data.draw(st.sampled_from((None, YARN, LLAMA3, LINEAR, LONG))))
    text = hf.get("text_config", hf)
    paths = sorted({*numeric(hf), *((*(["text_config"] if text is not hf else []), name) for name in SELDOM)}, key=repr)
    read(architecture, changed(hf, data.draw(st.sampled_from(paths)), data.draw(VALUES)))


@pytest.mark.parametrize("architecture", REGISTRY)
def test_every_huge_size_is_refused_by_name_before_memory_is_taken(architecture: str) -> None:
    renamed = {"num_attention_heads": "num_", "num_key_value_heads": "num_kv_heads|num_key_value_heads"}
    sizes = ("num_", "n_", "hidden_", "vocab_", "head_")
    paths = [path for path in numeric(written(architecture, None)) if str(path[-1]).startswith(sizes)]
    assert len(paths) >= 5
    usual = REGISTRY[architecture].config_from_hf(written(architecture, None))
    tracemalloc.start()
    try:
        for path in paths:
            for size in HUGE[2:]:
                if size <= 2**31 and path[-1] in ("vocab_size", "n_positions"):
                    continue  # no table is made of it, and ids and positions may have this width
                started = time.thread_time()
                hf = changed(written(architecture, None), path, size)
                try:
                    config = REGISTRY[architecture].config_from_hf(hf)
                except CheckpointError as error:
                    assert any(name in str(error) for name in (path[-1], *renamed.get(path[-1], "").split("|"))), (path, error)
                else:
                    assert config == usual, path  # a key that this architecture does not read
                assert time.thread_time() - started < 2
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_sizes_are_refused_before_transformers_reads_them(tmp_path: Path) -> None:
    for hf in ({"num_hidden_layers": 10**9}, {"text_config": {"head_dim": 10**12}}):
        with pytest.raises(CheckpointError, match=r"num_hidden_layers=1000000000|head_dim=1000000000000"):
            find_spec({"architectures": ["OlmoForCausalLM"], "model_type": "olmo", **hf}, tmp_path)
