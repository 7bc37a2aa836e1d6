"""The C form of a decode step beside the models' own layers: right within rounding, and a row's bits depend on no other row."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from nanovllm.config import ModelConfig, RopeConfig
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.layers import layer, rope_angles
from nanovllm.models.common.params import Params
from nanovllm.models.fast import cpu
from nanovllm.models.init_params import random_params
from nanovllm.models.registry import REGISTRY, forward
from nanovllm.ops.cpu.build import library
from nanovllm.state.kv_cache import KVState, init_kv
from nanovllm.testing.models import tiny_config

pytestmark = pytest.mark.skipif(library(cpu.SOURCE, cpu.SYMBOLS) is None, reason="no C compiler")
CPU = torch.device("cpu")


def shaped(
    architecture: str = "Qwen3ForCausalLM", heads: int = 4, kv_heads: int = 2, head_dim: int = 16, biases: bool = False, **more: int
):
    sizes = {"hidden_size": 40, "intermediate_size": 72, "vocab_size": 83, **more}
    mlp_bias = {"mlp_bias": biases} if architecture.startswith("Llama") else {}
    return tiny_config(architecture, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, attention_bias=biases, **sizes, **mlp_bias)


def step(
    config: ModelConfig, seq_lens: list[int], page_size: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Params[Tensor], KVState, Batch]:
    """Weights, a pool full of numbers, and a decode batch in which no two rows share a page."""
    torch.manual_seed(0)
    params = random_params(config, seed=0, device=CPU, dtype=dtype, std=0.2)
    counts = [-(-length // page_size) for length in seq_lens]
    kv = init_kv(config, num_pages=sum(counts) + 2, page_size=page_size, dtype=dtype, device=CPU)
    kv.pools[0].normal_()
    order = torch.randperm(sum(counts) + 2, dtype=torch.int32)
    tables = torch.full((len(counts), max(counts) + 1), sum(counts) + 2, dtype=torch.int32)
    for row, pages in enumerate(order[: sum(counts)].split(counts)):
        tables[row, : len(pages)] = pages
    last = torch.tensor(seq_lens, dtype=torch.int32) - 1
    slots = tables.gather(1, (last // page_size).long()[:, None])[:, 0] * page_size + last % page_size
    ids = torch.randint(0, config.vocab_size, (len(counts),), dtype=torch.int32)
    return params, kv, Batch(input_ids=ids, positions=last, slots=slots, page_tables=tables, seq_lens=last + 1)


def both(params: Params[Tensor], kv: KVState, batch: Batch, config: ModelConfig) -> tuple[Tensor, KVState, Tensor, KVState]:
    """Logits and KV of the C form and of the architecture's own forward."""
    assert cpu.serves(params, kv, batch, config)
    mine, theirs = (pytree.tree_map(torch.clone, kv) for _ in range(2))
    logits, mine = forward(params, mine, batch, config)
    exact, theirs = REGISTRY[config.architecture].forward(params, theirs, batch, config)
    return logits, mine, exact, theirs


@given(
    architecture=st.sampled_from(["Qwen3ForCausalLM", "LlamaForCausalLM"]),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (7, 1), (6, 3)]),
    head_dim=st.sampled_from([2, 8, 16, 22, 48, 64]),
    hidden_size=st.sampled_from([8, 16, 33, 64, 96]),
    intermediate_size=st.sampled_from([1, 31, 64, 70]),
    biases=st.booleans(),
    seq_lens=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    page_size=st.sampled_from([1, 3, 16]),
)
@settings(max_examples=60)
def test_equal_to_the_models_own_layers(
    architecture: str, heads: tuple[int, int], head_dim: int, hidden_size: int, intermediate_size: int, biases: bool, seq_lens: list[int],
    page_size: int,
) -> None:  # fmt: skip
    config = shaped(architecture, *heads, head_dim, biases, hidden_size=hidden_size, intermediate_size=intermediate_size)
    logits, mine, exact, theirs = both(*step(config, seq_lens, page_size, torch.float32), config)
    torch.testing.assert_close(logits, exact, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(mine.pools[0], theirs.pools[0], rtol=2e-4, atol=2e-4)


def limited(batch: Batch, config: ModelConfig, scale: float = 0.0, window: int = 0, softcap: float = 0.0) -> tuple[Batch, ModelConfig]:
    """What a layer of this window and these scores is given."""
    return replace(batch, window=window), replace(config, attention_scale=scale, attention_softcap=softcap)


LIMITS = st.fixed_dictionaries(
    {"scale": st.sampled_from([0.1, 1.0]), "window": st.sampled_from([0, 1, 3, 16, 17, 100]), "softcap": st.sampled_from([0.0, 0.5, 50.0])}
)


@given(
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1)]),
    head_dim=st.sampled_from([2, 16, 22]),
    seq_lens=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    page_size=st.sampled_from([1, 3, 16]),
    limits=LIMITS,
)
@settings(max_examples=60)
def test_a_layer_sees_a_window_of_capped_scores(
    heads: tuple[int, int], head_dim: int, seq_lens: list[int], page_size: int, limits: dict[str, Any]
) -> None:
    config = shaped("Qwen3ForCausalLM", *heads, head_dim)
    params, kv, batch = step(config, seq_lens, page_size, torch.float32)
    mine, theirs, x = kv.pools[0].clone(), kv.pools[0].clone(), torch.randn(len(seq_lens), config.hidden_size)
    given = (0, *rope_angles(batch.positions, params.inv_freq, config.rope), *limited(batch, config, **limits))
    got = cpu.decode_layer(params.layers[0], x, mine, *given)
    torch.testing.assert_close(got, layer(params.layers[0], x, theirs, *given), rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-4)


@given(seq_lens=st.lists(st.integers(1, 50), min_size=2, max_size=8), dtype=st.sampled_from(cpu.DTYPES), limits=LIMITS, data=st.data())
@settings(max_examples=30)
def test_a_row_with_limits_does_not_depend_on_the_others(
    seq_lens: list[int], dtype: torch.dtype, limits: dict[str, Any], data: st.DataObject
) -> None:
    config = shaped()
    params, kv, batch = step(config, seq_lens, 4, dtype)
    x, angles = torch.randn(len(seq_lens), config.hidden_size).to(dtype), rope_angles(batch.positions, params.inv_freq, config.rope)
    whole = cpu.decode_layer(params.layers[0], x, kv.pools[0].clone(), 0, *angles, *limited(batch, config, **limits))
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(seq_lens) - 1), min_size=1, unique=True)))
    some = pytree.tree_map(lambda t: None if t is None else t[rows], batch)
    alone = cpu.decode_layer(params.layers[0], x[rows], kv.pools[0], 0, *(t[rows] for t in angles), *limited(some, config, **limits))
    assert torch.equal(alone, whole[rows])


def test_a_window_that_holds_every_row_changes_no_bit() -> None:
    config = shaped()
    params, kv, batch = step(config, [5, 30, 1, 17], 4, torch.float32)
    x, angles = torch.randn(4, config.hidden_size), rope_angles(batch.positions, params.inv_freq, config.rope)
    plain, wide, narrow = (
        cpu.decode_layer(params.layers[0], x, kv.pools[0].clone(), 0, *angles, *limited(batch, config, window=window))
        for window in (0, 30, 29)
    )
    assert torch.equal(wide, plain)
    assert not torch.equal(narrow, plain)


def test_bfloat16_is_nearer_to_the_truth_than_the_small_ops() -> None:
    config = shaped(hidden_size=64, head_dim=32, intermediate_size=96)
    params, kv, batch = step(config, [5, 30, 1, 17], 4, torch.bfloat16)
    logits, mine, exact, theirs = both(params, kv, batch, config)
    assert logits.dtype == exact.dtype == torch.bfloat16
    wide = pytree.tree_map(lambda t: t.double() if t is not None and t.dtype == torch.bfloat16 else t, (params, kv))
    truth, _ = forward(wide[0], wide[1], batch, config)
    assert (logits - truth).abs().max() <= 1.5 * (exact - truth).abs().max()
    torch.testing.assert_close(mine.pools[0], theirs.pools[0], rtol=0.05, atol=0.05)


@given(
    seq_lens=st.lists(st.integers(1, 50), min_size=2, max_size=20),
    dtype=st.sampled_from(cpu.DTYPES),
    hidden_size=st.sampled_from([33, 64]),
    data=st.data(),
)
@settings(max_examples=40)
def test_a_row_does_not_depend_on_the_others(seq_lens: list[int], dtype: torch.dtype, hidden_size: int, data: st.DataObject) -> None:
    config = shaped(hidden_size=hidden_size)
    params, kv, batch = step(config, seq_lens, 4, dtype)
    whole, _ = forward(params, pytree.tree_map(torch.clone, kv), batch, config)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(seq_lens) - 1), min_size=1, unique=True)))
    some, _ = forward(params, kv, pytree.tree_map(lambda t: None if t is None else t[rows], batch), config)
    assert torch.equal(some, whole[rows])


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    config = shaped(hidden_size=64)
    params, kv, batch = step(config, [9, 1, 33, 20, 2], 4, torch.float32)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            results.append(forward(params, pytree.tree_map(torch.clone, kv), batch, config)[0])
        finally:
            torch.set_num_threads(1)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", ["slots", "page_tables", "seq_lens"])
@pytest.mark.parametrize("value", [-1, 1 << 20])
def test_what_points_outside_the_pool_is_refused_before_anything_is_written(name: str, value: int) -> None:
    config = shaped()
    params, kv, batch = step(config, [5, 9], 4, torch.float32)
    before = kv.pools[0].clone()
    wrong = getattr(batch, name).clone()
    wrong.view(-1)[0] = value
    with pytest.raises(IndexError, match=str(value)):
        forward(params, kv, replace(batch, **{name: wrong}), config)
    assert torch.equal(kv.pools[0], before)


def test_infinities_and_not_a_number_stay_in_their_row() -> None:
    config = shaped()
    params, kv, batch = step(config, [5, 9, 3], 4, torch.float32)
    healthy, _ = forward(params, pytree.tree_map(torch.clone, kv), batch, config)
    kv.pools[0][:, batch.page_tables[1, 0]] = float("nan")
    logits, _ = forward(params, kv, batch, config)
    assert logits[1].isnan().all()
    assert torch.equal(logits[[0, 2]], healthy[[0, 2]])


def test_large_activations_do_not_overflow_the_gate() -> None:
    config = shaped()
    params, kv, batch = step(config, [4], 4, torch.float32)
    steep = replace(params, layers=tuple(replace(w, gate_up=w.gate_up * 300) for w in params.layers))
    logits, _, exact, _ = both(steep, kv, batch, config)
    torch.testing.assert_close(logits, exact, rtol=1e-3, atol=1e-3)


def test_what_it_does_not_serve_goes_the_ordinary_way() -> None:
    config = shaped()
    for dtype in (torch.float16, torch.float64):
        params, kv, batch = step(config, [4], 4, dtype)
        assert not cpu.serves(params, kv, batch, config)
        assert forward(params, kv, batch, config)[0].dtype == dtype
    params, kv, batch = step(config, [4], 4, torch.float32)
    prompt = replace(batch, cu_seqlens=torch.tensor([0, 1], dtype=torch.int32))
    assert cpu.serves(params, kv, batch, config)
    assert not cpu.serves(params, kv, prompt, config)


@pytest.mark.parametrize("odd", ["int64", "float64 frequencies", "strided weight"])
def test_odd_inputs_are_as_the_models_own_layers_take_them(odd: str, untyped: None) -> None:
    config = shaped()
    params, kv, batch = step(config, [5, 9], 4, torch.float32)
    match odd:
        case "int64":
            batch = replace(batch, slots=batch.slots.long(), page_tables=batch.page_tables.long(), seq_lens=batch.seq_lens.long())
        case "float64 frequencies":
            params = replace(params, inv_freq=params.inv_freq.double())
        case _:
            params = replace(params, layers=tuple(replace(w, down=w.down.t().contiguous().t()) for w in params.layers))
    logits, _, exact, _ = both(params, kv, batch, config)
    torch.testing.assert_close(logits, exact, rtol=2e-4, atol=2e-4)


def test_weights_of_two_dtypes_are_refused(untyped: None) -> None:
    config = shaped()
    params, kv, batch = step(config, [5, 9], 4, torch.float32)
    mixed = replace(params, layers=tuple(replace(w, post_norm=w.post_norm.double()) for w in params.layers))
    with pytest.raises(TypeError, match="float64"):
        forward(mixed, kv, batch, config)


def test_rows_that_do_not_fit_each_other_are_refused(untyped: None) -> None:
    config = shaped()
    params, kv, batch = step(config, [5, 9], 4, torch.float32)
    with pytest.raises(IndexError):
        forward(params, kv, replace(batch, seq_lens=batch.seq_lens[:1]), config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_process_may_have_another_default_dtype(dtype: torch.dtype) -> None:
    config = shaped()
    params, kv, batch = step(config, [5, 9, 30, 2], 4, torch.float32)
    wanted, _ = forward(params, pytree.tree_map(torch.clone, kv), batch, config)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            logits = cpu.head(torch.ones(3, 40, device="cpu", dtype=torch.float32), params.final_norm, params.embed, 1e-6)
        found, _ = forward(params, kv, batch, config)
    finally:
        torch.set_default_dtype(torch.float32)
    assert logits.isfinite().all()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_whoever_looks_on_gets_the_ordinary_ops() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    config = shaped()
    params, kv, batch = step(config, [5, 9], 4, torch.float32)
    with FlopCounterMode(display=False) as counter:
        forward(params, kv, batch, config)
    assert counter.get_total_flops() > 0

    def scaled(gain: Tensor) -> Tensor:
        return forward(replace(params, final_norm=gain), kv, batch, config)[0].sum()

    with torch.enable_grad():
        gradient = torch.func.grad(scaled)(params.final_norm)
        gain = params.final_norm.clone().requires_grad_()
        scaled(gain).backward()
    assert gain.grad is not None
    torch.testing.assert_close(gradient, gain.grad)
    assert gradient.abs().sum() > 0
    strided = KVState(pools=(torch.randn(kv.pools[0].shape[0], 2 * kv.pools[0].shape[1], *kv.pools[0].shape[2:])[:, ::2],))
    assert not cpu.serves(params, strided, batch, config)


def test_all_keys_are_written_before_any_row_attends() -> None:
    """Rows that are consecutive tokens of one sequence: what each attends to includes the others' keys."""
    config = shaped(hidden_size=64)
    params, kv, batch = step(config, [8], 4, torch.float32)
    positions = torch.arange(8, dtype=torch.int32)
    tables = batch.page_tables.expand(8, -1).contiguous()
    slots = tables[0, (positions // 4).long()] * 4 + positions % 4
    ids = torch.randint(0, config.vocab_size, (8,), dtype=torch.int32)
    rows = Batch(input_ids=ids, positions=positions, slots=slots, page_tables=tables, seq_lens=positions + 1)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            logits, _, exact, _ = both(params, kv, rows, config)
        finally:
            torch.set_num_threads(1)
        torch.testing.assert_close(logits, exact, rtol=2e-4, atol=2e-4)


OWN: dict[str, dict] = {
    "Qwen2ForCausalLM": {"windows": (0, 9)},
    "Qwen3ForCausalLM": {"windows": (9, 1), "attention_softcap": 3.0, "attention_scale": 0.4},
    "MistralForCausalLM": {"windows": (7, 7)},
    "Phi3ForCausalLM": {"rope": RopeConfig(kind="longrope", partial=0.75, factors=(1.0, 1.5, 2.0, 3.0, 4.0, 8.0), attention_factor=1.3)},
}


@pytest.mark.parametrize("dtype", cpu.DTYPES)
@pytest.mark.parametrize("architecture", REGISTRY)
def test_every_architecture_runs_in_c_or_says_why_not(architecture: str, dtype: torch.dtype) -> None:
    config = tiny_config(architecture, **OWN.get(architecture, {}))
    params, kv, batch = step(config, [5, 1, 33, 16], 4, dtype)
    beyond = {"GPT2LMHeadModel": "layer norms", "Gemma": "activation|norms", "Moe": "experts", "Mixtral": "experts"}
    why = next((words for part, words in beyond.items() if part in architecture), "")
    assert cpu.serves(params, kv, batch, config) != bool(why)
    assert re.search(why, cpu.unknown(params, config))
    if why:
        return
    logits, mine, exact, theirs = both(params, kv, batch, config)
    tolerance = 2e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(logits, exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mine.pools[0], theirs.pools[0], rtol=tolerance, atol=tolerance)
