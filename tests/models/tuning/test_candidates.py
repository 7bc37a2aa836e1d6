"""Cuts as integers: what kernels refuse, which are tried, and that those of a tuning reach the ops."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.config import ModelConfig
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES
from nanovllm.executor import compiled
from nanovllm.models.check.compare import spread_rows
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.layers import rope_angles
from nanovllm.models.fast import fused
from nanovllm.models.fast.choice import FastChoice
from nanovllm.models.fast.cuts import DEFAULT, PARTS, Cuts, StepCuts, with_cuts
from nanovllm.models.fast.path import FastPath
from nanovllm.models.tuning.candidates import default_cut, neighbours, reachable, starts, valid
from nanovllm.models.tuning.launches import PRODUCTS, Codes, Machine, Work, works
from nanovllm.ops.attention.fused_plan import FusedDecodePlan, attention_fits, cut_of
from nanovllm.ops.cuts import Cut, CutError, named
from nanovllm.ops.linear import norm_linear as few
from nanovllm.ops.linear.linear_add_norm import BY_LIBRARY, given_wide_tile, wide_tile
from nanovllm.ops.linear.norm_linear import given_tile, tile_of
from nanovllm.ops.linear.quantised_tiles import gates_alone
from nanovllm.ops.linear.quantised_tiles import given_tile as given_quantised
from nanovllm.ops.linear.tiles import Tile, WideTile
from nanovllm.state.kv_cache import init_kv
from nanovllm.testing.models import random_model, tiny_config

CPU = torch.device("cpu")
MACHINES = (Machine(processors=132, memory=200_000), Machine(processors=108, memory=158_720), Machine(processors=46, memory=93_184))
H200 = MACHINES[0]


# What kernels refuse


def test_an_empty_cut_is_the_default() -> None:
    assert given_tile((), 8, 1024, 1024, False, 200_000) == tile_of(8, 1024, 1024, False, 200_000)
    wide = (64, 1024, 2048, False, 132, 200_000)
    assert given_wide_tile((), *wide, split=True) == wide_tile(*wide, split=True)
    assert given_wide_tile(BY_LIBRARY, 64, 1024, 2048, False, 132, 200_000) is None
    plan = FusedDecodePlan(8, 4, 2, 64, CPU)
    assert (plan.tile, plan.warps, plan.stages, plan.splits) == cut_of(8, 2, 64, 200_000) != cut_of(8, 8, 64, 200_000)


def test_a_cut_spells_a_tile() -> None:
    assert given_tile((4, 2, 0), 2, 1024, 1024, False, 200_000) == Tile(outputs=4, warps=2)
    assert given_tile((32, 4, 64), 8, 1024, 1024, False, 200_000) == Tile(outputs=32, warps=4, depth=64)
    assert given_wide_tile((64, 32, 128, 3, 2, 8), 64, 1024, 2048, False, 132, 200_000, split=True) == WideTile(
        outputs=64, rows=32, depth=128, stages=3, parts=2, warps=8
    )
    plan = FusedDecodePlan(8, 4, 2, 64, CPU, (32, 2, 3, 8))
    assert (plan.tile, plan.warps, plan.stages, plan.splits) == (32, 2, 3, 8)
    assert plan.parts.shape == (8, 4, 8, 64) and plan.stats.shape == (8, 4, 8, 2)


@pytest.mark.parametrize(
    ("cut", "rows", "width"),
    [((4, 2), 1, 1024), ((4, 2, 0, 1), 1, 1024), ((3, 2, 0), 1, 1024), ((4, 3, 0), 1, 1024), ((0, 2, 0), 1, 1024), ((4, 32, 0), 1, 1024),
     ((-4, 2, 0), 1, 1024), ((4, 2, -1), 1, 1024), ((4096, 2, 0), 1, 1024), ((4, 2, 0), 5, 1024), ((1, 8, 0), 1, 32769),
     ((16, 4, 256), 8, 1025), ((16, 4, 48), 8, 1152), ((16, 4, 512), 8, 1024), ((8, 4, 64), 8, 1024), ((64, 4, 64), 8, 2048),
     ((16, 4, 64), 17, 1024)],
)  # fmt: skip
def test_a_tile_that_does_not_fit_is_refused(cut: Cut, rows: int, width: int) -> None:
    with pytest.raises(CutError, match=r"cut|Tile"):
        given_tile(cut, rows, 1024, width, False, 200_000)


@pytest.mark.parametrize(
    ("cut", "split", "gated"),
    [((32, 64, 128), True, False), ((48, 64, 128, 3, 1, 4), True, False), ((8, 64, 128, 3, 1, 4), True, False),
     ((32, 8, 128, 3, 1, 4), True, False), ((32, 64, 96, 3, 1, 4), True, False), ((32, 64, 8, 3, 1, 4), True, False),
     ((32, 64, 128, 0, 1, 4), True, False), ((32, 64, 128, 3, 0, 4), True, False), ((32, 64, 128, 3, 9, 4), True, False),
     ((32, 64, 128, 3, 3, 4), True, False), ((32, 64, 128, 3, 2, 4), False, False), ((32, 64, 128, 3, 1, 3), True, False),
     ((32, 64, 128, 3, 1, 32), True, False), ((128, 128, 128, 4, 1, 8), True, False), ((128, 128, 32, 2, 1, 2), True, False),
     ((64, 64, 256, 2, 1, 8), False, True), ((128, 512, 16, 2, 1, 16), True, False),
     ((256, 16, 16, 2, 1, 4), True, False), ((0,) * 6, True, False), ((0, 0), True, False)],
)  # fmt: skip
def test_a_wide_tile_that_does_not_fit_is_refused(cut: Cut, split: bool, gated: bool) -> None:
    """A product of 1,152 outputs over 2,048 inputs, in 180,000 bytes."""
    with pytest.raises(CutError, match=r"cut|WideTile"):
        given_wide_tile(cut, 64, 1152, 2048, gated, 132, 180_000, split=split)


@pytest.mark.parametrize(
    "cut",
    [(64, 4, 0), (64, 4, 0, 2, 1), (8, 4, 0, 2), (48, 4, 0, 2), (64, 3, 0, 2), (64, 32, 0, 2), (64, 4, 0, 3), (64, 4, 0, 128),
     (64, 4, -1, 2), (64, 4, 9, 2), (128, 4, 4, 1), (128, 1, 0, 1), (0, 4, 0, 1)],
)  # fmt: skip
def test_an_attention_that_does_not_fit_is_refused(cut: Cut) -> None:
    with pytest.raises(CutError, match=r"tile, warps, stages, splits"):
        FusedDecodePlan(8, 4, 2, 128, CPU, cut)


def test_numbers_are_named() -> None:
    with pytest.raises(CutError, match="has 2 numbers, but a Tile needs 3: outputs, warps, depth"):
        named(Tile, (1, 2))


# Which are tried

SIZES = st.tuples(
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([64, 128, 256]),
    st.sampled_from([64, 96, 256, 1000, 1024, 4096]),
    st.sampled_from([128, 512, 1003, 3072, 5632, 12288]),
)


@pytest.mark.unhooked
@given(st.one_of(st.sampled_from(list(SHAPES)), SIZES), st.integers(1, 300), st.sampled_from(MACHINES), st.data())
def test_every_candidate_is_valid_for_its_shape(
    shape: str | tuple[int, int, int, int, int], rows: int, machine: Machine, data: st.DataObject
) -> None:
    """A walk along neighbours: all of them fit, and a kernel takes them."""
    config = SHAPES[shape] if isinstance(shape, str) else sized(*shape)
    for work in works(config, rows, machine):
        assert work.rows == rows and work.part in PARTS
        cut = default_cut(work, machine)
        before = data.draw(st.sampled_from([(), (32, 4, 64), (16, 2, 2, 1), (64, 64, 128, 3, 1, 4)]))
        others = starts(work, machine, before)
        assert cut not in others and len(set(others)) == len(others)
        for place in (cut, *others):
            at = place
            for _ in range(2):
                near = neighbours(work, at, machine)
                assert len(set(near)) == len(near) and at not in near
                assert all(taken(work, one, machine) for one in near)
                at = data.draw(st.sampled_from(near)) if near else at
        assert all(taken(work, other, machine) for other in others)


@st.composite
def quantised_works(draw: st.DrawFn) -> tuple[tuple[Work, ...], Machine]:
    """The kernels of a model whose matrices are quantised in any of the forms of checkpoints, each in its own."""
    kinds = st.sampled_from(
        [
            Codes(kind="int4", group=128, rows=1, zeros=False),
            Codes(kind="int4", group=32, rows=1, zeros=True),
            Codes(kind="int8", group=1 << 20, rows=1, zeros=False),
            Codes(kind="fp8", group=128, rows=128, zeros=False),
            Codes(kind="fp8", group=1 << 20, rows=1, zeros=False),
            None,
        ]
    )
    shape, machine = draw(st.one_of(st.sampled_from(list(SHAPES)), SIZES)), draw(st.sampled_from(MACHINES))
    config, codes = SHAPES[shape] if isinstance(shape, str) else sized(*shape), {part: draw(kinds) for part in (*PRODUCTS, "head")}
    rows = draw(st.one_of(st.integers(1, 20), st.integers(1, 300)))
    given_ = {part: each for part, each in codes.items() if each is not None}
    return tuple(work for work in works(config, rows, machine, given_) if work.codes is not None), machine


@pytest.mark.unhooked
@given(quantised_works(), st.data())
def test_every_candidate_of_a_quantised_product_is_taken(drawn: tuple[tuple[Work, ...], Machine], data: st.DataObject) -> None:
    """By one of the kernels, whose number of integers it has. Some candidates are of other kernels than the default."""
    each, machine = drawn
    for work in each:
        usual, tried = default_cut(work, machine), set[int]()
        for place in (usual, *starts(work, machine)):
            at = place
            for _ in range(2):
                near = neighbours(work, at, machine)
                assert at not in near and all(len(one) == len(at) for one in near)
                for one in (at, *near):
                    split, gated = work.form == "sum", work.gated and gates_alone(work.matrix, work.rows)
                    tile = given_quantised(one, work.matrix, work.rows, gated, machine.processors, machine.memory, split=split)
                    assert astuple(tile) == one
                at = data.draw(st.sampled_from(near)) if near else at
            tried.add(len(place))
        if work.rows == 1 and work.form == "few" and work.width % 4096 == 0:
            assert len(tried) >= 2, work


@pytest.mark.parametrize(("cut", "why"), [((1, 2, 3), "names none"), ((3, 4), "does not fit"), ((64, 16, 64, 4, 3, 4), "does not fit")])
def test_cuts_that_no_kernel_of_codes_takes(cut: Cut, why: str) -> None:
    matrix = Codes(kind="int4", group=128, rows=1, zeros=False).matrix(4096, 4096)
    with pytest.raises(CutError, match=why):
        given_quantised(cut, matrix, 1, True, 132, 200_000)


def sized(kv_heads: int, group: int, head_dim: int, hidden: int, ffn: int) -> ModelConfig:
    heads = {"num_heads": kv_heads * group, "num_kv_heads": kv_heads, "head_dim": head_dim}
    return replace(SHAPES["qwen3-0.6b"], hidden_size=hidden, intermediate_size=ffn, **heads)


def taken(work: Work, cut: Cut, machine: Machine) -> bool:
    """Whether the kernel itself takes the cut."""
    assert valid(work, cut, machine) and reachable(work, cut, machine)
    match work.form:
        case "attend":
            usual, rows, heads = default_cut(work, machine), work.rows, work.outputs
            assert attention_fits(cut, work.width, machine.memory)
            if not cut[2]:
                assert cut[0] * cut[3] >= usual[0] * usual[3] and not usual[2]
            return rows * heads * cut[3] > 0
        case "few":
            tile = given_tile(cut, work.rows, work.outputs, work.width, work.gated, machine.memory)
            return tile.depth == 0 or work.width % (tile.depth * tile.warps) == 0
        case form:
            wide = given_wide_tile(
                cut, work.rows, work.outputs, work.width, work.gated, machine.processors, machine.memory, split=form == "sum"
            )
            return wide is None or (work.outputs % wide.outputs == 0 and work.width % (wide.parts * wide.depth) == 0)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_few_rows_are_tried_on_tensor_cores_and_off_them(shape: str, rows: int) -> None:
    for work in works(SHAPES[shape], rows, H200):
        if work.form == "few":
            usual = default_cut(work, H200)
            assert all(bool(cut[2]) != bool(usual[2]) for cut in starts(work, H200))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 16])
def test_a_wide_layers_products_take_wide_cuts_for_any_rows(rows: int, gated: bool) -> None:
    """Gate and up without a norm stand in no other, and of the last tokens of prompts there may be one."""
    assert few.goes_wide(rows, 1024, gated, H200.memory) == (gated or rows > few.FEW)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 17, 64, 65, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_there_is_something_to_try(shape: str, rows: int) -> None:
    found = list(works(SHAPES[shape], rows, H200))
    assert [work.part for work in found] == ["attend", "qkv", "o", "gate_up", "down", *(["head"] if rows <= 2 else [])]
    for work in found:
        tried = {*starts(work, H200), *neighbours(work, default_cut(work, H200), H200)}
        assert len(tried) >= 2, (work, tried)
        if work.form in ("many", "sum"):
            assert BY_LIBRARY in tried or default_cut(work, H200) == BY_LIBRARY


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "GemmaForCausalLM", "Gemma3ForCausalLM"])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 17, 64, 300])
def test_the_works_are_what_a_step_runs(rows: int, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forms, and what stands in a launch, by the ops that a layer really calls."""
    model = small(architecture=architecture, hidden_size=64, intermediate_size=96, vocab_size=400)
    behind = model.params.layers[0].o_norm is not None
    for memory in (200_000, 0):  # without memory for the products of few rows on tensor cores, those of many serve
        machine = Machine(processors=132, memory=memory)
        closely = rows <= 2 or (rows <= few.ROWS and bool(memory) and not behind)
        monkeypatch.setattr(few, "fits", lambda rows, width, gated, most: rows <= 2 or (rows <= few.ROWS and bool(most)))
        monkeypatch.setattr("nanovllm.models.tuning.launches.fits", few.fits)
        monkeypatch.setattr(fused, "follows_closely", lambda *_, closely=closely: closely)
        planned = {work.part: work for work in works(model.config, rows, machine)}
        for name, x, weight, norm, gated in step_products(model, rows):
            part = next(p for p in PARTS if any(weight is getattr(w, p, None) for w in model.params.layers) or p == "head")
            if part == "head" and part not in planned:
                assert rows > few.FEW
                continue
            work = planned[part]
            assert (name == "linear_add_norm") == (work.form == "sum")
            assert (work.rows, work.width, work.gated) == (len(x), x.shape[1], gated)
            assert work.form == "sum" or work.norm == norm
            assert work.outputs == weight.shape[0] // (2 if gated else 1)


# What reaches the ops


def small(**overrides: Any) -> Any:
    return random_model(tiny_config(num_layers=2, **overrides))


class Seen(TorchDispatchMode):
    """The custom ops that are called, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "nanovllm":
            self.calls.append((func._opname, args))
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded() -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    with Seen() as seen:
        yield seen.calls


def step(model: Any, rows: int) -> tuple[Batch, Any]:
    text = spread_rows(model, max(rows, 16), rows, 4)
    kv = init_kv(model.config, num_pages=len(text.source), page_size=4, dtype=model.dtype, device=model.device)
    return text.batch, kv


def step_products(model: Any, rows: int) -> list[tuple[str, Any, Any, bool, bool]]:
    batch, kv = step(model, rows)
    with recorded() as calls:
        fused.forward(model.params, kv, batch, model.config)
    found = []
    for name, args in calls:
        if name == "norm_linear":
            found.append((name, args[0], args[1], args[2] is not None, args[6]))
        elif name == "linear_add_norm":
            found.append((name, args[0], args[1], False, False))
    return found


CUTS = Cuts(
    steps=Map({n: StepCuts(qkv=(n, 1), attend=(16, 2, 2, 1), o=(n, 2), gate_up=(n, 3), down=(n, 4), head=(n, 5)) for n in (1, 2)}),
    source="made up",
)


def cuts_seen(calls: list[tuple[str, tuple[Any, ...]]]) -> list[tuple[int, ...]]:
    """The last argument of each product; where it is left out, the default."""
    lengths = {"norm_linear": 8, "linear_add_norm": 7}
    return [tuple(args[-1]) if len(args) == lengths[name] else () for name, args in calls if name in lengths]


@pytest.mark.parametrize("closely", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_cuts_reach_the_ops(rows: int, closely: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of exactly so many rows; the results are the same, for plain functions do not look."""
    model = small()
    monkeypatch.setattr(fused, "follows_closely", lambda *_: closely)
    monkeypatch.setattr(fused, "_few", lambda *_: closely)
    batch, kv = step(model, rows)
    want, _ = fused.forward(model.params, pytree.tree_map(torch.clone, kv), batch, model.config)
    layer = [(rows, 1), (rows, 2), (rows, 3), (rows, 4)] if rows in CUTS.steps else [()] * 4
    head = [[CUTS.at(rows).head]] if closely and rows <= few.FEW else [[]]
    for forward in (partial(fused.forward, cuts=CUTS), compiled.fused_forward(model, None, CUTS)):
        with recorded() as calls:
            got, _ = forward(model.params, pytree.tree_map(torch.clone, kv), batch, model.config)
        assert torch.equal(got, want)
        assert cuts_seen(calls) == [*layer, *layer, *head[0]]
    with recorded() as calls:
        fused.forward(model.params, kv, batch, model.config)
    assert set(cuts_seen(calls)) == {()}


def test_behind_a_prompts_last_attention_the_defaults_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts are those of the step's tokens; there, fewer go on."""
    model = small()
    monkeypatch.setattr(fused, "follows_closely", lambda *_: False)
    batch, kv = step(model, 2)
    tokens = {"cu_seqlens": torch.tensor([0, 1, 2], dtype=torch.int32), "logit_indices": torch.tensor([1], dtype=torch.int32)}
    with recorded() as calls:
        fused.forward(model.params, kv, replace(batch, **tokens), model.config, cuts=CUTS)
    assert cuts_seen(calls) == [(2, 1), (2, 2), (2, 3), (2, 4), (2, 1), (), (), ()]


def test_layers_and_head_by_themselves_take_the_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the look at the start of an engine runs them."""
    model = small()
    monkeypatch.setattr(fused, "_few", lambda *_: True)
    batch, kv = step(model, 2)
    x = torch.randn(2, model.config.hidden_size)
    cos, sin = rope_angles(batch.positions, model.params.inv_freq, model.config.rope)
    path = FastPath(name="fused", layer=with_cuts(fused.layer, CUTS), head=with_cuts(fused.head, CUTS), plan=lambda _: None)
    with recorded() as calls:
        path.layer(model.params.layers[0], x, kv.pools[0], 0, cos, sin, batch, model.config)
        path.head(x, model.params.final_norm, model.params.embed, 1e-6)
    assert cuts_seen(calls) == [(2, 1), (2, 2), (2, 3), (2, 4), (2, 5)]


def test_nothing_said_changes_nothing() -> None:
    model = small()
    assert with_cuts(fused.decode_layer, None) is fused.decode_layer is with_cuts(fused.decode_layer, DEFAULT)
    assert compiled.fused_forward(model, None) is fused.forward is compiled.fused_forward(model, FastChoice(layers=(True, True)), None)
    for nothing in (Cuts(), Cuts(steps=Map({3: DEFAULT}), source="a file")):
        assert nothing.default and with_cuts(fused.forward, nothing) is fused.forward
    assert not CUTS.default and with_cuts(fused.forward, CUTS) is not fused.forward
    assert Cuts().at(3) == DEFAULT and CUTS.at(3) == DEFAULT
