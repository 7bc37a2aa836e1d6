"""`nanovllm quantize` writes what `load_model` would round, and what transformers reads; what it cannot write it refuses whole."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

import nanovllm as nv
from nanovllm.config import MoEConfig
from nanovllm.entrypoints.cli.main import main
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.loading import shards
from nanovllm.loading.quantised_copy import SCHEMES, Format, packed_words, write_quantised
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.testing.models import save_hf_folder, tiny_config
from tests.loading.quantisation.encoders import ENCODERS
from tests.loading.quantisation.test_formats import as_on_a_gpu, folders

FORMATS: tuple[Format, ...] = ("fp8", "int8", "w4a16")
SIZES: dict[str, Any] = {
    "hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "intermediate_size": 256, "vocab_size": 96
}  # fmt: skip


def load(folder: Path, **how: Any) -> nv.Model:
    return nv.load_model(folder, "cpu", "float32", tokenizer=False, **how)


def require_same(one: nv.Model, other: nv.Model) -> None:
    """The same parameters bit by bit."""
    mine, theirs = (pytree.tree_flatten(model.params) for model in (one, other))
    assert mine[1] == theirs[1]
    for a, b in zip(mine[0], theirs[0], strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Ernie4_5ForCausalLM", "Phi3ForCausalLM"])
def test_the_copy_holds_what_loading_would_round(architecture: str, form: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moe = {"moe": MoEConfig(num_experts=4, top_k=2, intermediate_size=128, layers=(1,))} if "Moe" in architecture else {}
    folder = save_hf_folder(tmp_path / "plain", tiny_config(architecture, **SIZES, **moe))
    monkeypatch.setattr(shards, "SHARD", 100_000)
    made = write_quantised(folder, tmp_path / "made" / "copy", form)
    copy, rounded = load(tmp_path / "made" / "copy"), load(folder, quantization=SCHEMES[form].kind)
    require_same(copy, rounded)
    files = sorted(file.name for file in (tmp_path / "made" / "copy").glob("*.safetensors"))
    assert files == [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)] and len(files) > 1
    assert (tmp_path / "made" / "copy" / "model.safetensors.index.json").is_file()
    assert made.matrices > 0 and made.after < made.before
    assert os.listdir(tmp_path / "made") == ["copy"]
    kinds = {
        leaf.kind
        for leaf in pytree.tree_leaves(copy.params, is_leaf=lambda x: isinstance(x, QuantisedMatrix))
        if isinstance(leaf, QuantisedMatrix)
    }
    assert kinds == {SCHEMES[form].kind}


@pytest.mark.parametrize("form", FORMATS)
def test_a_gpu_writes_the_same_copy(form: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_hf_folder(tmp_path / "plain", tiny_config(**SIZES))
    write_quantised(folder, tmp_path / "here", form)
    as_on_a_gpu(monkeypatch)
    write_quantised(folder, tmp_path / "there", form)
    here, there = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("here", "there"))
    assert here == there


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_transformers_reads_the_copy(form: Format, sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the quantisation of activations, which nanovllm leaves out, its logits are the same."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    if sharded:
        monkeypatch.setattr(shards, "SHARD", 100_000)
    folder = save_hf_folder(tmp_path / "plain", tiny_config(**SIZES))
    write_quantised(folder, tmp_path / "copy", form)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype=torch.float32).eval()
    schemes = [scheme for module in theirs.modules() if (scheme := getattr(module, "quantization_scheme", None)) is not None]
    assert len(schemes) == 7 * theirs.config.num_hidden_layers
    for scheme in schemes:
        scheme.input_activations = None
    prompt = torch.randint(0, 96, (24,))
    with torch.no_grad():
        want = theirs(prompt[None]).logits[0].log_softmax(-1)
    model = load(tmp_path / "copy")
    _, (score,) = nv.score(model, nv.init_state(model, num_pages=8), [prompt[:1].tolist()], [prompt[1:].tolist()])
    mine = torch.tensor([each.logprob for each in score.entries])
    torch.testing.assert_close(mine, want[:-1].gather(1, prompt[1:, None])[:, 0], rtol=1e-4, atol=1e-4)
    plain = load(folder)
    _, (other,) = nv.score(plain, nv.init_state(plain, num_pages=8), [prompt[:1].tolist()], [prompt[1:].tolist()])
    assert (torch.tensor([each.logprob for each in other.entries]) - mine).abs().max() > 1e-3, "quantised weights are others"


def test_words_are_packed_as_the_format_says() -> None:
    codes = np.random.default_rng(0).integers(-8, 8, (5, 64))
    want = np.zeros((5, 8), np.uint32)
    for place in range(64):
        want[:, place // 8] |= (codes[:, place] + 8).astype(np.uint32) << np.uint32(4 * (place % 8))
    got = packed_words(torch.from_numpy(codes.astype(np.int8)))
    assert got.dtype == torch.int32 and (got.numpy().view(np.uint32) == want).all()


def test_activations_are_named_for_engines_that_quantise_them(tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path / "plain", tiny_config(**SIZES))
    found = {}
    for form in FORMATS:
        write_quantised(folder, tmp_path / form, form)
        config = json.loads((tmp_path / form / "config.json").read_text())["quantization_config"]
        group = config["config_groups"]["group_0"]
        given = group["input_activations"]
        found[form] = (config["format"], group["weights"]["strategy"], given and (given["type"], given["num_bits"], given["strategy"]))
        assert "lm_head" in config["ignore"] and "model.embed_tokens" in config["ignore"]
    assert found == {
        "fp8": ("float-quantized", "channel", ("float", 8, "token")),
        "int8": ("int-quantized", "channel", ("int", 8, "token")),
        "w4a16": ("pack-quantized", "group", None),
    }


def test_a_matrix_without_whole_groups_stays_as_it_is(tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path / "plain", tiny_config(**{**SIZES, "intermediate_size": 200}))
    made = write_quantised(folder, tmp_path / "copy", "w4a16")
    assert "model.layers.0.mlp.down_proj" in made.kept and "model.layers.0.mlp.up_proj" not in made.kept
    layer = load(tmp_path / "copy").params.layers[0]
    assert isinstance(layer.down, torch.Tensor) and isinstance(layer.gate_up, QuantisedMatrix)
    torch.testing.assert_close(layer.down, load(folder).params.layers[0].down, rtol=0, atol=0)


def test_the_report_says_why_matrices_are_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_hf_folder(tmp_path / "plain", tiny_config(**{**SIZES, "intermediate_size": 200}))
    assert main(["quantize", str(folder), str(tmp_path / "copy"), "--format", "w4a16", "--device", "cpu"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "as before, because their widths are no multiples of 128: model.layers.0.mlp.down_proj" in said
    assert "; as before: lm_head, model.embed_tokens" in said


def test_a_format_that_fits_no_matrix_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {**SIZES, "hidden_size": 96, "num_heads": 3, "num_kv_heads": 1, "intermediate_size": 200}
    folder, out = save_hf_folder(tmp_path / "odd", tiny_config(**sizes)), tmp_path / "made" / "copy"
    assert main(["quantize", str(folder), str(out), "--format", "w4a16", "--device", "cpu"]) == 2
    message = "no matrix has a width that is a multiple of 128, which w4a16 needs: use fp8 or int8"
    assert message in " ".join(capsys.readouterr().err.split()) and not out.parent.exists()
    assert main(["quantize", str(folder), str(out), "--format", "int8", "--device", "cpu"]) == 0


def test_other_files_are_copied_and_other_weights_are_not(tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path / "plain", tiny_config(**SIZES))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "original").mkdir()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    write_quantised(folder, tmp_path / "copy", "int8")
    names = set(os.listdir(tmp_path / "copy"))
    assert {"chat_template.jinja", "config.json", "tokenizer.json", "model.safetensors"} <= names
    assert not names & {"pytorch_model.bin", "original", "model.safetensors.index.json"}
    assert (tmp_path / "copy" / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert all((tmp_path / "copy" / name).stat().st_mode & 0o044 for name in names)


@pytest.mark.parametrize("metadata", ["", "---\nlicense: mit\n---\n", "---\r\nlicense: mit\r\n---\r\n"])
def test_the_model_card_says_what_made_the_copy(metadata: str, tmp_path: Path) -> None:
    folder, card = save_hf_folder(tmp_path / "plain", tiny_config(**SIZES)), "# A model\n\n---\nIts weights are in bfloat16.\n"
    (folder / "README.md").write_bytes(f"{metadata}{card}".encode())
    write_quantised(folder, tmp_path / "copy", "fp8")
    note = "> `nanovllm quantize --format fp8` made this copy, without calibration. What follows describes the unquantised original.\n\n"
    assert (tmp_path / "copy" / "README.md").read_bytes() == f"{metadata}{note}{card}".encode()
    (folder / "README.md").unlink()
    write_quantised(folder, tmp_path / "another", "fp8")
    assert not (tmp_path / "another" / "README.md").exists()


def broken(folder: Path, how: str) -> None:
    """Change the checkpoint so that it cannot be quantised."""
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    match how:
        case "NaN":
            tensors[name][3, 5] = torch.nan
        case "integers":
            tensors[name] = tensors[name].to(torch.int32)
        case "missing":
            del tensors[name]
        case _:
            raise ValueError(how)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("how", ["NaN", "integers", "missing"])
def test_what_cannot_be_rounded_is_refused_whole(how: str, tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path / "plain", tiny_config(**SIZES))
    broken(folder, how)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        write_quantised(folder, tmp_path / "made" / "copy", "fp8")
    assert not (tmp_path / "made").exists() or os.listdir(tmp_path / "made") == []


@pytest.mark.usefixtures("untyped")
def test_checkpoints_that_cannot_be_quantised_are_refused(tmp_path: Path) -> None:
    quantised, plain = folders(tmp_path, ENCODERS["gptq"], tiny_config(**SIZES))
    with pytest.raises(CheckpointError, match=r"is quantised already \(gptq\)"):
        write_quantised(quantised, tmp_path / "copy", "fp8")
    with pytest.raises(CheckpointError, match=r"GPT2LMHeadModel stores .* load it with quantization= instead"):
        write_quantised(save_hf_folder(tmp_path / "gpt2", tiny_config("GPT2LMHeadModel")), tmp_path / "copy", "fp8")
    with pytest.raises(InvalidRequestError, match="format='int4' must be one of fp8, int8, w4a16; int4 is called w4a16 here"):
        write_quantised(plain, tmp_path / "copy", "int4")  # pyright: ignore[reportArgumentType]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for there in (tmp_path / "full", tmp_path / "full" / "file"):
        with pytest.raises(InvalidRequestError, match="exists: give the name of a new folder"):
            write_quantised(plain, there, "fp8")
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        write_quantised(plain, tmp_path / "full" / "file" / "below", "fp8")
    assert not (tmp_path / "copy").exists() and os.listdir(tmp_path / "full") == ["file"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = save_hf_folder(tmp_path / "plain", tiny_config(**SIZES)), tmp_path / "copy"
    out.mkdir()  # an empty folder is as good as none
    assert main(["quantize", str(folder), str(out), "--format", "fp8", "--device", "cpu"]) == 0
    assert "matrices in fp8" in capsys.readouterr().err
    assert load(out).quantization == "fp8 with a scale per row (compressed-tensors)"
    assert main(["quantize", str(folder), str(out), "--format", "fp8", "--device", "cpu"]) == 2
    assert f"{out} exists" in capsys.readouterr().err


def test_a_copy_does_not_take_the_name_of_the_packaged_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_hf_folder(tmp_path / "plain", tiny_config(**SIZES))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["quantize", str(folder), "tiny", "--format", "fp8", "--device", "cpu"]) == 2
    assert "tiny would hide the packaged model, which has this name: choose another name" in capsys.readouterr().err
    assert os.listdir(".") == []
    assert main(["quantize", str(folder), "sub/tiny", "--format", "fp8", "--device", "cpu"]) == 0


def test_the_word_of_another_command_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["quantize", "tiny", "copy", "--format", "int4"])
    assert "argument --format: int4 is called w4a16 here: give w4a16" in capsys.readouterr().err


def test_a_command_that_is_ended_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_hf_folder(tmp_path / "plain", tiny_config(**SIZES))
    (tmp_path / "made").mkdir()
    monkeypatch.setattr(shutil, "copyfile", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        main(["quantize", str(folder), str(tmp_path / "made" / "copy"), "--format", "fp8", "--device", "cpu"])
    assert ended.value.code == 128 + signal.SIGTERM and os.listdir(tmp_path / "made") == []


def test_permissions_are_those_of_new_files(tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path / "plain", tiny_config(**SIZES))
    before = os.umask(0o077)
    try:
        write_quantised(folder, tmp_path / "copy", "fp8")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "copy").iterdir()} == {0o600}
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o700


def test_a_link_or_the_current_folder_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, here = save_hf_folder(tmp_path / "plain", tiny_config(**SIZES)), tmp_path / "here"
    here.mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    monkeypatch.chdir(here)
    for out in (Path("."), here, tmp_path / "link"):
        with pytest.raises(InvalidRequestError, match="exists: give the name of a new folder"):
            write_quantised(folder, out, "fp8")
    assert os.listdir(here) == []
