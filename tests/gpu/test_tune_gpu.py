"""Tuning on a GPU from end to end, and the kernels by cuts of their own against float64."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nanovllm as nv
from nanovllm import bench, cli
from nanovllm.models.cuts import PARTS
from nanovllm.ops.cuts import CutError
from nanovllm.ops.norm_linear import norm_linear
from nanovllm.ops.rope_attend import FusedDecodePlan, rope_attend
from nanovllm.ops.wide import BY_LIBRARY, linear_add_norm
from nanovllm.testing.fused import attention_problem, linear_problem, wide_norm_linear
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.tune.candidates import default_cut, neighbours, starts
from nanovllm.tune.device import measuring
from nanovllm.tune.file import default_path, key_of, read_cuts
from nanovllm.tune.search import Unfit
from nanovllm.tune.use import cuts_for, machine_of
from nanovllm.tune.work import Work, works

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


def work_of(model: nv.Model, part: str, rows: int) -> Work:
    return next(work for work in works(model.config, rows, machine_of(model)) if work.part == part)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """One run of the command over a small shape, with a cache of its own; the file, and what was printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setitem(bench.SHAPES, "small", CONFIG)
        assert cli.main(["tune", "--model", "small", "--dtype", "bfloat16", "--batches", "2,24"]) == 0
        path = default_path(key_of(small()))
        yield path, json.loads(path.read_text())


def test_a_run_measures_every_kernel_and_writes_the_file(tuned: tuple[Path, dict[str, Any]]) -> None:
    path, document = tuned
    assert path.exists() and document["key"]["gpu"] == torch.cuda.get_device_name()
    assert [(row["part"], row["rows"]) for row in document["measured"]] == [
        (work.part, rows) for rows in (2, 24) for work in works(CONFIG, rows, machine_of(small()))
    ]
    for row in document["measured"]:
        assert 0 < row["chosen_us"] <= row["default_us"] < 1000 and row["measured"] > 1, row
        assert not row["cut"] or row["chosen_us"] <= 0.97 * row["default_us"] + 1e-3, row
    cuts = read_cuts(path, small(), machine_of(small()))
    assert cuts_for(small(), None) == cuts == cuts_for(small(), True)
    assert set(cuts.steps) <= {2, 24}


def test_an_engine_runs_by_the_file(tuned: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """By cuts that are not the defaults in any kernel, whatever the run has chosen; the replies are the same or nearly tied."""
    path, document = tuned
    model = small()
    machine, cuts = machine_of(model), {}
    for rows in (1, 2, 8, 16, 24):
        steps = {}
        for work in works(model.config, rows, machine):
            near = neighbours(work, default_cut(work, machine), machine) or starts(work, machine)
            steps[work.part] = list(near[0])
        cuts[str(rows)] = steps
    other = tmp_path / "cuts.json"
    other.write_text(json.dumps(document | {"cuts": cuts}))
    assert nv.init_state(model, **LIMITS).runtime.cuts == read_cuts(path, model, machine)
    prompts = [[1 + n, 5, 9 + n] for n in range(20)]
    replies = {}
    for tuning in (False, other):
        state = nv.init_state(model, tuning=tuning, **LIMITS)
        assert (state.runtime.cuts is None) == (tuning is False)
        for count in (1, 7, 20):
            state, gens = nv.generate_many(model, state, prompts[:count], GREEDY)
            replies[tuning, count] = [gen.token_ids for gen in gens]
    pairs = [(a, b) for count in (1, 7, 20) for a, b in zip(replies[False, count], replies[other, count], strict=True)]
    assert sum(a[0] == b[0] for a, b in pairs) >= 24 and sum(a == b for a, b in pairs) >= 7, pairs  # of 28


def test_the_file_of_another_gpu_is_refused(tuned: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    _, document = tuned
    other = tmp_path / "cuts.json"
    other.write_text(json.dumps(document | {"key": document["key"] | {"gpu": "another"}}))
    with pytest.raises(nv.TuningFileError, match="another gpu"):
        nv.init_state(small(), tuning=other, **LIMITS)


@pytest.mark.parametrize(("part", "rows"), [(part, rows) for rows in (1, 8, 24) for part in PARTS if part != "head" or rows <= 2])
def test_what_is_tried_computes_the_same(part: str, rows: int) -> None:
    """Measuring refuses what differs from the default: nothing that is tried on this GPU may. Starts and some neighbours."""
    model = small()
    machine, work = machine_of(model), work_of(model, part, rows)
    with measuring(model, work) as measure:
        assert all(us > 0 for us in measure(()))
        for cut in (*starts(work, machine), *neighbours(work, default_cut(work, machine), machine)[:5]):
            try:
                assert all(us > 0 for us in measure(cut))
            except Unfit as left_out:
                assert str(left_out).startswith("no kernel"), (cut, left_out)  # never wrong


def test_a_wrong_kernel_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    plain = norm_linear

    def wrong(*given: Any, cut: Any = (), **options: Any) -> torch.Tensor:
        return plain(*given, cut=cut, **options) * (1.1 if cut else 1.0)

    monkeypatch.setattr("nanovllm.tune.device.norm_linear", wrong)
    work = work_of(model, "qkv", 8)
    with measuring(model, work) as measure:
        measure(())
        with pytest.raises(Unfit, match="wrong by 0"):
            measure(default_cut(work, machine_of(model)))


@pytest.mark.parametrize(("rows", "cut"), [(1, (4, 4, 0)), (2, (16, 4, 64)), (4, (2, 4, 0)), (8, (32, 2, 128)), (16, (16, 8, 32))])
def test_products_of_few_rows_by_a_cut(rows: int, cut: tuple[int, ...]) -> None:
    x, weight, gain, bias, residual, eps, gated = given = linear_problem(rows, 1024, 1024, False, True, True, BF16, "cuda")
    want = wide_norm_linear(*given)
    usual = norm_linear(x, weight, gain=gain, bias=bias, residual=residual, eps=eps, gated=gated)
    got = norm_linear(x, weight, gain=gain, bias=bias, residual=residual, eps=eps, gated=gated, cut=cut)
    assert error(got, want) < 1.5 * error(usual, want) + 2e-3


@pytest.mark.parametrize("cut", [(32, 32, 128, 3, 1, 4), (64, 64, 64, 4, 2, 8), (16, 16, 64, 3, 4, 4), BY_LIBRARY])
@pytest.mark.parametrize("rows", [3, 24, 100])
def test_products_of_many_rows_by_a_cut(rows: int, cut: tuple[int, ...]) -> None:
    x, weight, _, bias, residual, eps, _ = linear_problem(rows, 1024, 2048, False, False, True, BF16, "cuda")
    assert residual is not None
    gain = torch.rand(1024, device="cuda").to(BF16) + 0.5
    want = wide_norm_linear(x, weight, None, bias, residual, eps, False)
    usual, _ = linear_add_norm(x, weight, bias, residual, gain, eps)
    got, _ = linear_add_norm(x, weight, bias, residual, gain, eps, cut=cut)
    assert error(got, want) < 1.5 * error(usual, want) + 2e-3


@pytest.mark.parametrize("cut", [(32, 32, 128, 3, 1, 4), (64, 16, 64, 3, 1, 4), BY_LIBRARY])
def test_a_gated_product_of_few_rows_that_no_tile_fits_takes_a_cut(cut: tuple[int, ...]) -> None:
    """At the width of 8B the default of 8 rows is the library's product, and a kernel for silu."""
    x, weight, _, _, _, eps, _ = given = linear_problem(8, 2048, 4096, True, False, False, BF16, "cuda")
    want = wide_norm_linear(*given)
    usual, got = norm_linear(x, weight, gated=True), norm_linear(x, weight, gated=True, cut=cut)
    assert error(got, want) < 1.5 * error(usual, want) + 2e-3
    assert eps


@pytest.mark.parametrize("cut", [(32, 4, 0, 64), (128, 8, 0, 4), (32, 4, 3, 2), (64, 4, 2, 1)])
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
