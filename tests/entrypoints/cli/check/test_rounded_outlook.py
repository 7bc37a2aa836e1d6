"""The outlook of a model that is rounded while it is loaded: its bytes, its kernels, and what is not possible."""

from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

import nanovllm as nv
from nanovllm.config import ModelConfig
from nanovllm.entrypoints.cli.bench import model_shapes
from nanovllm.entrypoints.cli.bench.model_shapes import random_weights
from nanovllm.entrypoints.cli.check.preflight import outlook
from nanovllm.entrypoints.cli.check.preflight_text import text
from nanovllm.entrypoints.cli.main import main
from nanovllm.errors import InvalidRequestError
from nanovllm.loading.quantised_copy import write_quantised
from nanovllm.ops.linear.quantise import KINDS, Kind
from nanovllm.testing.models import save_hf_folder, tiny_config

CPU = torch.device("cpu")
SHAPES: dict[str, ModelConfig] = {
    "dense": tiny_config("Qwen3ForCausalLM"),
    "tied": tiny_config("Qwen3ForCausalLM", tie_word_embeddings=True),
    "experts": tiny_config("Qwen3MoeForCausalLM"),
}


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("name", SHAPES)
def test_the_bytes_are_those_of_the_rounded_weights(name: str, kind: Kind | None, head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_shapes, "SHAPES", SHAPES)
    how = {"quantization": kind, "quantize_head": head and kind is not None}
    model = random_weights(name, device=CPU, dtype="bfloat16", **how)
    found = outlook(name, CPU, "bfloat16", shapes=SHAPES, **how)
    assert found.weights is not None and found.kernels is not None
    assert found.weights.held == sum(leaf.nbytes for leaf in pytree.tree_leaves(model.params) if leaf is not None)
    assert found.weights.quantization == model.quantization and bool(model.quantization) == (kind is not None)
    assert (f" here in bfloat16, matrices in {model.quantization}" if kind else "here in bfloat16;") in " ".join(text(found).split())
    assert found.kernels.against == ("experts" if name == "experts" else found.kernels.against)


def test_a_copy_in_w4a16_is_said_to_be_int4(tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path / "plain", tiny_config(hidden_size=128, intermediate_size=128, head_dim=32))
    write_quantised(folder, tmp_path / "copy", "w4a16")
    for name in ("plain", "copy"):
        found = outlook(str(tmp_path / name), CPU, None, shapes=SHAPES)
        assert found.weights is not None and found.weights.quantization == nv.load_model(tmp_path / name, "cpu").quantization
    assert "matrices in int4 in groups of 128 (compressed-tensors)" in " ".join(text(found).split())


def test_a_quantised_checkpoint_is_not_rounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, copy = save_hf_folder(tmp_path / "plain", tiny_config()), str(tmp_path / "copy")
    write_quantised(folder, Path(copy), "int8")
    said = set[str]()
    for words in (["check", copy], ["check", copy, "--dry-run"], ["generate", "--model", copy, "x"]):
        assert main([*words, "--device", "cpu", "--quantization", "int8"]) == 2
        said.add(capsys.readouterr().err)
    why = "--quantization int8, but the checkpoint is quantised already (compressed-tensors): leave it out"
    assert said == {f"nanovllm: error: {why}\n"}


def test_an_impossible_rounding_is_refused(untyped: None) -> None:
    with pytest.raises(InvalidRequestError, match="quantize_head=True needs quantization"):
        outlook("dense", CPU, None, shapes=SHAPES, quantize_head=True)
    with pytest.raises(InvalidRequestError, match="int2"):
        outlook("dense", CPU, None, shapes=SHAPES, quantization="int2")  # pyright: ignore[reportArgumentType]
