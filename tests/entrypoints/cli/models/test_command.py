"""`nanovllm models`: what is said of the architectures is what the code does, and what docs/reference/models.md shows."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import nanovllm as nv
from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cli.models.command import markdown
from nanovllm.entrypoints.cli.models.features import features
from nanovllm.entrypoints.cli.models.listing import lines_of_code, listed, shared_lines, usual_config
from nanovllm.loading.load_model import load_model
from nanovllm.models.fast import cpu, fused
from nanovllm.models.fast.path import against, fast_path
from nanovllm.models.init_params import without_memory
from nanovllm.models.registry import REGISTRY
from nanovllm.ops.cpu.build import library
from nanovllm.testing.models import random_model, save_hf_folder, tiny_config

ROOT = Path(__file__).parents[4]
SOURCE = '''\
"""A docstring
of two lines."""

# A comment.
A = """text

of three lines"""  # counted


def f(x):  # with a comment
    """What it does."""

    return (
        # not counted
        x
    )
'''


def test_lines_of_code_are_neither_empty_nor_comment_nor_docstring() -> None:
    assert lines_of_code(SOURCE) == 3 + 1 + 3
    assert lines_of_code("") == lines_of_code('"""Alone."""\n') == 0


@pytest.mark.parametrize("architecture", REGISTRY)
def test_what_is_listed_is_what_runs(architecture: str) -> None:
    found, config = listed(architecture), usual_config(architecture)
    assert found.architecture == config.architecture == architecture and found.known and found.about
    file = ROOT / "src/nanovllm" / found.file
    assert lines_of_code(file.read_text()) == found.lines > 0
    model = random_model(config)
    assert found.cpu == cpu.unknown(model.params, config)
    if library(cpu.SOURCE, cpu.SYMBOLS) is not None:
        assert (fast_path(model.params, config) is not None) == (found.cpu == "")
    assert found.gpu == fused.unknown(random_model(config, dtype="bfloat16").params, config)
    state, one = nv.prefill(model, nv.init_state(model, num_pages=8), [1, 2, 3])
    state, two = nv.prefill(model, state, [4, 5])
    with nullcontext() if found.composes else pytest.raises(nv.InvalidRequestError, match="positions"):
        nv.compose(model, state, [one, two])


@pytest.mark.parametrize("architecture", REGISTRY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_without_memory_tell_what_weights_tell(architecture: str, dtype: torch.dtype) -> None:
    config = tiny_config(architecture)
    params, empty = random_model(config, dtype=dtype).params, without_memory(config, dtype)
    for unknown in (cpu.unknown, fused.unknown):
        assert unknown(params, config) == unknown(empty, config)
    where = torch.device("cpu")
    assert (against(empty, config, where, dtype) == "") == (fast_path(params, config) is not None)
    assert (dtype == torch.float16) <= bool(against(empty, config, where, dtype))


def test_what_is_special_is_named() -> None:
    assert "sliding windows of 8 tokens in all layers" in features(tiny_config("MistralForCausalLM"))
    assert "2 of 6 experts per token in 1 of 2 layers" in features(tiny_config("Qwen3MoeForCausalLM"))
    windows, weights = "sliding windows of 8 tokens in 1 of 2 layers", "norm weights stored minus 1"
    assert {windows, "a soft cap on scores", "a soft cap on logits", weights} <= set(features(tiny_config("Gemma2ForCausalLM")))
    assert {"learned positions", "layer norms with biases", "an MLP without a gate", "matrices stored transposed"} <= set(
        features(tiny_config("GPT2LMHeadModel"))
    )
    assert features(tiny_config("LlamaForCausalLM")) == ()
    biased = tiny_config("LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    assert features(biased) == ("biases of q, k, v and attention's output and the MLP",)


def test_the_table_and_its_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    out = capsys.readouterr().out
    for architecture in REGISTRY:
        assert f"\n{architecture} " in out
    assert "through the transformers fallback" in out and str(shared_lines()) in out
    assert max(map(len, out.splitlines())) <= 180
    assert cli.main(["models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["architecture"] for each in found["architectures"]] == list(REGISTRY)


def test_the_reference_has_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--markdown"]) == 0
    shown = capsys.readouterr().out
    assert shown == markdown([listed(name) for name in REGISTRY]) + "\n"
    assert shown in (ROOT / "docs/reference/models.md").read_text(encoding="utf-8")


def cache_folder(cache: Path, name: str) -> Path:
    return cache / f"models--{name.replace('/', '--')}" / "snapshots" / ("0" * 40)


def test_cached_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert cli.main(["models", "--cached"]) == 0
    assert "No model was found" in capsys.readouterr().out
    for name in ("org/whole", "org/pickled", "org/code", "org/other"):
        save_hf_folder(cache_folder(tmp_path, name), tiny_config("LlamaForCausalLM"))
    pickled, code, other = (cache_folder(tmp_path, name) for name in ("org/pickled", "org/code", "org/other"))
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    for folder, changes in ((code, {"auto_map": {"AutoConfig": "a.B"}}), (other, {})):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": ["OtherForCausalLM"], **changes}))
    (tmp_path / "models--org--none").mkdir()
    (tmp_path / "models--org--dataset/snapshots/1").mkdir(parents=True)
    assert cli.main(["models", "--cached", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["cached"]}
    assert set(found) == {"org/whole", "org/pickled", "org/code", "org/other", "org/none"}
    assert found["org/whole"]["against"] == found["org/other"]["against"] == ""
    assert found["org/whole"]["built_in"] and not found["org/other"]["built_in"]
    assert found["org/whole"]["size"] > (cache_folder(tmp_path, "org/whole") / "model.safetensors").stat().st_size
    assert "pickle" in found["org/pickled"]["against"] and "own code" in found["org/code"]["against"]
    assert "no refs/main" in found["org/none"]["against"]
    assert cli.main(["models", "--cached"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["repository", "architecture", "on", "disk", "runs"] and len(lines) == 6
    assert load_model("org/whole", "cpu").name == "org/whole"
