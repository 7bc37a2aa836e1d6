"""Tuning on a GPU from end to end, and the kernels by cuts of their own against float64.

Compiling is what takes time: few candidates, of few numbers of rows, and the same ones throughout.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nanovllm as nv
from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, random_weights
from nanovllm.entrypoints.cli.tune.kernel_search import Unfit
from nanovllm.entrypoints.cli.tune.measure import Recorder, measuring
from nanovllm.loading.quantisation.rounding import Rounding, rounded_params
from nanovllm.models.check.examine import examine
from nanovllm.models.fast.cuts import DEFAULT, SHIPPED, StepCuts
from nanovllm.models.tuning.candidates import default_cut, neighbours, starts
from nanovllm.models.tuning.choose import cuts_for, machine_of
from nanovllm.models.tuning.file import default_path, key_of, read_cuts
from nanovllm.models.tuning.launches import Machine, Work, codes_of, works
from nanovllm.ops.attention.fused_plan import FusedDecodePlan
from nanovllm.ops.attention.rope_attend import rope_attend
from nanovllm.ops.cuts import Cut, CutError
from nanovllm.ops.linear.linear_add_norm import BY_LIBRARY, linear_add_norm
from nanovllm.ops.linear.norm_linear import norm_linear
from nanovllm.ops.linear.quantise import Kind
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.problems import attention_problem, linear_problem, wide_norm_linear

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # FlashInfer and its needs may warn
BF16 = torch.bfloat16
CONFIG = tiny_config(
    hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=512, num_layers=3, vocab_size=1000,
    max_position_embeddings=512, dtype="bfloat16",
)  # fmt: skip
LIMITS: dict[str, Any] = {"num_pages": 256, "page_size": 16, "max_num_seqs": 24, "max_num_batched_tokens": 64, "max_model_len": 256}
GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def small() -> nv.Model:
    return random_model(CONFIG, dtype=BF16, device="cuda", std=0.05)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error, of the largest value."""
    return float((got.double() - want).abs().max() / want.abs().max())


def layer_of(model: nv.Model, rows: int) -> tuple[Work, ...]:
    found = works(model.config, rows, machine_of(model), codes_of(model.params))
    return tuple(work for work in found if work.part != "head")


def some_starts(work: Work, machine: Machine, before: Cut = ()) -> tuple[Cut, ...]:
    return starts(work, machine, before)[:1]


def some_neighbours(work: Work, cut: Cut, machine: Machine) -> tuple[Cut, ...]:
    return neighbours(work, cut, machine)[:1]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """One run of the command over a small shape, a step from the defaults, with a cache of its own; the file, and what is in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setitem(SHAPES, "small", CONFIG)
        patch.setattr("nanovllm.entrypoints.cli.tune.layer_search.starts", some_starts)
        patch.setattr("nanovllm.entrypoints.cli.tune.layer_search.neighbours", some_neighbours)
        patch.setattr("nanovllm.entrypoints.cli.tune.kernel_search.ROUNDS", 1)
        assert cli.main(["tune", "--model", "small", "--dtype", "bfloat16", "--batches", "2,24"]) == 0
        path = default_path(key_of(small()))
        yield path, json.loads(path.read_text())


def test_a_run_measures_every_kernel_and_writes_the_file(tuned: tuple[Path, dict[str, Any]]) -> None:
    path, document = tuned
    assert path.exists() and document["key"]["gpu"] == torch.cuda.get_device_name()
    parts = ["layer", "attend", "qkv", "o", "gate_up", "down"]
    measured = document["measured"]
    assert [(row["part"], row["rows"]) for row in measured] == [*((p, 2) for p in (*parts, "head")), *((p, 24) for p in parts)]
    for row in measured:
        assert 0 < row["chosen_us"] <= row["default_us"] < 1000, row
        if row["part"] == "layer":
            assert row["chosen_us"] == row["default_us"] or row["chosen_us"] <= 0.99 * row["default_us"] + 1e-3, row
        else:
            assert row["measured"] > 1, row
    for rows in (2, 24):
        assert len({row["chosen_us"] for row in measured if row["rows"] == rows and row["part"] != "head"}) == 1  # of the same layer
    cuts = read_cuts(path, small(), machine_of(small()))
    assert cuts_for(small(), None) == cuts == cuts_for(small(), True)
    assert set(cuts.steps) <= {2, 24}


def test_an_engine_runs_by_the_file(tuned: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """By cuts that are not the defaults in any kernel, whatever the run has chosen; the replies are the same or nearly tied."""
    _, document = tuned
    model = small()
    machine, cuts = machine_of(model), {}
    for rows in (2, 24):
        steps = {}
        for work in works(model.config, rows, machine):
            near = some_neighbours(work, default_cut(work, machine), machine) or some_starts(work, machine)
            steps[work.part] = list(near[0])
        cuts[str(rows)] = steps
    other = tmp_path / "cuts.json"
    other.write_text(json.dumps(document | {"cuts": cuts}))
    prompts = [[1 + n, 5, 9 + n] for n in range(20)]
    replies = {}
    for tuning in (False, other):
        state = nv.init_state(model, tuning=tuning, **LIMITS)
        assert state.runtime.cuts == (read_cuts(other, model, machine) if tuning else None)
        for count in (2, 20):
            state, gens = nv.generate_many(model, state, prompts[:count], GREEDY)
            replies[tuning, count] = [gen.token_ids for gen in gens]
    pairs = [(a, b) for count in (2, 20) for a, b in zip(replies[False, count], replies[other, count], strict=True)]
    assert sum(a[0] == b[0] for a, b in pairs) >= 18 and sum(a == b for a, b in pairs) >= 5, pairs  # of 22


def test_a_shipped_file_keeps_the_error_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In layers of the shapes that it is for, by a user without a file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(SHAPES, "two layers", replace(SHAPES["qwen3-8b"], num_layers=2))
    model = random_weights("two layers", quantization="int4")
    cuts = cuts_for(model, None)
    if cuts is None:
        pytest.skip("nothing is shipped for this GPU")
    report = examine(model, cuts=cuts)
    assert report.tuning == cuts.source and cuts.source.endswith(SHIPPED)
    assert report.fallen == () and set(report.rows) > {1, 2, 8, 16, 24}


def test_the_file_of_another_gpu_is_refused(tuned: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    _, document = tuned
    other = tmp_path / "cuts.json"
    other.write_text(json.dumps(document | {"key": document["key"] | {"gpu": "another"}}))
    with pytest.raises(nv.TuningFileError, match="another gpu"):
        nv.init_state(small(), tuning=other, **LIMITS)


@pytest.mark.parametrize(("kind", "rows"), [(None, 2), (None, 8), (None, 24), ("int4", 1), ("int4", 24), ("fp8", 2), ("int8", 8)])
def test_what_is_tried_computes_the_same(kind: Kind | None, rows: int) -> None:
    """Measuring refuses what differs from the default: nothing that is tried on this GPU may. A start and a neighbour of each kernel, and
    then all of these together in one chain."""
    model = small()
    if kind is not None:
        model = replace(model, params=rounded_params(model.params, Rounding(kind=kind)))
    machine, layer, last = machine_of(model), layer_of(model, rows), DEFAULT
    with measuring(model, Recorder(model.device), layer) as bench:
        measure = bench.measure
        assert len(measure(DEFAULT)) == (2 if rows <= 16 else 1) and all(us > 0 for us in measure(DEFAULT))
        for work in layer:
            for cut in (*some_starts(work, machine), *some_neighbours(work, default_cut(work, machine), machine)):
                cuts = replace(DEFAULT, **{work.part: cut})
                try:
                    assert all(us > 0 for us in measure(cuts))
                    last = replace(last, **{work.part: cut})
                except Unfit as left_out:
                    assert str(left_out).startswith("the kernel failed"), (work, cut, left_out)  # never wrong
        assert last != DEFAULT and all(us > 0 for us in measure(last))


def test_a_wrong_kernel_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    plain = norm_linear

    def wrong(*given: Any, cut: Any = (), **options: Any) -> torch.Tensor:
        return plain(*given, cut=cut, **options) * (1.1 if cut else 1.0)

    monkeypatch.setattr("nanovllm.entrypoints.cli.tune.one_kernel.norm_linear", wrong)
    layer = layer_of(model, 8)
    work = next(work for work in layer if work.part == "qkv")
    with measuring(model, Recorder(model.device), layer) as bench:
        measure = bench.measure
        measure(DEFAULT)
        with pytest.raises(Unfit, match="wrong results: relative error 0"):
            measure(StepCuts(qkv=default_cut(work, machine_of(model))))
        measure(DEFAULT)


@pytest.mark.parametrize(("rows", "cut"), [(2, (16, 4, 64)), (4, (2, 4, 0)), (16, (32, 8, 32))])
def test_products_of_few_rows_by_a_cut(rows: int, cut: tuple[int, ...]) -> None:
    x, weight, gain, bias, residual, eps, gated = given = linear_problem(rows, 1024, 1024, False, True, True, BF16, "cuda")
    want = wide_norm_linear(*given)
    usual = norm_linear(x, weight, gain=gain, bias=bias, residual=residual, eps=eps, gated=gated)
    got = norm_linear(x, weight, gain=gain, bias=bias, residual=residual, eps=eps, gated=gated, cut=cut)
    assert error(got, want) < 1.5 * error(usual, want) + 2e-3


@pytest.mark.parametrize("cut", [(32, 32, 128, 3, 1, 4), (16, 16, 64, 3, 4, 4), BY_LIBRARY])
@pytest.mark.parametrize("rows", [3, 100])
def test_products_of_many_rows_by_a_cut(rows: int, cut: tuple[int, ...]) -> None:
    x, weight, _, bias, residual, eps, _ = linear_problem(rows, 1024, 2048, False, False, True, BF16, "cuda")
    assert residual is not None
    gain = torch.rand(1024, device="cuda").to(BF16) + 0.5
    want = wide_norm_linear(x, weight, None, bias, residual, eps, False)
    usual, _ = linear_add_norm(x, weight, bias, residual, gain, eps)
    got, _ = linear_add_norm(x, weight, bias, residual, gain, eps, cut=cut)
    assert error(got, want) < 1.5 * error(usual, want) + 2e-3


@pytest.mark.parametrize("cut", [(64, 16, 64, 3, 1, 4), BY_LIBRARY])
def test_a_gated_product_of_few_rows_that_no_tile_fits_takes_a_cut(cut: tuple[int, ...]) -> None:
    """At the width of 8B the default of 8 rows is the library's product, and a kernel for silu."""
    x, weight, _, _, _, eps, _ = given = linear_problem(8, 2048, 4096, True, False, False, BF16, "cuda")
    want = wide_norm_linear(*given)
    usual, got = norm_linear(x, weight, gated=True), norm_linear(x, weight, gated=True, cut=cut)
    assert error(got, want) < 1.5 * error(usual, want) + 2e-3
    assert eps


@pytest.mark.parametrize("cut", [(32, 4, 0, 64), (32, 4, 3, 2)])
def test_attention_by_a_cut(cut: tuple[int, ...]) -> None:
    given = attention_problem([1, 64, 65, 700, 17], 16, 8, 128, 16, True, BF16, "cuda")
    pages = given[5].clone()
    usual = FusedDecodePlan(5, 16, 8, 128, torch.device("cuda"))
    want = rope_attend(*given, usual.handle)
    plan = FusedDecodePlan(5, 16, 8, 128, torch.device("cuda"), cut)
    for _ in range(3):
        got = rope_attend(*given[:5], pages, *given[6:], plan.handle)
        torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)
        assert not plan.counts.any()
    torch.testing.assert_close(pages.float(), given[5].float(), atol=2e-2, rtol=2e-2)


def test_kernels_refuse_cuts_that_do_not_fit() -> None:
    x, weight, gain, *_ = linear_problem(8, 1024, 1024, False, True, False, BF16, "cuda")
    for cut in ((16, 4), (3, 4, 64), (16, 4, 512), (16, 4, 48), (1 << 20, 4, 64)):
        with pytest.raises(CutError):
            norm_linear(x, weight, gain=gain, eps=1e-6, cut=cut)
    x, weight, _, _, residual, eps, _ = linear_problem(24, 1024, 1024, False, False, True, BF16, "cuda")
    assert residual is not None
    for cut in ((32, 64, 128), (48, 64, 128, 3, 1, 4), (32, 64, 128, 3, 3, 4), (128, 128, 256, 6, 1, 4)):
        with pytest.raises(CutError):
            linear_add_norm(x, weight, None, residual, residual[0], eps, cut=cut)
        with pytest.raises(CutError):
            norm_linear(x, weight, cut=cut)
    with pytest.raises(CutError):
        FusedDecodePlan(5, 16, 8, 128, torch.device("cuda"), (64, 4, 12, 1))
