"""The fused decode kernels beside the plain layers on a GPU: extreme weights keep the bound, a wrong layer is found and falls back."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import nanovllm as nv
from nanovllm import models
from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cli.check.report_text import table
from nanovllm.executor import build_executor
from nanovllm.executor.graph_executor import GraphExecutor
from nanovllm.models.check.examine import ROWS, choose, examine
from nanovllm.models.fast import fused
from nanovllm.models.fast.choice import FastChoice, all_fast
from nanovllm.ops.attention.fused_plan import FusedDecodePlan
from nanovllm.ops.attention.rope_attend import rope_attend
from nanovllm.testing.problems import attention_problem
from tests.gpu.small import random_prompts, require_same, small_model

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # FlashInfer and its needs may warn
LIMITS: dict[str, Any] = {"num_pages": 256, "page_size": 16, "max_num_seqs": 20, "max_num_batched_tokens": 64, "max_model_len": 256}
GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
LAYER, MANY, HEAD = fused.decode_layer, fused.wide_layer, fused.head


def extreme(model: nv.Model) -> nv.Model:
    """The model with a few gains of 96.5 in every k_norm, or in every input_norm where heads have no norm."""

    def with_gain(w: models.Layer[Tensor]) -> models.Layer[Tensor]:
        name = "input_norm" if w.k_norm is None else "k_norm"
        gain = getattr(w, name).clone()
        gain[::37] = 96.5
        return replace(w, **{name: gain})

    return replace(model, params=replace(model.params, layers=tuple(map(with_gain, model.params.layers))))


def forgets_q_norm(w: Any, x: Tensor, *rest: Any) -> Tensor:
    return LAYER(replace(w, q_norm=torch.full_like(w.q_norm, 3.0)), x, *rest)


def rounds_its_weights(w: Any, x: Tensor, *rest: Any) -> Tensor:
    return LAYER(replace(w, qkv=w.qkv.to(torch.float8_e4m3fn).to(w.qkv.dtype)), x, *rest)


def writes_no_key(w: Any, x: Tensor, pages: Tensor, *rest: Any) -> Tensor:
    return LAYER(w, x, pages.clone(), *rest)


def sees_no_new_token(w: Any, x: Tensor, pages: Tensor, index: int, cos: Tensor, sin: Tensor, batch: nv.Batch, config: Any) -> Tensor:
    return LAYER(w, x, pages, index, cos, sin, replace(batch, seq_lens=(batch.seq_lens - 1).clamp(min=1)), config)


def is_no_number(w: Any, x: Tensor, *rest: Any) -> Tensor:
    return LAYER(w, x, *rest) * torch.nan


def planted(model: nv.Model, fault: Callable[..., Tensor], *indices: int) -> Callable[..., Tensor]:
    """The fused layer, wrong in the layers named."""
    wrong = [model.params.layers[index] for index in indices]

    def layer(w: Any, *rest: Any) -> Tensor:
        return (fault if any(w is each for each in wrong) else LAYER)(w, *rest)

    return layer


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"]
)
@pytest.mark.parametrize("seed", range(2))
def test_the_kernels_keep_the_bound_on_random_and_extreme_weights(architecture: str, dtype: str, seed: int) -> None:
    model = small_model(architecture, seed, dtype)
    for one in (model, extreme(model)):
        report = examine(one, 130)
        assert (report.fast, report.rows, report.fallen) == ("fused", ROWS, ()), table(report)
        assert report.agreement is not None and report.agreement.num_tokens == 130
        if one is model:
            assert report.agreement.both >= 117, table(report)


@pytest.mark.parametrize("page_size", [1, 8, 32])
def test_pages_of_other_sizes(page_size: int) -> None:
    report = examine(small_model(), 70, page_size=page_size)
    assert report.fast == "fused" and report.fallen == (), table(report)


@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads", "head_dim"), [([300], 16, 8, 128), ([1, 64, 65, 700, 17], 16, 8, 128), ([130, 9, 40], 6, 2, 96)]
)
def test_attention_under_extreme_gains(lens: list[int], heads: int, kv_heads: int, head_dim: int) -> None:
    """Keys 96.5 times as large in some channels, the old ones too; beside float64, and beside the same steps in bfloat16."""
    given = list(attention_problem(lens, heads, kv_heads, head_dim, 16, True, torch.bfloat16, "cuda"))
    given[2][::37] = 96.5
    given[5][:, :, 0, :, :, ::37] *= 96.5

    def on_cpu(dtype: torch.dtype) -> list[Any]:
        half = [t.to("cpu", dtype, copy=True) if isinstance(t, Tensor) and t.dtype == torch.bfloat16 else t for t in given]
        return [t.cpu() if isinstance(t, Tensor) else t for t in half]

    plain, exact = on_cpu(torch.bfloat16), on_cpu(torch.float64)
    theirs, want = rope_attend(*plain, 0), rope_attend(*exact, 0)
    plan = FusedDecodePlan(len(lens), heads, kv_heads, head_dim, torch.device("cuda"))
    got = rope_attend(*given, plan.handle)

    def error(values: Tensor, truth: Tensor) -> float:
        return float((values.cpu().double() - truth).abs().max() / truth.abs().max())

    for row in range(len(lens)):
        assert error(got[row], want[row]) < 1.5 * error(theirs[row], want[row]) + 1e-2
    assert error(given[5][1], exact[5][1]) < 1.5 * error(plain[5][1], exact[5][1]) + 2e-3


@pytest.mark.parametrize("fault", [forgets_q_norm, rounds_its_weights, writes_no_key, sees_no_new_token, is_no_number])
def test_a_wrong_layer_is_found(fault: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    assert choose(model, 16) == (all_fast(model.config), "")
    monkeypatch.setattr(fused, "decode_layer", planted(model, fault, 2))
    choice, said = choose(model, 16)
    assert choice == FastChoice(layers=(True, True, False, True))
    assert "the path fused has a relative error of" in said and said.endswith("layer 2 will run in plain torch, slower")


def many_rows_wrong(model: nv.Model, *indices: int) -> Callable[..., Any]:
    """The fused layer for many rows, with other gains in the middle of the layers named."""
    wrong = [model.params.layers[index] for index in indices]

    def layer(w: Any, *rest: Any, **options: Any) -> Any:
        return MANY(replace(w, post_norm=w.post_norm * 1.5) if any(w is each for each in wrong) else w, *rest, **options)

    return layer


def test_a_wrong_layer_for_many_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    monkeypatch.setattr(fused, "wide_layer", many_rows_wrong(model, 0, 3))
    assert choose(model, 16)[0] == FastChoice(layers=(False, True, True, False))


def test_a_wrong_head_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "head", lambda *given: HEAD(*given) * 1.1)
    model = small_model()
    assert choose(model, 16)[0] == FastChoice(layers=(True,) * 4, head=False)


def test_what_the_kernels_do_not_serve_is_not_looked_at() -> None:
    assert choose(small_model(dtype="float32"), 16) == (None, "")


def test_looking_gives_its_memory_back() -> None:
    model = small_model()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    choose(model, 16)  # the libraries' own workspaces stay
    choose(model, 16)
    assert free - torch.cuda.mem_get_info()[0] < 256 << 20


@pytest.mark.parametrize("indices", [(2,), (0, 1, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("num_rows", [1, 6, 18])
def test_wrong_layers_fall_back_in_an_engine(indices: tuple[int, ...], num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of few rows and of many, whose layers are fused or not one by one."""
    model = small_model()
    contexts = random_prompts(model, *range(5, 5 + 7 * num_rows, 7))
    eager, want = nv.generate_many(model, nv.init_state(model, compile=False, **LIMITS), contexts, GREEDY)
    nv.check(eager)
    monkeypatch.setattr(fused, "decode_layer", planted(model, is_no_number, *indices))
    monkeypatch.setattr(fused, "wide_layer", many_rows_wrong(model, *indices))
    with pytest.warns(UserWarning, match="will run in plain torch, slower"):
        state = nv.init_state(model, **LIMITS)
    executor = state.runtime.executor
    assert isinstance(executor, GraphExecutor) and executor._decode.way() == "planned"
    state, got = nv.generate_many(model, state, contexts, GREEDY)
    nv.check(state)
    for prompt, mine, theirs in zip(contexts, got, want, strict=True):
        require_same(model, prompt, mine.token_ids, theirs.token_ids, LIMITS)


def test_a_wrong_head_falls_back_in_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    contexts = random_prompts(model, 5, 20)
    _, want = nv.generate_many(model, nv.init_state(model, compile=False, **LIMITS), contexts, GREEDY)
    monkeypatch.setattr(fused, "head", lambda *given: HEAD(*given) * torch.nan)
    with pytest.warns(UserWarning, match="the head will run in plain torch, slower"):
        state = nv.init_state(model, **LIMITS)
    executor = state.runtime.executor
    assert isinstance(executor, GraphExecutor) and executor._decode.way() == "fused"
    _, got = nv.generate_many(model, state, contexts, GREEDY)
    for prompt, mine, theirs in zip(contexts, got, want, strict=True):
        require_same(model, prompt, mine.token_ids, theirs.token_ids, LIMITS)


def test_an_engine_over_extreme_weights_stays_fused(recwarn: pytest.WarningsRecorder) -> None:
    state = nv.init_state(extreme(small_model()), **LIMITS)
    executor = state.runtime.executor
    assert isinstance(executor, GraphExecutor) and executor._decode.way() == "fused"
    assert not [each for each in recwarn if "plain torch" in str(each.message)]


def test_unchecked_kernels_are_used_as_they_are(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    model = small_model()
    monkeypatch.setattr(fused, "decode_layer", planted(model, is_no_number, 1))
    state = nv.init_state(model, check=False, **LIMITS)
    executor = state.runtime.executor
    assert isinstance(executor, GraphExecutor) and executor._decode.way() == "fused"
    assert not [each for each in recwarn if "plain torch" in str(each.message)]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "tiny", "--device", "cuda", "--tokens", "64"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tiny, Qwen3ForCausalLM, bfloat16") and "decode steps run on the path fused" in out


def test_a_start_takes_the_record_of_a_passed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that change, and `check=True`, are compared again."""
    model, looked = small_model(), []

    def counted(*given: Any) -> Any:
        looked.append(given)
        return choose(*given)

    monkeypatch.setattr(build_executor, "choose", counted)

    def looks(model: nv.Model, **options: Any) -> int:
        looked.clear()
        nv.init_state(model, **LIMITS, **options)
        return len(looked)

    assert looks(model) >= 1  # once more where a first start compiles kernels
    assert looks(model) == 0
    assert looks(model, check=True) == 1
    assert looks(extreme(model)) >= 1
    assert looks(extreme(model)) == 0
