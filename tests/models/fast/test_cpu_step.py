"""A decode step in one call of C: the bits of layer by layer, all checks before a layer writes, and no address from an earlier step."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from nanovllm.config import ModelConfig
from nanovllm.models.common import decoder
from nanovllm.models.common.batch import Batch, Windowed
from nanovllm.models.common.params import Params
from nanovllm.models.fast import cpu
from nanovllm.models.fast.choice import FastChoice
from nanovllm.models.registry import forward
from nanovllm.ops.cpu.build import library
from nanovllm.ops.kv_cache.fp8 import FP8
from nanovllm.ops.linear.quantise import KINDS
from nanovllm.state.kv_cache import KVState, init_kv
from tests.models.fast.test_cpu import CPU, shaped, step
from tests.models.fast.test_cpu_quantised import rounded

pytestmark = pytest.mark.skipif(library(cpu.SOURCE, cpu.SYMBOLS) is None, reason="no C compiler")
WINDOWS = {"none": (), "all": (5, 5), "some": (0, 5), "two": (3, 9)}
Problem = tuple[Params[Tensor], KVState, Batch, ModelConfig]


def problem(
    seq_lens: list[int],
    dtype: torch.dtype = torch.float32,
    windows: tuple[int, ...] = (),
    page_size: int = 4,
    fp8: bool = False,
    **more: Any,
) -> Problem:
    """A step of two layers. If only one has a window, its frames have other numbers than their pages."""
    config = replace(shaped(**more), windows=windows)
    params, kv, batch = step(config, seq_lens, page_size, dtype)
    if fp8:
        kv = init_kv(config, num_pages=kv.pools[0].shape[1] - 1, page_size=page_size, dtype=FP8, device=CPU)
    for pool in kv.pools if not fp8 else ():
        pool.normal_()
    if len(kv.pools) > 1:
        frame = torch.randperm(kv.pools[1].shape[1], dtype=torch.int32)
        slots = frame[(batch.slots // page_size).long()] * page_size + batch.slots % page_size
        batch = replace(batch, windowed=Windowed(page_tables=frame[batch.page_tables.long()], slots=slots))
    return params, kv, batch, config


def copied(kv: KVState) -> KVState:
    return pytree.tree_map(torch.clone, kv)


def layer_by_layer(params: Params[Tensor], kv: KVState, batch: Batch, config: ModelConfig) -> tuple[Tensor, KVState]:
    return decoder.forward(params, kv, batch, config, layer=cpu.decode_layer, head=cpu.head)


def same_bits(params: Params[Tensor], kv: KVState, batch: Batch, config: ModelConfig) -> Tensor:
    """Run a step in one call and layer by layer, require the same bits of logits and KV, and return the logits."""
    assert cpu.serves(params, kv, batch, config)
    logits, mine = cpu.forward(params, copied(kv), batch, config)
    expected, theirs = layer_by_layer(params, copied(kv), batch, config)
    assert torch.equal(logits, expected)
    for one, other in zip(mine.pools, theirs.pools, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return logits


@given(
    seq_lens=st.lists(st.integers(1, 30), min_size=1, max_size=9),
    dtype=st.sampled_from(cpu.DTYPES),
    windows=st.sampled_from(sorted(WINDOWS)),
    page_size=st.sampled_from([1, 3, 16]),
    fp8=st.booleans(),
    kind=st.sampled_from([None, *KINDS]),
    biases=st.booleans(),
)
@settings(max_examples=60)
def test_one_call_has_the_bits_of_layer_by_layer(
    seq_lens: list[int], dtype: torch.dtype, windows: str, page_size: int, fp8: bool, kind: Any, biases: bool
) -> None:
    architecture = "LlamaForCausalLM" if biases else "Qwen3ForCausalLM"
    params, kv, batch, config = problem(seq_lens, dtype, WINDOWS[windows], page_size, fp8, architecture=architecture, biases=biases)
    same_bits(params if kind is None else rounded(params, kind), kv, batch, config)


@pytest.mark.parametrize("windows", WINDOWS)
def test_bits_do_not_depend_on_the_number_of_threads(windows: str) -> None:
    given = problem([9, 1, 33, 20, 2], windows=WINDOWS[windows], hidden_size=64)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            found.append(same_bits(*given))
        finally:
            torch.set_num_threads(1)
    assert all(torch.equal(each, found[0]) for each in found)


def test_layers_may_have_mlps_of_different_widths() -> None:
    params, kv, batch, config = problem([5, 9])
    first, last = params.layers
    assert first.gate_up is not None and first.down is not None
    narrow = replace(first, gate_up=first.gate_up[:30], down=first.down[:, :15])
    for layers in ((narrow, last), (last, narrow)):
        same_bits(replace(params, layers=layers), kv, batch, config)


@pytest.mark.parametrize("name", ["page_tables", "slots"])
@pytest.mark.parametrize("value", [-1, 1 << 20])
def test_a_wrong_frame_is_refused_before_any_layer_writes(name: str, value: int) -> None:
    params, kv, batch, config = problem([5, 9], windows=WINDOWS["some"])
    assert batch.windowed is not None
    wrong = getattr(batch.windowed, name).clone()
    wrong.view(-1)[0] = value
    before = copied(kv)
    with pytest.raises(IndexError, match=str(value)):
        forward(params, kv, replace(batch, windowed=replace(batch.windowed, **{name: wrong})), config)
    assert all(map(torch.equal, kv.pools, before.pools))


def test_a_pool_of_fewer_layers_is_refused_before_any_layer_writes() -> None:
    """C would write into the memory behind the pool."""
    params, kv, batch, config = problem([5, 9])
    memory = kv.pools[0].clone()
    with pytest.raises(IndexError, match="layers"):
        forward(params, KVState(pools=(memory[:1],)), batch, config)
    assert torch.equal(memory, kv.pools[0])


@pytest.mark.parametrize("change", ["bfloat16", "page size"])
@pytest.mark.usefixtures("untyped")
def test_pools_that_differ_run_in_torch(change: str) -> None:
    """C reads all pools by the dtype and the sizes of the first."""
    params, kv, batch, config = problem([5, 9], windows=WINDOWS["some"])
    first, second = kv.pools
    other = second.bfloat16() if change == "bfloat16" else second[..., :2, :].contiguous()
    assert cpu.serves(params, kv, batch, config)
    assert not cpu.serves(params, KVState(pools=(first, other)), batch, config)


@pytest.mark.parametrize("name", ["o", "post_norm", "head"])
def test_a_weight_of_another_dtype_is_refused_before_any_layer_writes(name: str) -> None:
    params, kv, batch, config = problem([5, 9])
    if name == "head":
        wrong = replace(params, head=params.embed.bfloat16())
    else:
        last = params.layers[-1]
        wrong = replace(params, layers=(*params.layers[:-1], replace(last, **{name: getattr(last, name).bfloat16()})))
    before = copied(kv)
    with pytest.raises(TypeError, match="bfloat16"):
        forward(wrong, kv, batch, config)
    assert all(map(torch.equal, kv.pools, before.pools))


@pytest.mark.parametrize("kind", [None, "int8"])
@pytest.mark.parametrize(
    "name",
    [
        "input_norm",
        "qkv",
        "qkv_bias",
        "q_norm",
        "k_norm",
        "o",
        "o_bias",
        "post_norm",
        "gate_up",
        "gate_up_bias",
        "down",
        "down_bias",
        "head",
    ],
)
def test_a_weight_of_another_shape_is_refused_before_any_layer_writes(name: str, kind: Any) -> None:
    """C would read memory behind it. Matrices may be quantised."""
    with_norms = name.endswith(("q_norm", "k_norm"))
    architecture = "Qwen3ForCausalLM" if with_norms else "LlamaForCausalLM"
    params, kv, batch, config = problem([5, 9], architecture=architecture, biases=not with_norms)
    params = params if kind is None else rounded(params, kind)
    last, narrow = params.layers[-1], problem([5, 9], architecture=architecture, biases=not with_norms, hidden_size=32, head_dim=8)[0]
    narrow = narrow if kind is None else rounded(narrow, kind)
    if name == "head":
        wrong = replace(params, head=narrow.embed)
    else:
        smaller = last.gate_up_bias[:5] if name == "gate_up_bias" and last.gate_up_bias is not None else getattr(narrow.layers[-1], name)
        wrong = replace(params, layers=(*params.layers[:-1], replace(last, **{name: smaller})))
    before = copied(kv)
    with pytest.raises(ValueError, match="shape"):
        forward(wrong, kv, batch, config)
    assert all(map(torch.equal, kv.pools, before.pools))


def test_each_step_reads_the_weights_where_they_are() -> None:
    """A weight may be exchanged, or get other memory, between two steps. The old memory is filled with NaN here."""
    params, kv, batch, config = problem([5, 9])
    cpu.forward(params, copied(kv), batch, config)
    first, last = params.layers
    exchanged = replace(params, layers=(replace(first, qkv=first.qkv * 2), last))
    assert not torch.equal(same_bits(exchanged, kv, batch, config), same_bits(params, kv, batch, config))
    before = same_bits(params, kv, batch, config)
    for weight in (first.qkv, last.post_norm, params.final_norm):
        old, values = weight.data, weight.clone()
        weight.data = values
        old.fill_(float("nan"))
    assert torch.equal(same_bits(params, kv, batch, config), before)
    moved = KVState(pools=tuple(map(torch.clone, kv.pools)))
    kv.pools[0].fill_(float("nan"))
    assert torch.equal(same_bits(params, moved, batch, config), before)


def test_parts_of_a_step_have_the_same_bits() -> None:
    """Rows whose logits are asked for, outputs of layers, and a head in plain torch: these steps run layer by layer."""
    params, kv, batch, config = problem([5, 9, 2])
    logits = same_bits(params, kv, batch, config)
    some, _ = forward(params, copied(kv), replace(batch, logit_indices=torch.tensor([2, 0], dtype=torch.int32)), config)
    assert torch.equal(some, logits[[2, 0]])
    seen, *_ = forward(params, copied(kv), batch, config, capture_hidden=(1,))
    assert torch.equal(seen, logits)
    plain, _ = forward(params, copied(kv), batch, config, fast=FastChoice(layers=(True, True), head=False))
    torch.testing.assert_close(plain, logits, rtol=2e-4, atol=2e-4)
