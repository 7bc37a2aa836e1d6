"""What quantised weights cost: the figures against a computation by hand, and what cannot be compared."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

import nanovllm as nv
from nanovllm.entrypoints.cli.check.cost_text import cost_text
from nanovllm.entrypoints.cli.main import main
from nanovllm.errors import InvalidRequestError
from nanovllm.loading.quantised_copy import write_quantised
from nanovllm.models.check import cost as module
from nanovllm.models.check.cost import cost
from nanovllm.models.check.sample_text import sample_tokens
from nanovllm.ops.linear.quantise import Kind, quantise
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.testing.models import random_model, save_hf_folder, tiny_config

CONFIG = tiny_config(num_layers=3, hidden_size=64, head_dim=16, intermediate_size=96, vocab_size=300)
MODEL = random_model(CONFIG)
TEXT = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def rounded(model: nv.Model, kind: Kind, *places: int) -> nv.Model:
    """The model with the matrices of these layers quantised; of all without places."""
    params = model.params
    layers = [
        replace(w, **{name: quantise(getattr(w, name), kind) for name in ("qkv", "o", "gate_up", "down")})
        if not places or place in places
        else w
        for place, w in enumerate(params.layers)
    ]
    return replace(model, params=replace(params, layers=tuple(layers)), quantization=kind)


def logprobs(model: nv.Model) -> torch.Tensor:
    """The log-probabilities after each token of the text, by the model function in float64."""

    def wide(leaf: object) -> object:
        if isinstance(leaf, QuantisedMatrix):
            return leaf.dequantised(torch.float64)
        return leaf.double() if isinstance(leaf, torch.Tensor) else leaf

    params = pytree.tree_map(wide, model.params, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))
    params = replace(params, inv_freq=model.params.inv_freq)
    logits, _ = nv.forward(params, None, module.text_batch(torch.tensor(TEXT, dtype=torch.int32), 16), model.config)
    return logits.log_softmax(-1)


@pytest.mark.parametrize("rows", [7, 64])
def test_predictions_are_those_of_the_model_function(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", rows)
    other = rounded(MODEL, "int4")
    found, mine, theirs = cost(other, MODEL, TEXT), logprobs(other), logprobs(MODEL)
    divergences = torch.nn.functional.kl_div(mine, theirs, log_target=True, reduction="none").sum(-1)
    assert found.divergence == pytest.approx(float(divergences.mean()), rel=1e-9)
    assert found.worst_divergence == pytest.approx(float(divergences.max()), rel=1e-9)
    assert found.agreement == int((mine.argmax(-1) == theirs.argmax(-1)).sum()) < len(TEXT) == found.num_tokens
    following = torch.tensor(TEXT[1:])[:, None]
    for got, want in ((found.perplexity, mine), (found.reference_perplexity, theirs)):
        assert got == pytest.approx(math.exp(-float(want[:-1].gather(1, following).mean())), rel=1e-6)


def test_only_the_layers_that_changed_have_an_error() -> None:
    found = cost(rounded(MODEL, "int8", 1), MODEL, TEXT)
    assert [error > 0 for error in found.layers] == [False, True, False]
    assert found.bytes < found.reference_bytes and found.divergence > 0


def test_less_bits_cost_more() -> None:
    none, eight, four = cost(MODEL, MODEL, TEXT), cost(rounded(MODEL, "int8"), MODEL, TEXT), cost(rounded(MODEL, "int4"), MODEL, TEXT)
    assert none.layers == (0.0,) * 3 and none.divergence == 0 and none.agreement == len(TEXT)
    assert all(0 < a < b / 5 for a, b in zip(eight.layers, four.layers, strict=True))
    assert 0 < eight.divergence < four.divergence


def test_the_text_names_both_models() -> None:
    shown = cost_text(cost(rounded(MODEL, "fp8"), MODEL, TEXT))
    assert shown.count("%") == 3 and "(fp8, " in shown and f"of {len(TEXT)} places" in shown


def test_perplexities_are_told_of_a_text_that_the_reference_knows() -> None:
    found = replace(cost(rounded(MODEL, "fp8"), MODEL, TEXT), perplexity=12.5, reference_perplexity=299.0)
    assert found.knows_text and cost_text(found).endswith("; perplexity 12.5, was 299")
    for value in (300.0, 36260.0, math.inf, math.nan):
        unknown = replace(found, reference_perplexity=value)
        assert not unknown.knows_text and "worse than chance" in cost_text(unknown) and "12.5" not in cost_text(unknown)
        assert "does not know text of this kind" in cost_text(unknown) and "docs/reference/figures.md" in cost_text(unknown)
    assert "does not know text" not in cost_text(found)
    packaged = nv.load_model("tiny", "cpu")
    assert not cost(packaged, packaged, sample_tokens(packaged, 64)).knows_text
    assert packaged.tokenizer is not None
    assert cost(packaged, packaged, packaged.tokenizer.encode("Once upon a time, there was a little girl named Ada.")).knows_text


def test_what_cannot_be_compared_is_refused() -> None:
    for change in ({"num_layers": 2}, {"vocab_size": 301}, {"intermediate_size": 128}):
        with pytest.raises(InvalidRequestError, match="cannot be compared"):
            cost(random_model(replace(CONFIG, **change)), MODEL, TEXT)
    with pytest.raises(InvalidRequestError, match="a text of 1 tokens is too short"):
        cost(MODEL, MODEL, TEXT[:1])


def test_the_command_compares_with_another_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_hf_folder(tmp_path / "plain", CONFIG)
    write_quantised(folder, tmp_path / "copy", "int8")
    common = ["check", str(tmp_path / "copy"), "--against", str(folder), "--device", "cpu", "--tokens", "20"]
    assert main(common) == 0
    assert "beside plain" in capsys.readouterr().out
    assert main([*common, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["cost"]
    models = [nv.load_model(where, "cpu") for where in (tmp_path / "copy", folder)]
    want = cost(models[0], models[1], sample_tokens(models[0], 20))
    assert told == json.loads(json.dumps(want.as_json()))
    assert main(["check", str(folder), "--quantization", "int8", "--device", "cpu", "--tokens", "20", "--json"]) == 0
    rounded_there = json.loads(capsys.readouterr().out)["cost"]
    assert {**rounded_there, "model": "copy", "quantization": told["quantization"]} == told
    assert main([*common[:3], "tiny", "--device", "cpu"]) == 2
    assert "cannot be compared" in capsys.readouterr().err
    assert main([*common[:3], str(tmp_path / "nowhere"), "--device", "cpu"]) == 2
    told_late, error = capsys.readouterr()
    assert not told_late and "nowhere" in error  # before the report of the model itself


def test_figures_that_are_not_finite_are_null_in_json() -> None:
    layers = tuple(pytree.tree_map(lambda t: t * 0 if isinstance(t, torch.Tensor) else t, w) for w in MODEL.params.layers)
    params = replace(MODEL.params, layers=layers, final_norm=MODEL.params.final_norm * 1000)
    nothing = replace(MODEL, params=params)
    same, other = cost(nothing, nothing, TEXT), cost(MODEL, nothing, TEXT)
    assert same.layers == (0.0,) * 3 and other.layers[0] == math.inf
    assert json.loads(json.dumps(same.as_json(), allow_nan=False))["perplexity"] is None
    assert json.loads(json.dumps(other.as_json(), allow_nan=False))["layers"][0] is None
