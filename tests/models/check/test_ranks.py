"""Ranks that share a model compare its layers together: they find what one rank finds, and all find the same."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import nanovllm as nv
from nanovllm.config import Mesh
from nanovllm.models.check import examine as examining
from nanovllm.models.check.examine import choose, examined
from nanovllm.models.check.report import CheckReport
from nanovllm.models.common.params import Params
from nanovllm.models.fast.path import FastPath
from nanovllm.ops.distributed.in_process import run_ranks
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.types import Tensor

SPEC = random_model(tiny_config()).spec


def plain_path(params: object, config: nv.ModelConfig, cuts: object = None) -> FastPath:
    """A fast path whose layers are the plain ones."""
    return FastPath(name="double", layer=SPEC.layer, head=SPEC.head, plan=lambda _: None)


@pytest.mark.parametrize("size", [2, 4])
def test_the_report_is_that_of_one_rank(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "fast_path", plain_path)
    config = replace(tiny_config(vocab_size=131), num_kv_heads=2)  # it is no multiple of 4, and 4 ranks share 2 KV heads

    def run(mesh: Mesh | None) -> tuple[CheckReport, torch.Tensor]:
        model = random_model(config, dtype="float32", mesh=mesh)
        report, compared = examined(model, 24)
        return report, compared.final

    alone, final = run(None)
    for report, own in run_ranks(run, size):
        torch.testing.assert_close(own, final, rtol=1e-10, atol=1e-10)
        assert report.agreement == replace(alone.agreement, apart=report.agreement.apart) and not report.fallen
        assert report.head.plain == pytest.approx(alone.head.plain, rel=0.5) and report.head.fast == report.head.plain
        for mine, theirs in zip(report.layers, alone.layers, strict=True):
            assert mine.plain.output < 3 * theirs.plain.output + 1e-6 and mine.plain.kv < 3 * theirs.plain.kv + 1e-6
            assert mine.fast == mine.plain


def test_a_layer_that_is_wrong_on_one_rank_falls_back_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(params: Params[Tensor], config: nv.ModelConfig, cuts: object = None) -> FastPath:
        def run(w: Any, x: Tensor, pages: Tensor, *rest: Any) -> Tensor:
            out = SPEC.layer(w, x, pages, *rest)
            if config.mesh is not None and config.mesh.rank and w is params.layers[1]:
                pages *= 1.01
            return out

        return replace(plain_path(params, config), layer=run)

    monkeypatch.setattr(examining, "fast_path", wrong)

    def run(mesh: Mesh) -> tuple[bool, ...]:
        choice, told = choose(random_model(tiny_config(), dtype="float32", mesh=mesh), 16)
        assert choice is not None and "layer 1" in told
        return choice.layers

    assert run_ranks(run, 2) == [(True, False), (True, False)]


def test_an_engine_of_ranks_checks_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "fast_path", plain_path)

    def run(mesh: Mesh | None) -> list[int]:
        llm = nv.LLM(random_model(tiny_config(), dtype="float64", mesh=mesh), num_pages=16, check=True)
        return llm.generate([[5, 6, 7]], nv.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))[0].token_ids

    assert run_ranks(run, 2) == [run(None)] * 2
