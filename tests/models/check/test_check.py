"""The fast decode path beside the plain layers: what is measured, what is found, and what an engine makes of it. On a CPU."""

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from immutables import Map
from torch import Tensor
from torch.utils import _pytree as pytree

import nanovllm as nv
from nanovllm import models
from nanovllm.config import EngineConfig
from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES
from nanovllm.entrypoints.cli.check import command as check_command
from nanovllm.entrypoints.cli.check.report_text import table, verdict
from nanovllm.executor import batch as batches
from nanovllm.executor import compiled
from nanovllm.executor.batch import to_device
from nanovllm.executor.graph_executor import FUSED_PROMPTS
from nanovllm.models.check import agree
from nanovllm.models.check.agree import Agreement, Disagreement, agreement, two_likeliest
from nanovllm.models.check.compare import Compared, Errors, compare, error_bound, keeps, relative_error, spread_rows
from nanovllm.models.check.examine import CUT_ROWS, MOST_ROWS, START_ROWS, choose, cut_rows, examine, warning
from nanovllm.models.check.report import chosen
from nanovllm.models.check.sample_text import sample_tokens
from nanovllm.models.common import decoder, layers
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.params import two_of_each
from nanovllm.models.fast import cpu, fused
from nanovllm.models.fast.choice import FastChoice, all_fast, by_layer
from nanovllm.models.fast.cuts import Cuts, StepCuts
from nanovllm.models.fast.path import FastPath, fast_path
from nanovllm.ops.attention import plan_table
from nanovllm.ops.attention.fused_plan import FusedDecodePlan
from nanovllm.ops.cpu.build import library
from nanovllm.ops.cuts import CutError
from nanovllm.ops.linear.linear_add_norm import linear_add_norm
from nanovllm.ops.linear.tiles import WideTile
from nanovllm.state.kv_cache import init_kv
from nanovllm.testing.models import random_model, save_hf_folder, tiny_config

needs_c = pytest.mark.skipif(library(cpu.SOURCE, cpu.SYMBOLS) is None, reason="no C compiler")
GREEDY = nv.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
PROMPTS = ["Once upon a time,", "The capital of Aistonia is Velmora. The capital of Aistonia is", "One day,"]
FUSED = ("Qwen3ForCausalLM", "LlamaForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")
C_LAYER, C_HEAD = cpu.decode_layer, cpu.head


def extreme(model: nv.Model) -> nv.Model:
    """The model with a few gains of 96.5 in every k_norm."""

    def with_gain(w: models.Layer[Tensor]) -> models.Layer[Tensor]:
        if w.k_norm is None:
            return w
        gain = w.k_norm.clone()
        gain[::7] = 96.5
        return replace(w, k_norm=gain)

    return replace(model, params=replace(model.params, layers=tuple(map(with_gain, model.params.layers))))


def small(architecture: str = "Qwen3ForCausalLM", seed: int = 0, dtype: str = "float32", std: float = 0.1) -> nv.Model:
    config = tiny_config(architecture, num_layers=3, hidden_size=64, intermediate_size=96, head_dim=32)
    return random_model(config, seed, dtype, std=std)


def fast_of(model: nv.Model) -> FastPath:
    fast = fast_path(model.params, model.config)
    assert fast is not None
    return fast


# What is measured


def test_an_error_is_measured_by_its_own_channel_and_by_what_the_layer_adds() -> None:
    want = torch.tensor([[1000.0, 1.0, 0.0]], dtype=torch.float64)
    change = torch.tensor([[0.0, 3.0, 0.0]], dtype=torch.float64)  # its root mean square is the square root of 3
    for wrong, scale in ((0, 1000 + 3**0.5), (1, 1 + 3**0.5), (2, 3**0.5)):
        got = want.clone()
        got[0, wrong] += 0.5
        assert float(relative_error(got, want, change)) == pytest.approx(0.5 / scale)
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    assert float(relative_error(zeros, zeros, zeros)) == 0
    assert math.isnan(float(relative_error(torch.full((2, 3), torch.nan), zeros, zeros)))


def test_the_bound() -> None:
    assert error_bound(0.02, torch.bfloat16) == pytest.approx(1.5 * 0.02 + 2**-7, rel=1e-3)
    assert error_bound(0.0, torch.float32) == pytest.approx(33 * 2**-23)
    kept = Errors(output=0.02, kv=0.004)
    assert keeps(kept, kept, torch.bfloat16)
    for wrong in (Errors(output=0.04, kv=0.004), Errors(output=0.02, kv=0.02), Errors(output=math.nan, kv=0.004)):
        assert not keeps(wrong, kept, torch.bfloat16)


@pytest.mark.parametrize(("tokens", "rows", "page_size"), [(1, 1, 16), (3, 2, 1), (40, 8, 16), (96, 8, 7), (5, 5, 2)])
def test_rows_are_tokens_of_the_text_over_copies_of_its_pages(tokens: int, rows: int, page_size: int) -> None:
    found = spread_rows(small(), tokens, rows, page_size)
    assert found.tokens[-1] == tokens - 1 and len(found.tokens.unique()) == rows
    counts = (-(-found.batch.seq_lens // page_size)).tolist()
    used = [page for row, count in enumerate(counts) for page in found.batch.page_tables[row, :count].tolist()]
    assert sorted(used) == list(range(len(found.source) - 1))  # each page is one row's, and the last nobody's
    for row, place in enumerate(found.tokens.tolist()):
        table = found.batch.page_tables[row, : place // page_size + 1]
        assert found.source[table].tolist() == list(range(place // page_size + 1))
        assert int(found.batch.slots[row]) == int(table[-1]) * page_size + place % page_size
        assert (int(found.page[row]), int(found.offset[row])) == (int(table[-1]), place % page_size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_the_plain_layers_are_as_far_off_as_themselves(architecture: str, dtype: str) -> None:
    model = small(architecture, dtype=dtype)
    plain = FastPath(name="plain", layer=model.spec.layer, head=layers.head, plan=lambda _: None)
    ids = sample_tokens(model, 50)
    found = compare(model, plain, ids, (1, 4), page_size=4)
    assert found.fast == found.plain and found.fast_head == found.plain_head
    assert 0 < max(each.output for each in found.plain) < 60 * torch.finfo(model.dtype).eps
    alone = compare(model, None, ids, (1, 4), page_size=4)
    assert alone.plain == found.plain and alone.fast is alone.fast_head is None
    assert chosen(found, model.dtype) == all_fast(model.config)


def test_a_text_runs_through_float64() -> None:
    model = small()
    ids = sample_tokens(model, 37)
    found = compare(model, None, ids, (1,), page_size=8)
    wide = replace(model, params=pytree.tree_map(lambda t: None if t is None else t.double(), model.params), dtype=torch.float64)
    wide = replace(wide, params=replace(wide.params, inv_freq=model.params.inv_freq))
    state = nv.init_state(wide, num_pages=16, compile=False)
    _, gen = nv.generate(wide, state, ids, nv.SamplingParams(temperature=0, max_tokens=1, logprobs=2))
    values, tokens = two_likeliest(model, found.final)
    assert gen.logprobs is not None
    (first, lead), (second, behind) = gen.logprobs[0].top
    assert tokens[-1].tolist() == [first, second]
    assert float(values[-1, 0] - values[-1, 1]) == pytest.approx(lead - behind, abs=1e-5)


def test_the_two_likeliest_over_blocks_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = small(), [1, 2, 3, 4]
    final = compare(model, None, ids, (1,)).final
    whole = two_likeliest(model, final)
    for block in (1, 7, 100):
        monkeypatch.setattr("nanovllm.models.check.compare.BLOCK", block)
        values, tokens = two_likeliest(model, final)
        assert torch.equal(tokens, whole[1])
        torch.testing.assert_close(values, whole[0], rtol=1e-12, atol=0)


def test_the_logits_in_float64_are_capped_as_the_model_caps_them() -> None:
    model = small("Gemma2ForCausalLM")
    assert model.config.logit_softcap
    found = compare(model, None, sample_tokens(model, 20), (1, 4))
    assert 0 < found.plain_head < 60 * torch.finfo(model.dtype).eps
    assert float(two_likeliest(model, found.final)[0].amax()) < model.config.logit_softcap


def test_the_text_is_long_enough_and_begins_again() -> None:
    tiny = nv.load_model("tiny", device="cpu")
    once = sample_tokens(tiny, 256)
    assert tiny.tokenizer is not None and len(set(once)) > 100
    assert sample_tokens(tiny, 4000)[:256] == once and len(sample_tokens(tiny, 4000)) == 4000
    assert tiny.tokenizer.decode(once).startswith("The harbour woke")
    nameless = random_model(tiny_config(vocab_size=11))
    assert nameless.tokenizer is None and set(sample_tokens(nameless, 200)) == set(range(11))


# What is found


@needs_c
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("seed", range(3))
def test_the_c_kernels_keep_the_bound_on_random_and_extreme_weights(architecture: str, dtype: str, seed: int) -> None:
    model = small(architecture, seed, dtype, std=(0.02, 0.1, 0.2)[seed])
    for one in (model, extreme(model)):
        report = examine(one, 60, page_size=8)
        assert report.fast == "C" and report.fallen == (), table(report)
        gains = [each.k_gain for each in report.layers]
        assert gains == [96.5 if one is not model else float(w.k_norm.abs().max()) for w in one.params.layers if w.k_norm is not None] or (
            gains == [None] * 3 and architecture == "LlamaForCausalLM"
        )


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore:.*overflow encountered in exp")  # of a sigmoid that is 0
@pytest.mark.parametrize(
    ("architecture", "few", "dtype"),
    [
        # Each architecture by kernels of few rows or of many, each kind of kernel by several architectures; the other half takes minutes.
        # Gemma 2 keeps both: its layers have norms after attention and after the MLP, soft caps and windows.
        *(
            pytest.param(name, few, "float16", marks=[] if few == (i % 2 == 0) or name == "Gemma2ForCausalLM" else pytest.mark.long)
            for i, name in enumerate(FUSED)
            for few in (True, False)
        ),
        ("Qwen3ForCausalLM", True, "float32"),
        pytest.param("LlamaForCausalLM", True, "float32", marks=pytest.mark.long),
    ],
)
def test_the_kernels_for_a_gpu_keep_the_bound_interpreted(
    architecture: str, few: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fused.layer` and `fused.head`, their kernels run by Triton's interpreter: of one row, of more on tensor cores, and as of many."""
    from nanovllm.ops.attention import triton_rope_attend
    from nanovllm.ops.linear import triton_few_rows, triton_many_rows
    from nanovllm.ops.linear.tiles import Tile

    parts = WideTile(outputs=32, rows=16, depth=32, stages=2, parts=2)
    ran: set[str] = set()

    def product(x: Tensor, weight: Tensor, *, act: str = "silu", cut: Any = (), **more: Any) -> Tensor:
        tile = Tile(outputs=4, warps=1) if len(x) == 1 else Tile(outputs=16, warps=2, depth=32)
        given = {"gain": None, "bias": None, "residual": None, "eps": 0.0, "gated": False, **more}
        if few or given["gain"] is not None:
            return triton_few_rows.launch(x, weight, *given.values(), tile, False, act)
        return triton_many_rows.product(x, weight, given["bias"], given["gated"], replace(parts, parts=1), False, act)

    def added(x: Tensor, weight: Tensor, bias: Any, residual: Tensor, gain: Tensor, eps: float, *, inner: Any, cut: Any = ()) -> Any:
        ran.add("sum")
        return triton_many_rows.sum_norm(triton_many_rows.partial_product(x, weight, parts, False), bias, residual, gain, eps, False, inner)

    def normed(x: Tensor, gain: Tensor, residual: Any, eps: float) -> Tensor:
        ran.add("norm")
        return triton_many_rows.norm_add(x, gain, residual, eps, False)

    def attend(*given: Any) -> Tensor:
        *near, pages, index, tables, lens, slots, scale, eps, handle, window, cap = given
        return triton_rope_attend.launch(
            *near, pages[index], tables, lens, slots, scale, eps, plan_table.lookup(handle, FusedDecodePlan), False, window, cap
        )

    for name, kernel in {"norm_linear": product, "linear_add_norm": added, "norm_add": normed, "rope_attend": attend}.items():
        monkeypatch.setattr(fused, name, kernel)
    monkeypatch.setattr(fused, "_few", lambda *_: few)
    monkeypatch.setattr(fused.few, "FEW", 4)  # the head's kernels, too
    layer = fused.layer

    def plan(rows: int) -> FusedDecodePlan:
        found = FusedDecodePlan(rows, 4, 2, 32, torch.device("cpu"))
        found.tile, found.stages, found.splits = 8, 0, 4
        return found

    config = tiny_config(architecture, num_layers=2, hidden_size=64, intermediate_size=128, head_dim=32)
    model = random_model(config, 0, dtype, std=0.1)
    fast = FastPath(name="fused", layer=layer, head=fused.head, plan=plan)
    for one in (model, extreme(model)):
        found = compare(one, fast, sample_tokens(one, 40), (1, 4), page_size=4)
        assert chosen(found, one.dtype).whole, (found.plain, found.fast, found.plain_head, found.fast_head)
    wrong = replace(model.params.layers[1], input_norm=model.params.layers[0].input_norm)
    broken = replace(fast, layer=lambda w, *rest: layer(wrong if w is model.params.layers[1] else w, *rest))
    assert chosen(compare(model, broken, sample_tokens(model, 40), (1, 4)), model.dtype).layers == (True, False)
    behind = model.params.layers[0].o_norm is not None
    assert ran == ({"norm"} if few and behind else set() if few else {"sum", "norm"})


def forgets_q_norm(w: Any, x: Tensor, *rest: Any) -> Tensor:
    return C_LAYER(replace(w, q_norm=torch.ones_like(w.q_norm)), x, *rest)


def forgets_k_norm(w: Any, x: Tensor, *rest: Any) -> Tensor:
    return C_LAYER(replace(w, k_norm=torch.ones_like(w.k_norm)), x, *rest)


def rounds_its_weights(w: Any, x: Tensor, *rest: Any) -> Tensor:
    return C_LAYER(replace(w, qkv=w.qkv.to(torch.float8_e4m3fn).to(w.qkv.dtype)), x, *rest)


def rounds_what_it_returns(w: Any, x: Tensor, *rest: Any) -> Tensor:
    scale = 1 << (3 if x.dtype == torch.bfloat16 else 16)
    out = C_LAYER(w, x, *rest)
    mantissa, exponent = torch.frexp(out.float())
    return torch.ldexp((mantissa * scale).round() / scale, exponent).to(x.dtype)


def writes_no_key(w: Any, x: Tensor, pages: Tensor, *rest: Any) -> Tensor:
    return C_LAYER(w, x, pages.clone(), *rest)


def sees_no_new_token(w: Any, x: Tensor, pages: Tensor, index: int, cos: Tensor, sin: Tensor, batch: nv.Batch, config: Any) -> Tensor:
    return C_LAYER(w, x, pages, index, cos, sin, replace(batch, seq_lens=(batch.seq_lens - 1).clamp(min=1)), config)


def loses_a_row(w: Any, x: Tensor, *rest: Any) -> Tensor:
    out = C_LAYER(w, x, *rest)
    return out if len(out) == 1 else torch.cat((out[:-1], out[:1]))


def is_no_number(w: Any, x: Tensor, *rest: Any) -> Tensor:
    return C_LAYER(w, x, *rest) * torch.nan


FAULTS = [
    forgets_q_norm, forgets_k_norm, rounds_its_weights, rounds_what_it_returns, writes_no_key, sees_no_new_token, loses_a_row, is_no_number,
]  # fmt: skip


def planted(model: nv.Model, fault: Callable[..., Tensor], *indices: int) -> Callable[..., Tensor]:
    """The C layer, wrong in the layers named."""
    wrong = [model.params.layers[index] for index in indices]

    def layer(w: Any, *rest: Any) -> Tensor:
        return (fault if any(w is each for each in wrong) else C_LAYER)(w, *rest)

    return layer


@needs_c
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_layer_is_found(fault: Callable[..., Tensor], dtype: str) -> None:
    model = small(dtype=dtype, std=0.2)
    found = compare(model, replace(fast_of(model), layer=planted(model, fault, 1)), sample_tokens(model, 60), (1, 8), page_size=8)
    assert chosen(found, model.dtype) == FastChoice(layers=(True, False, True))


@needs_c
def test_a_wrong_layer_is_found_under_extreme_gains() -> None:
    """Where the plain layer errs much itself, what is forgotten errs more."""
    model = extreme(small(dtype="bfloat16", std=0.1))
    for fault in (forgets_q_norm, forgets_k_norm, sees_no_new_token, writes_no_key):
        found = compare(model, replace(fast_of(model), layer=planted(model, fault, 2)), sample_tokens(model, 60), (1, 8), page_size=8)
        assert chosen(found, model.dtype) == FastChoice(layers=(True, True, False))


@needs_c
def test_a_wrong_head_is_found() -> None:
    model = small()

    def head(x: Tensor, gain: Tensor, weight: Tensor, eps: float) -> Tensor:
        return C_HEAD(x, torch.ones_like(gain), weight, eps)

    found = compare(model, replace(fast_of(model), head=head), sample_tokens(model, 60), (1, 8))
    assert chosen(found, model.dtype) == FastChoice(layers=(True, True, True), head=False)


def test_agreement_names_the_places_and_their_margins() -> None:
    model = small()
    ids = sample_tokens(model, 40)
    final = compare(model, None, ids, (1,)).final

    def head(x: Tensor, *rest: Any) -> Tensor:
        """At two places, the third token of the vocabulary."""
        logits = layers.head(x, *rest)
        return logits.index_fill(-1, torch.tensor([2]), 1e9) if next(places) in (7, 30) else logits

    places = iter(range(40))
    plain = FastPath(name="plain", layer=model.spec.layer, head=head, plan=lambda _: None)
    found = agreement(model, plain, all_fast(model.config), ids, final, page_size=8)
    assert (found.num_tokens, found.both, found.fast_exact, found.plain_exact) == (40, 38, 38, 40)
    values, tokens = two_likeliest(model, final)
    assert [each.place for each in found.apart] == [7, 30]
    for each in found.apart:
        assert each.fast == 2 and each.plain == each.exact == int(tokens[each.place, 0])
        assert each.margin == pytest.approx(float(values[each.place, 0] - values[each.place, 1]))
    places = iter(range(40))
    without = agreement(model, plain, FastChoice(layers=(True,) * 3, head=False), ids, final)
    assert without.both == without.fast_exact == 40 and without.apart == ()


def test_agreement_counts_each_pair_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """All three agree once, the first two alone three times, the outer two alone twice, the last two alone once, and none once."""
    fast, plain, exact = [1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 2, 2, 2, 2], [1, 2, 2, 2, 1, 1, 2, 3]
    values = torch.stack((torch.arange(8.0) + 1, torch.ones(8)), 1)
    monkeypatch.setattr(agree, "decoded", lambda *_: torch.tensor(fast))
    monkeypatch.setattr(agree, "prompted", lambda *_: torch.tensor(plain))
    monkeypatch.setattr(agree, "two_likeliest", lambda *_: (values, torch.tensor([exact, exact]).T))
    model = small()
    path = FastPath(name="plain", layer=model.spec.layer, head=layers.head, plan=lambda _: None)
    found = agreement(model, path, all_fast(model.config), list(range(8)), torch.zeros(8, model.config.hidden_size))
    assert (found.num_tokens, found.both, found.fast_exact, found.plain_exact) == (8, 4, 3, 2)
    wanted = [(place, 1, 2, exact[place], float(place)) for place in (4, 5, 6, 7)]
    assert [(each.place, each.fast, each.plain, each.exact, each.margin) for each in found.apart] == wanted


def test_a_fault_of_the_smallest_batch_is_found() -> None:
    model = small()

    def layer(w: Any, x: Tensor, *rest: Any) -> Tensor:
        return model.spec.layer(w, x, *rest) * (1.1 if len(x) == 1 and w is model.params.layers[1] else 1.0)

    path = FastPath(name="made up", layer=layer, head=layers.head, plan=lambda _: None)
    assert chosen(compare(model, path, sample_tokens(model, 20), (1, 8)), model.dtype).layers == (True, False, True)


def test_a_row_that_other_experts_run_is_no_fault() -> None:
    """Rounding may send a row to other experts, so in layers with experts most rows must be right, and elsewhere all."""
    model = small("Qwen3MoeForCausalLM")

    def layer(w: Any, x: Tensor, *rest: Any) -> Tensor:
        out = model.spec.layer(w, x, *rest)
        return torch.cat((out[:1] * 1.1, out[1:]))

    path = FastPath(name="made up", layer=layer, head=layers.head, plan=lambda _: None)
    assert [w.experts is not None for w in model.params.layers] == [False, True, False]
    assert chosen(compare(model, path, sample_tokens(model, 20), (8,)), model.dtype).layers == (False, True, False)


def test_an_error_that_is_its_bound_is_within_it() -> None:
    plain = Errors(output=0.02, kv=0.004)
    bound = Errors(output=error_bound(plain.output, torch.bfloat16), kv=error_bound(plain.kv, torch.bfloat16))
    found = Compared(plain=(plain,), fast=(bound,), plain_head=0.01, fast_head=error_bound(0.01, torch.bfloat16), final=torch.zeros(1, 1))
    assert chosen(found, torch.bfloat16) == FastChoice(layers=(True,), head=True)
    for more in (replace(bound, output=math.nextafter(bound.output, 1)), replace(bound, kv=math.nextafter(bound.kv, 1))):
        assert chosen(replace(found, fast=(more,)), torch.bfloat16) == FastChoice(layers=(False,), head=True)
    assert found.fast_head is not None
    above = replace(found, fast_head=math.nextafter(found.fast_head, 1))
    assert chosen(above, torch.bfloat16) == FastChoice(layers=(True,), head=False)


def test_the_warning_names_the_error_that_is_most_above_its_bound() -> None:
    """The largest error need not be it, and NaN is above every bound."""
    model = small()
    path = FastPath(name="C", layer=model.spec.layer, head=layers.head, plan=lambda _: None)
    plain, quick = (0.4, 0.001, 0.001), (0.9, 0.1, 0.001)
    found = Compared(
        plain=tuple(Errors(output=error, kv=0.0) for error in plain),
        fast=tuple(Errors(output=error, kv=0.0) for error in quick),
        plain_head=0.0, fast_head=0.0, final=torch.zeros(1, 1),
    )  # fmt: skip
    said = warning(model, path, chosen(found, model.dtype), found)
    assert "a relative error of 0.1 in layer 1, above its bound 0.0015: layers 0, 1 will run in plain torch" in said
    assert found.fast is not None
    broken = replace(found, fast=(*found.fast[:2], Errors(output=0.001, kv=math.nan)))
    said = warning(model, path, chosen(broken, model.dtype), broken)
    assert "a relative error of nan in layer 2, above its bound 3.9e-06: layers 0, 1, 2 will run in plain torch" in said


# What an engine makes of it


def replies(model: nv.Model, **options: Any) -> list[nv.Generation]:
    state, gens = nv.generate_many(model, nv.init_state(model, num_pages=64, **options), PROMPTS, GREEDY)
    nv.check(state)
    return gens


def warned(model: nv.Model, **options: Any) -> list[str]:
    """What an engine says at its start and while it runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replies(model, **options)
    return [str(each.message) for each in caught]


@needs_c
@pytest.mark.parametrize("indices", [(1,), (0, 2), (0, 1, 2)])
def test_wrong_layers_fall_back_and_the_replies_are_the_plain_ones(indices: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    model = extreme(small(std=0.2))
    plain = replies(model, compile=False)
    assert warned(model, check=True) == []
    wrong_layer = planted(model, forgets_q_norm, *indices)
    monkeypatch.setattr(cpu, "decode_layer", wrong_layer)
    monkeypatch.setattr(cpu, "forward", partial(decoder.forward, layer=wrong_layer, head=C_HEAD))
    wrong = replies(model)
    assert [g.token_ids for g in wrong] != [g.token_ids for g in plain]
    which = f"layers? {', '.join(map(str, indices))}"
    told = rf"^random-0: the path C has a relative error of .* above its bound .*: {which} will run in plain torch"
    with pytest.warns(UserWarning, match=told):
        kept = replies(model, check=True)
    assert [g.token_ids for g in kept] == [g.token_ids for g in plain]
    assert len(warned(model, check=True)) == 1


@needs_c
def test_where_all_falls_back_every_bit_is_the_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(std=0.2)
    monkeypatch.setattr(cpu, "decode_layer", planted(model, is_no_number, 0, 1, 2))
    monkeypatch.setattr(cpu, "head", lambda *given: C_HEAD(*given) * 1.01)
    with pytest.warns(UserWarning, match="layers 0, 1, 2 and the head will run in plain torch"):
        kept = replies(model, check=True)
    for mine, theirs in zip(kept, replies(model, compile=False), strict=True):
        assert mine.logprobs is not None and theirs.logprobs is not None
        assert mine.token_ids == theirs.token_ids
        assert [(each.logprob, each.top) for each in mine.logprobs] == [(each.logprob, each.top) for each in theirs.logprobs]


@needs_c
def test_nobody_looks_on_a_cpu_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    monkeypatch.setattr(cpu, "head", lambda *given: C_HEAD(*given) * 1.01)
    assert warned(model) == warned(model, check=False) == warned(model, check=True, compile=False) == []
    (said,) = warned(model, check=True)
    assert "in the head" in said and "the head will run in plain torch" in said and "layer" not in said


def test_to_check_what_is_compiled_on_a_cpu_is_refused() -> None:
    """Compiled layers run there in the place of the fast ones, so a comparison would say nothing of what runs."""
    for engine in (nv.init_state, nv.LLM):
        with pytest.raises(nv.InvalidRequestError, match=r"check=True with compile=True on a CPU: .*; set only one of the two"):
            engine(small(), num_pages=8, check=True, compile=True)


def test_what_has_no_fast_form_is_not_looked_at() -> None:
    model = small(dtype="float16")
    assert choose(model, 16) == (None, "")
    assert warned(model, check=True) == []


def test_no_memory_to_look_with_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr("nanovllm.executor.build_executor.choose", full)
    with pytest.warns(UserWarning, match="random-0: not enough memory to check the fast decode path: it is used unchecked"):
        nv.init_state(small(), num_pages=8, check=True)


def test_check_is_true_false_or_none(untyped: None) -> None:
    for wrong in (1, "yes"):
        with pytest.raises(nv.InvalidRequestError, match=f"check={wrong!r} must be True, False or None"):
            nv.init_state(small(), num_pages=8, check=wrong)  # pyright: ignore[reportArgumentType]


@needs_c
def test_kernels_that_cannot_be_made_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("triton.errors")

    def refused(*_: Any) -> None:
        raise errors.TritonError("out of shared memory")

    monkeypatch.setattr("nanovllm.models.check.examine.compare", refused)
    model = small()
    choice, said = choose(model, 16)
    assert choice == FastChoice(layers=(False,) * 3, head=False)
    assert said == "random-0: the path C cannot run here ('out of shared memory'): plain torch runs the model, slower"
    assert warned(model, check=True) == [said]


@needs_c
def test_an_engine_of_few_rows_and_few_positions_is_checked_with_those() -> None:
    model = random_model(tiny_config(max_position_embeddings=5))
    choice, said = choose(model, 1)
    assert choice == all_fast(model.config) and said == ""


# The forwards of captured steps, and their layers


def test_a_layer_runs_as_it_was_chosen() -> None:
    ran = []

    def form(name: str) -> Callable[..., Tensor]:
        def layer(w: Any, x: Tensor, pages: Any, index: int, cos: Any, sin: Any, batch: nv.Batch, config: Any) -> Tensor:
            ran.append((name, index, batch.plan))
            return x

        return layer

    model, some = small(), torch.ones(1)
    batch = replace(spread_rows(model, 4, 2, 16).batch, plan=5)
    for plan, handle in ((None, 5), (9, 9)):
        ran.clear()
        layer = by_layer(form("fast"), form("plain"), (True, False, True), plan)
        for index in range(3):
            layer(None, some, some, index, some, some, batch, model.config)
        assert ran == [("fast", 0, handle), ("plain", 1, 5), ("fast", 2, handle)]
    fast = form("fast")
    assert by_layer(fast, form("plain"), (True, True)) is fast


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("architecture", FUSED)
def test_fused_steps_with_plain_layers_among_them(architecture: str, few: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the fused ops are plain functions: whoever runs which layer, the result is the same; who ran is noted."""
    model, ran = small(architecture, dtype=dtype), []
    monkeypatch.setattr(fused, "follows_closely", lambda *_: few)
    monkeypatch.setattr(fused, "decode_layer", seen(fused.decode_layer, ran, "fused", 3))
    monkeypatch.setattr(fused, "wide_layer", seen(fused.wide_layer, ran, "fused", 5))
    monkeypatch.setattr(compiled, "compiled_layer", lambda model: seen(model.spec.layer, ran, "plain", 3))
    rows = spread_rows(model, 16, 4, 4)
    kv = init_kv(model.config, num_pages=len(rows.source), page_size=4, dtype=model.dtype, device=model.device)
    want, want_kv = model.spec.forward(model.params, pytree.tree_map(torch.clone, kv), rows.batch, model.config)
    for layers_chosen in ((True, True, True), (False, True, False), (True, False, True), (False, False, True)):
        for head in (True, False):
            ran.clear()
            steps = compiled.fused_forward(model, FastChoice(layers=layers_chosen, head=head))
            got, got_kv = steps(model.params, pytree.tree_map(torch.clone, kv), rows.batch, model.config)
            places = zip(layers_chosen, model.config.places, strict=True)
            assert ran == [("fused" if fast else "plain", index) for fast, (_, index) in places]
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(got_kv.pools, want_kv.pools)
    assert compiled.fused_forward(model, None) is fused.forward


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("layers_chosen", [(True, True, True), (True, True, False), (False, True, True)])
@pytest.mark.parametrize("wanted", [None, (2, 6), (6,), ()])
def test_of_a_prompt_only_what_is_wanted_ends_in_the_last_layer(
    wanted: tuple[int, ...] | None, layers_chosen: tuple[bool, ...], head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are those of the tokens named, all keys and values are written, and nothing but them is run behind the last attention."""
    model, widths = small(), []
    monkeypatch.setattr(compiled, "compiled_layer", lambda model: model.spec.layer)
    monkeypatch.setattr(fused, "linear_add_norm", lambda x, *given, **cut: widths.append(len(x)) or linear_add_norm(x, *given, **cut))
    ids, positions = torch.tensor([3, 5, 7, 2, 9, 4, 8], dtype=torch.int32), torch.tensor([0, 1, 2, 0, 1, 2, 3], dtype=torch.int32)
    batch = Batch(
        input_ids=ids, positions=positions, slots=torch.tensor([0, 1, 2, 4, 5, 6, 7], dtype=torch.int32),
        page_tables=torch.tensor([[0], [1]], dtype=torch.int32), seq_lens=torch.tensor([3, 4], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32),
        logit_indices=None if wanted is None else torch.tensor(wanted, dtype=torch.int32),
    )  # fmt: skip
    kv = init_kv(model.config, num_pages=2, page_size=4, dtype=model.dtype, device=model.device)
    want, want_kv = model.spec.forward(model.params, pytree.tree_map(torch.clone, kv), batch, model.config)
    steps = compiled.fused_forward(model, FastChoice(layers=layers_chosen, head=head))
    got, got_kv = steps(model.params, pytree.tree_map(torch.clone, kv), batch, model.config)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_kv.pools[0], want_kv.pools[0])
    rows = 7 if wanted is None else len(wanted)
    assert widths[2 * sum(layers_chosen[:-1]) :] == ([rows, rows] if layers_chosen[-1] and rows else [])


def test_prompts_at_the_start_run_every_form_that_later_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of all their tokens, and a last one of those wanted, by as many layers as are warmed up."""
    model, widths = small(), []
    monkeypatch.setattr(fused, "linear_add_norm", lambda x, *given, **cut: widths.append(len(x)) or linear_add_norm(x, *given, **cut))
    warm = two_of_each(model.params)
    assert [w is of for w, of in zip(warm.layers, model.params.layers, strict=False)] == [True, True] and len(model.params.layers) == 3
    limits = EngineConfig(num_pages=4, page_size=16, max_model_len=300, max_num_seqs=8, max_num_batched_tokens=256, seed=0)
    kv = init_kv(model.config, num_pages=4, page_size=16, dtype=model.dtype, device=model.device)
    for host in batches.sample_prompts(limits, FUSED_PROMPTS, model.config):
        fused.forward(warm, kv, to_device(host, model.device), model.config)
    rows = ((160, 1), (161, 1), (224, 1), (225, 1), (256, 1), (256, 2))
    assert widths == [size for tokens, wanted in rows for size in (tokens, tokens, wanted, wanted)]
    assert not any(pages[:, :-1].any() for pages in kv.pools)  # nothing but the dummy page is written


def test_layers_of_other_forms_are_warmed_up_too() -> None:
    model = small()
    first, second, third = model.params.layers
    other = replace(second, qkv_bias=torch.zeros(len(second.qkv)))
    assert two_of_each(replace(model.params, layers=(first, other, third, other, other, third))).layers == (first, third, other, other)
    assert two_of_each(replace(model.params, layers=(first,))).layers == (first,)


def seen(layer: Callable[..., Any], ran: list[tuple[str, int]], name: str, place: int) -> Callable[..., Any]:
    """The layer function, which notes its name and the index, argument number `place`."""

    def noted(*given: Any, **options: Any) -> Any:
        ran.append((name, given[place]))
        return layer(*given, **options)

    return noted


def test_a_head_falls_back_in_fused_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    monkeypatch.setattr(fused, "follows_closely", lambda *_: True)
    rows = spread_rows(model, 16, 4, 4)
    kv = init_kv(model.config, num_pages=len(rows.source), page_size=4, dtype=model.dtype, device=model.device)
    want, _ = model.spec.forward(model.params, kv, rows.batch, model.config)
    monkeypatch.setattr(fused, "head", lambda *given: layers.head(*given) * 2)
    for head, scale in ((True, 2), (False, 1)):
        steps = compiled.fused_forward(model, FastChoice(layers=(True,) * 3, head=head))
        torch.testing.assert_close(steps(model.params, kv, rows.batch, model.config)[0], want * scale)


@pytest.mark.parametrize("architecture", FUSED)
@pytest.mark.parametrize("few", [True, False])
def test_a_fused_layer_by_itself(architecture: str, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared on a GPU: the form for few rows and the one for many, over the ops' plain functions."""
    monkeypatch.setattr(fused, "_few", lambda *_: few)
    model = small(architecture)
    path = FastPath(name="fused", layer=fused.layer, head=fused.head, plan=lambda _: None)
    found = compare(model, path, sample_tokens(model, 40), (1, 4), page_size=4)
    assert chosen(found, model.dtype).whole
    monkeypatch.setattr(fused, "decode_layer" if few else "wide_layer", broken(few))
    assert chosen(compare(model, path, sample_tokens(model, 40), (1, 4)), model.dtype).layers == (False,) * 3


def broken(few: bool) -> Callable[..., Any]:
    right = fused.decode_layer if few else fused.wide_layer

    def layer(w: Any, *rest: Any) -> Any:
        return right(replace(w, post_norm=w.post_norm * 1.01), *rest)

    return layer


def by_rows(*steps: tuple[int, int]) -> Cuts:
    """Cuts of numbers of rows; those with the same second number have the same."""
    return Cuts(steps=Map({rows: StepCuts(qkv=(number,) * bool(number)) for rows, number in steps}), source="a file")


@pytest.mark.parametrize(
    ("steps", "rows"),
    [
        ([], ()),
        ([(1, 1), (8, 2), (24, 3)], ()),  # they are looked at anyway
        ([(1, 1), (2, 1), (16, 0), (64, 2), (72, 2)], (72,)),  # what is seen at one row, the defaults, and one of two alike
        ([(rows, rows) for rows in (2, 4, 16, 32, 40, 48)], (2, 4, 16, 32, 40, 48)),
        ([(rows, rows) for rows in range(100, 111)], (100, 102, 104, 106, 108, 110)),
        ([(256, 1), (257, 2), (99999, 3)], (256,)),
    ],
)
def test_numbers_of_rows_that_have_cuts_are_looked_at(steps: list[tuple[int, int]], rows: tuple[int, ...]) -> None:
    assert cut_rows(by_rows(*steps), START_ROWS) == rows and len(rows) <= CUT_ROWS and max(rows, default=0) <= MOST_ROWS
    assert cut_rows(None, START_ROWS) == ()


def test_more_rows_than_tokens() -> None:
    found = spread_rows(small(), 5, 13, 2)
    assert found.tokens.unique().tolist() == list(range(5)) and len(found.tokens) == 13 and found.tokens[-1] == 4
    assert len(found.batch.slots.unique()) == 13  # each with pages of its own
    model = small()
    plain = FastPath(name="plain", layer=model.spec.layer, head=layers.head, plan=lambda _: None)
    compared = compare(model, plain, sample_tokens(model, 5), (13,), page_size=2)
    assert compared.fast == compared.plain and 0 < max(each.output for each in compared.plain) < 60 * torch.finfo(model.dtype).eps


def test_a_fault_of_one_number_of_rows_is_seen_where_it_has_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start and in the report, which says whose cuts they are."""
    model, seen = small(), set[int]()

    def path(params: Any, config: Any, cuts: Cuts | None = None) -> FastPath:
        def layer(w: Any, x: Tensor, *rest: Any) -> Tensor:
            seen.add(len(x))
            wrong = cuts is not None and cuts.at(len(x)).qkv == (7,)
            return model.spec.layer(w, x, *rest) * (1.1 if wrong else 1.0)

        return FastPath(name="made up", layer=layer, head=layers.head, plan=lambda _: None)

    monkeypatch.setattr("nanovllm.models.check.examine.fast_path", path)
    assert choose(model, 16) == (all_fast(model.config), "") and seen == {1, 8, 24}
    right, wrong = by_rows((2, 1), (160, 2)), by_rows((2, 1), (160, 7))
    assert choose(model, 16, right)[0] == all_fast(model.config) and seen == {1, 2, 8, 24, 160}
    assert choose(model, 16, wrong)[0] == FastChoice(layers=(False,) * 3)
    for cuts, fallen in ((None, ()), (right, ()), (wrong, ("0", "1", "2"))):
        report = examine(model, 30, cuts=cuts)
        assert report.fallen == fallen and report.rows == ((1, 2, 8, 16, 24) if cuts is None else (1, 2, 8, 16, 24, 160))
        assert report.as_json()["tuning"] == report.tuning == (None if cuts is None else "a file")
        assert table(report).splitlines()[0].endswith("fast path: made up" if cuts is None else "fast path: made up, tuned by a file")


def test_the_command_takes_the_cuts_that_engines_take(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked, given = [], []
    cuts = by_rows((2, 1))

    def cuts_for(model: nv.Model, tuning: Any) -> Cuts | None:
        asked.append(tuning)
        return cuts if tuning is not False else None

    def examined(model: nv.Model, num_tokens: int, *, cuts: Cuts | None) -> Any:
        given.append(cuts)
        return examine(model, 4)

    monkeypatch.setattr(check_command, "cuts_for", cuts_for)
    monkeypatch.setattr(check_command, "examine", examined)
    for more in ([], ["--tuning", "off"], ["--tuning", "x.json"]):
        cli.main(["check", "--device", "cpu", *more])
    assert asked == [None, False, Path("x.json")] and given == [cuts, None, cuts]


def test_cuts_that_no_kernel_can_be_made_by_are_an_error_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> FastPath:
        raise CutError("cut (1,) has 1 number")

    monkeypatch.setattr("nanovllm.models.check.examine.fast_path", refused)
    with pytest.raises(nv.TuningFileError, match=r"a file: a kernel cannot be built with its tile configurations: cut \(1,\)"):
        examine(small(), 8, cuts=by_rows((1, 1)))


# The report and the command


@needs_c
def test_the_report_as_a_table_and_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    model = extreme(small("Qwen3ForCausalLM", std=0.2))
    monkeypatch.setattr(cpu, "decode_layer", planted(model, is_no_number, 1))
    report = examine(model, 50)
    assert report.fallen == ("1",) and [each.path for each in report.layers] == ["C", "plain", "C"] and report.head.path == "C"
    assert report.agreement is not None and report.agreement.both == report.agreement.num_tokens == 50
    lines = table(report).splitlines()
    assert lines[0].startswith("random-0, Qwen3ForCausalLM, float32 on ") and lines[0].endswith("fast path: C")
    assert "1.5 x plain + 3.9e-06" in lines[1] and "96.5" in lines[5] and "nan" in lines[6]
    assert lines[-1] == "Above the bound, and so in plain torch: layer 1."
    found = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert found["layers"][1]["fast"] == {"output": None, "kv": found["layers"][1]["fast"]["kv"]}
    assert found["layers"][0]["k_gain"] == 96.5 and found["falls_back"] == ["1"] and found["agreement"]["both"] == 50


def test_weights_that_are_no_numbers_are_said_to_be() -> None:
    model = small("LlamaForCausalLM")
    broken = model.params.layers[1]
    broken = replace(broken, down=torch.full_like(broken.down, math.nan))
    params = replace(model.params, layers=(model.params.layers[0], broken, *model.params.layers[2:]))
    told = table(examine(replace(model, params=params), 20)).splitlines()[-1]
    assert told.startswith("The output is NaN or infinite in layer 1, ") and "the head" in told and "not finite" in told


def test_keys_that_are_no_numbers_are_said_to_be() -> None:
    """Keys of a layer may be NaN where its output on the compared rows is finite."""
    report = examine(small("LlamaForCausalLM", dtype="float16"), 4)
    first, second, third = report.layers
    broken = replace(second, plain=replace(second.plain, kv=math.nan))
    told = verdict(replace(report, layers=(first, broken, third)))
    assert told.startswith("The output is NaN or infinite in layer 1, in plain torch too")


def test_each_gain_is_of_its_own_norm() -> None:
    """The largest absolute weight, which may be negative."""
    model = small()

    def with_gains(w: models.Layer[Tensor], first: float) -> models.Layer[Tensor]:
        assert w.q_norm is not None and w.k_norm is not None
        gains = [
            gain.index_fill(0, torch.tensor([3]), -first - i) for i, gain in enumerate((w.input_norm, w.post_norm, w.q_norm, w.k_norm))
        ]
        return replace(w, input_norm=gains[0], post_norm=gains[1], q_norm=gains[2], k_norm=gains[3])

    layers_made = tuple(with_gains(w, 10 * (i + 1)) for i, w in enumerate(model.params.layers))
    report = examine(replace(model, params=replace(model.params, layers=layers_made)), 4)
    found = [(each.input_gain, each.post_gain, each.q_gain, each.k_gain) for each in report.layers]
    assert found == [(10, 11, 12, 13), (20, 21, 22, 23), (30, 31, 32, 33)]


def test_each_figure_is_in_its_own_column() -> None:
    report = examine(small("LlamaForCausalLM", dtype="float16"), 4)
    figures = [Errors(output=0.001, kv=0.002), Errors(output=0.003, kv=0.004), Errors(output=0.005, kv=0.006)]
    shown = replace(report.layers[0], plain=figures[0], fast=figures[1], bound=figures[2])
    lines = table(replace(report, layers=(shown,))).splitlines()
    assert lines[5].split()[6:] == ["1.0e-03", "3.0e-03", "5.0e-03", "2.0e-03", "4.0e-03", "6.0e-03"]


@pytest.mark.parametrize(("count", "more"), [(1, []), (8, []), (9, ["  and 1 more, by less"]), (11, ["  and 3 more, by less"])])
def test_the_clearest_places_of_disagreement_are_shown(count: int, more: list[str]) -> None:
    apart = tuple(Disagreement(place=place, fast=1, plain=2, exact=3, margin=float(place)) for place in range(count))
    report = examine(small("LlamaForCausalLM", dtype="float16"), 4)
    found = Agreement(num_tokens=20, both=20 - count, fast_exact=7, plain_exact=8, apart=apart)
    lines = table(replace(report, agreement=found)).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("Greedy agreement"))
    assert lines[at].endswith(f"tokens of 20: with the plain layers on {20 - count}; with float64 on 7, the plain layers on 8")
    wanted = [f"  token {place}: 1, plain 2, float64 3 by {float(place):.2g}" for place in range(count - 1, max(-1, count - 9), -1)]
    assert lines[at + 1 : -1] == wanted + more


@needs_c
def test_a_text_of_all_positions_and_batches_of_all_tokens() -> None:
    model = random_model(tiny_config(max_position_embeddings=8))
    assert examine(model, 8).num_tokens == 8
    assert examine(model, 8).rows == (1, 2, 8)
    assert examine(model, 7).rows == (1, 2)
    with pytest.raises(nv.InvalidRequestError, match="num_tokens=9 must be 1 to 8, the model's positions"):
        examine(model, 9)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_a_model_without_a_fast_path(dtype: str) -> None:
    report = examine(small("LlamaForCausalLM", dtype=dtype), 20)
    assert report.fast is None and report.fallen == () and report.agreement is None
    assert "every layer runs in plain torch" in table(report)


@needs_c
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["check", "--device", "cpu", "--tokens", "40", "--output", str(tmp_path / "report.json")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tiny, Qwen3ForCausalLM, float32") and "tokens of 40: with the plain layers on 40;" in out
    assert json.loads((tmp_path / "report.json").read_text())["num_tokens"] == 40
    assert cli.main(["check", "--device", "cpu", "--tokens", "40", "--json"]) == 0
    found, written = json.loads(capsys.readouterr().out), json.loads((tmp_path / "report.json").read_text())
    assert found.pop("outlook")["runs"] and written.pop("outlook")["runs"]  # how much memory is free differs
    assert found == written
    folder = str(save_hf_folder(tmp_path / "model", tiny_config()))
    for named in ([folder], ["--model", folder]):
        assert cli.main(["check", *named, "--device", "cpu", "--dtype", "bfloat16", "--tokens", "20"]) == 0
        assert capsys.readouterr().out.startswith("model, Qwen3ForCausalLM, bfloat16")
    monkeypatch.setitem(SHAPES, "small", tiny_config("LlamaForCausalLM"))
    assert cli.main(["check", "small", "--device", "cpu", "--dtype", "float32", "--tokens", "20"]) == 0
    assert capsys.readouterr().out.startswith("small (random weights), LlamaForCausalLM")
    monkeypatch.setattr(cpu, "head", lambda *given: C_HEAD(*given) * 1.01)
    assert cli.main(["check", folder, "--device", "cpu", "--tokens", "20"]) == 1
    assert capsys.readouterr().out.endswith("plain torch: head.\n")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["no-such-model"], "'no-such-model' is neither a folder nor a repository"),
        (["tiny", "--model", "tiny"], "two models were named, 'tiny' and --model 'tiny': give one of them"),
        (["--tokens", "3000"], "num_tokens=3000"),
        (["--dtype", "int8"], "dtype 'int8'"),
        (["--tuning", "x.json"], "applies to the fused kernels of a CUDA GPU"),
        (["--device", "abacus"], "device='abacus'"),
        (["--tokens", "2", "--output", "/dev/null/folder/report.json"], "Not a directory"),
    ],
)
def test_errors_of_the_command(arguments: list[str], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    device = [] if "--device" in arguments else ["--device", "cpu"]
    assert cli.main(["check", *arguments, *device]) == 2
    assert match in capsys.readouterr().err
