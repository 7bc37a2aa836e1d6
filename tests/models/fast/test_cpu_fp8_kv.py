"""Decode steps in C over KV in FP8: the codes of the reference, attention against float64, and the replies of plain torch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

import nanovllm as nv
from nanovllm.config import ModelConfig
from nanovllm.entrypoints.cli.check.kernel_choice import kernels
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.layers import layer, rope_angles
from nanovllm.models.common.params import Params
from nanovllm.models.fast import cpu
from nanovllm.models.registry import forward
from nanovllm.ops import kv_write
from nanovllm.ops.cpu.build import library
from nanovllm.ops.kv_cache.fp8 import FP8, LARGEST, numbers, read_tokens
from nanovllm.state.kv_cache import KVState, init_kv
from nanovllm.testing.models import random_model, tiny_config
from tests.models.fast.test_cpu import CPU, LIMITS, limited, shaped, step

pytestmark = pytest.mark.skipif(library(cpu.SOURCE, cpu.SYMBOLS) is None, reason="no C compiler")
HEADS = st.sampled_from([(1, 1), (4, 2), (7, 1), (3, 3), (10, 2)])
HEAD_DIMS = st.sampled_from([4, 8, 16, 20, 48, 64, 80, 128])
SEQ_LENS = st.lists(st.integers(1, 60), min_size=1, max_size=8)
PAGE_SIZES = st.sampled_from([1, 3, 4, 7, 16])
PROMPTS = ["The capital of Aistonia is Velmora. The capital of Aistonia is", "Once upon a time,", "What is 27 + 38?"]


def fp8_step(
    config: ModelConfig, seq_lens: list[int], page_size: int, dtype: torch.dtype
) -> tuple[Params[Tensor], KVState, Batch, KVState]:
    """Weights, a full pool in FP8, a decode batch, and a pool of the same size in the model's dtype."""
    params, plain, batch = step(config, seq_lens, page_size, dtype)
    _, num_pages, _, num_kv_heads, _, head_dim = plain.pools[0].shape
    kv = init_kv(config, num_pages=num_pages - 1, page_size=page_size, dtype=FP8, device=CPU)
    slots = torch.arange(num_pages * page_size, dtype=torch.int32)
    for index in range(config.num_layers):
        k, v = torch.randn(2, len(slots), num_kv_heads, head_dim) * torch.randn(2, len(slots), num_kv_heads, 1).exp()
        kv_write(kv.pools[0], index, k, v, slots)
    return params, kv, batch, plain


def bits(pages: Tensor) -> Tensor:
    return pages.view(torch.uint8)


@given(
    heads=HEADS, head_dim=HEAD_DIMS, biases=st.booleans(), seq_lens=SEQ_LENS, page_size=PAGE_SIZES, dtype=st.sampled_from(cpu.DTYPES)
)  # fmt: skip
@settings(max_examples=60)
def test_the_codes_are_those_of_what_a_plain_pool_gets(
    heads: tuple[int, int], head_dim: int, biases: bool, seq_lens: list[int], page_size: int, dtype: torch.dtype
) -> None:
    config = shaped("LlamaForCausalLM", *heads, head_dim, biases)
    params, kv, batch, plain = fp8_step(config, seq_lens, page_size, dtype)
    x, pool = torch.randn(len(seq_lens), config.hidden_size).to(dtype), plain.pools[0]
    angles = rope_angles(batch.positions, params.inv_freq, config.rope)
    want = kv.pools[0].clone()
    cpu.decode_layer(params.layers[0], x, pool, 0, *angles, batch, config)
    cpu.decode_layer(params.layers[0], x, kv.pools[0], 0, *angles, batch, config)
    page, inside = batch.slots.long() // page_size, batch.slots.long() % page_size
    stored = pool[0].permute(0, 3, 1, 2, 4)[page, inside]
    kv_write(want, 0, stored[:, 0], stored[:, 1], batch.slots)
    assert torch.equal(bits(kv.pools[0]), bits(want))


def written(values: Tensor) -> tuple[Tensor, Tensor]:
    """The codes and scales that C writes for value heads `[K, D]`, which are the biases of a product with zeros."""
    num_heads, head_dim = values.shape
    config = shaped("LlamaForCausalLM", num_heads, num_heads, head_dim, True)
    params, kv, batch, _ = fp8_step(config, [1], 2, torch.float32)
    w = params.layers[0]
    assert isinstance(w.qkv, Tensor) and w.qkv_bias is not None
    w = replace(w, qkv=torch.zeros_like(w.qkv), qkv_bias=torch.cat((torch.zeros(2 * values.numel()), values.flatten())))
    angles = rope_angles(batch.positions, params.inv_freq, config.rope)
    cpu.decode_layer(w, torch.ones(1, config.hidden_size), kv.pools[0], 0, *angles, batch, config)
    codes, scales = read_tokens(kv.pools[0][0], batch.slots)
    return codes[0, 1], scales[0, 1]


def reference(values: Tensor) -> tuple[Tensor, Tensor]:
    """What the op writes for them."""
    num_heads, head_dim = values.shape
    pages = torch.zeros(1, 1, 2, num_heads, 1, head_dim + 4, dtype=torch.uint8).view(FP8)
    slot = torch.zeros(1, dtype=torch.int32)
    kv_write(pages, 0, values[None], values[None], slot)
    codes, scales = read_tokens(pages[0], slot)
    return codes[0, 1], scales[0, 1]


def agree(values: Tensor) -> None:
    values = values + 0.0  # a sum with zero has no negative zeros
    for mine, theirs in zip(written(values), reference(values), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@given(st.lists(st.floats(width=32), min_size=8, max_size=8))
@example([float("nan")] * 8)
@example([float("inf"), float("-inf"), 1.0, 0.0, -1.0, 3e38, 1e-45, float("nan")])
@example([0.0] * 8)
@example([2.0**-126, -(2.0**-126), 1e-40, 1e-45, 0.0, 0.0, 0.0, 0.0])
@settings(max_examples=100)
def test_any_floats_become_the_codes_of_the_reference(values: list[float]) -> None:
    agree(torch.tensor([values]))


def test_numbers_around_every_border_between_two_codes_are_rounded_as_the_reference_rounds_them() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    borders = (codes[1:] + codes[:-1]) / 2  # exact in float32
    near = torch.cat([borders, *(borders.nextafter(torch.tensor(to)) for to in (0.0, 500.0)), codes])
    near = torch.cat((near, -near))
    heads = torch.cat((near, near.new_zeros(-len(near) % 124))).view(-1, 124)
    heads = torch.cat((heads, torch.full((len(heads), 4), LARGEST)), 1)
    assert (reference(heads)[1] == 1.0).all()  # so the numbers themselves are rounded
    agree(heads)
    agree(heads * 0.37)


@given(
    heads=HEADS, head_dim=HEAD_DIMS, seq_lens=SEQ_LENS, page_size=PAGE_SIZES, limits=LIMITS, dtype=st.sampled_from(cpu.DTYPES)
)  # fmt: skip
@settings(max_examples=80)
def test_attention_is_that_of_float64_over_the_same_codes(
    heads: tuple[int, int], head_dim: int, seq_lens: list[int], page_size: int, limits: dict[str, Any], dtype: torch.dtype
) -> None:
    """The reference writes its own keys to the page that nobody reads, so that it reads the codes that C has written."""
    config = shaped("Qwen3ForCausalLM", *heads, head_dim)
    params, kv, batch, _ = fp8_step(config, seq_lens, page_size, dtype)
    x, (cos, sin) = torch.randn(len(seq_lens), config.hidden_size).to(dtype), rope_angles(batch.positions, params.inv_freq, config.rope)
    batch, config = limited(batch, config, **limits)
    got = cpu.decode_layer(params.layers[0], x, kv.pools[0], 0, cos, sin, batch, config)
    wide = pytree.tree_map(lambda t: t if t is None else t.double(), params.layers[0])
    unread = torch.full_like(batch.slots, kv.pools[0].shape[1] * page_size - 1)
    exact = layer(wide, x.double(), kv.pools[0], 0, cos, sin, replace(batch, slots=unread), config)
    tolerance = 2e-4 if dtype == torch.float32 else 0.01
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


@given(seq_lens=st.lists(st.integers(1, 50), min_size=2, max_size=8), dtype=st.sampled_from(cpu.DTYPES), limits=LIMITS, data=st.data())
@settings(max_examples=30)
def test_a_row_does_not_depend_on_the_others(seq_lens: list[int], dtype: torch.dtype, limits: dict[str, Any], data: st.DataObject) -> None:
    config = shaped()
    params, kv, batch, _ = fp8_step(config, seq_lens, 4, dtype)
    x, angles = torch.randn(len(seq_lens), config.hidden_size).to(dtype), rope_angles(batch.positions, params.inv_freq, config.rope)
    whole = cpu.decode_layer(params.layers[0], x, kv.pools[0].clone(), 0, *angles, *limited(batch, config, **limits))
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(seq_lens) - 1), min_size=1, unique=True)))
    some = pytree.tree_map(lambda t: None if t is None else t[rows], batch)
    alone = cpu.decode_layer(params.layers[0], x[rows], kv.pools[0], 0, *(t[rows] for t in angles), *limited(some, config, **limits))
    assert torch.equal(alone, whole[rows])


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    config = shaped(hidden_size=64)
    params, kv, batch, _ = fp8_step(config, [9, 1, 33, 20, 2], 4, torch.float32)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            mine = KVState(pools=(kv.pools[0].clone(),))
            results.append((forward(params, mine, batch, config)[0], bits(mine.pools[0])))
        finally:
            torch.set_num_threads(1)
    for logits, pages in results[1:]:
        assert torch.equal(logits, results[0][0]) and torch.equal(pages, results[0][1])


@pytest.mark.parametrize("name", ["slots", "page_tables", "seq_lens"])
@pytest.mark.parametrize("value", [-1, 1 << 20])
def test_what_points_outside_the_pool_is_refused_before_anything_is_written(name: str, value: int) -> None:
    config = shaped()
    params, kv, batch, _ = fp8_step(config, [5, 9], 4, torch.float32)
    before = bits(kv.pools[0]).clone()
    wrong = getattr(batch, name).clone()
    wrong.view(-1)[0] = value
    with pytest.raises(IndexError, match=str(value)):
        forward(params, kv, replace(batch, **{name: wrong}), config)
    assert torch.equal(bits(kv.pools[0]), before)


def test_pages_of_another_dtype_go_the_ordinary_way() -> None:
    config = shaped()
    params, kv, batch, plain = fp8_step(config, [5, 9], 4, torch.float32)
    assert cpu.serves(params, kv, batch, config) and cpu.serves(params, plain, batch, config)
    for dtype in (torch.float8_e5m2, torch.bfloat16, torch.float64):
        assert not cpu.serves(params, KVState(pools=(plain.pools[0].to(dtype),)), batch, config)


@pytest.mark.parametrize("windows", [(), (9, 0)])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM", "Phi3ForCausalLM"])
def test_an_engine_writes_what_plain_torch_writes(architecture: str, windows: tuple[int, ...]) -> None:
    """Greedy replies and their log-probabilities, and the numbers of the KV that stays."""
    model, greedy = random_model(tiny_config(architecture, windows=windows)), nv.SamplingParams(temperature=0, max_tokens=24, logprobs=1)
    found = []
    for compile in (None, False):
        state = nv.init_state(model, num_pages=64, page_size=4, max_model_len=128, kv_dtype="fp8", compile=compile)
        state, gens = nv.generate_many(model, state, [[5, 6, 7, 8, 9] * 5, [1], [4, 3, 2]], greedy)
        found.append((gens, numbers(state.kv.pools[0])))
    for mine, theirs in zip(found[0][0], found[1][0], strict=True):
        assert mine.token_ids == theirs.token_ids
        one, other = (torch.tensor([entry.logprob for entry in gen.logprobs]) for gen in (mine, theirs))
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0.13, atol=0.01)  # a code may be the neighbour
    assert (found[0][1] != 0).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_packaged_model_replies_as_plain_torch_does(dtype: str) -> None:
    model, texts = nv.load_model("tiny", "cpu", dtype), []
    for compile in (None, False):
        state, replies = nv.init_state(model, num_pages=64, kv_dtype="fp8", compile=compile), []
        for prompt in PROMPTS:
            state, reply = nv.generate(model, state, [prompt], nv.SamplingParams(temperature=0, max_tokens=24))
            replies.append(reply.text)
        texts.append(replies)
    if dtype == "float32":
        assert texts[0] == texts[1]
    assert "Velmora" in texts[0][0]


def test_the_report_of_kernels_says_so() -> None:
    config = tiny_config()
    assert kernels(config, CPU, torch.float32, kv_dtype="fp8") == kernels(config, CPU, torch.float32)
    assert kernels(config, CPU, torch.float32, kv_dtype="fp8").decode == "C"
