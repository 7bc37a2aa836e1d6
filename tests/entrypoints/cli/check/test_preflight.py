"""What `nanovllm check` says before a model is loaded: that it is what loading finds, and that nothing is loaded where it says no."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

import nanovllm as nv
from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES
from nanovllm.entrypoints.cli.check import command, kv_memory, preflight
from nanovllm.entrypoints.cli.check.kernel_choice import kernels
from nanovllm.entrypoints.cli.check.preflight import Outlook
from nanovllm.entrypoints.cli.check.preflight_text import text
from nanovllm.entrypoints.cli.models.features import features
from nanovllm.executor.device_memory import Room
from nanovllm.models.fast.path import fast_path
from nanovllm.models.registry import REGISTRY, fitted
from nanovllm.ops import backends
from nanovllm.ops.backends import FLASHINFER_HEAD_DIMS
from nanovllm.ops.linear.quantised import QuantisedMatrix, gpu_layout
from nanovllm.testing.models import save_hf_folder, tiny_config
from nanovllm.types import dtype_of
from tests.loading.quantisation.encoders import ENCODERS, FP8, Encoder, block_fp8
from tests.loading.quantisation.test_formats import SIZES, folders

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def look(folder: Path | str, dtype: str | None = None, **how: Any) -> Outlook:
    return preflight.outlook(str(folder), CPU, dtype, shapes=SHAPES, **how)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_hf_folder(tmp_path / "model", tiny_config(eos_token_ids=(258,)))


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(command, "loaded", loaded)


def change(folder: Path, **keys: Any) -> None:
    file = folder / "config.json"
    changed = {**json.loads(file.read_text()), **keys}
    file.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))


@pytest.mark.parametrize("architecture", REGISTRY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_said_is_what_loading_finds(architecture: str, dtype: str, tmp_path: Path) -> None:
    config = tiny_config(architecture, eos_token_ids=(258,))
    folder = save_hf_folder(tmp_path / "model", config, dtype="bfloat16", num_shards=2)
    found, model = look(folder, dtype), nv.load_model(folder, "cpu", dtype)
    assert found.problems == () and found.architecture == architecture and found.config is not None
    assert replace(found.config, eos_token_ids=()) == replace(model.config, eos_token_ids=())
    w, m = found.weights, found.memory
    assert w is not None and m is not None and found.kernels is not None and found.texts is not None
    held = [leaf for leaf in pytree.tree_leaves(model.params) if leaf is not None]
    most = max(leaf.nbytes for leaf in held)
    assert w.held == sum(leaf.nbytes for leaf in held) and 32 << 20 <= w.host - w.held <= (32 << 20) + most
    assert w.parameters is not None and w.stored == 2 * w.parameters and w.stored_dtypes == ("BF16",)
    state = nv.init_state(model, num_pages=9, page_size=1)
    pages = sum(math.prod(pool.shape) * pool.itemsize for pool in state.kv.pools)
    assert m.token_bytes == pages // 10 == sum(group.token_bytes for group in m.groups)
    assert sum(group.layers for group in m.groups) == config.num_layers
    assert {group.window for group in m.groups} == set(config.windows or (0,))
    fast = fast_path(model.params, model.config)
    assert found.kernels.decode == ("plain torch" if fast is None else fast.name) and bool(found.kernels.against) == (fast is None)
    assert found.texts.tokens is not None and found.texts.tokens <= config.vocab_size
    assert found.texts.chat_template == "" and found.texts.end_tokens == ((258, "<|im_end|>"),)
    assert text(found).startswith(f"model, {architecture}, {dtype} on ") and text(found).endswith("It will run.")
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["runs"]


def test_the_command_says_it_first_and_then_checks(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["check", str(folder), "--device", "cpu", "--tokens", "8"]) == 0
    out = capsys.readouterr().out
    assert out.index("It will run.\n\nmodel, Qwen3ForCausalLM") < out.index("Worst relative errors")
    arguments = ["check", str(folder), "--device", "cpu", "--dry-run", "--json", "--output", str(tmp_path / "look.json")]
    assert cli.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "look.json").read_text()) and found["outlook"]["runs"] and "layers" not in found


@pytest.mark.usefixtures("nothing_loads")
def test_a_dry_run_loads_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (str(folder), "tiny", *SHAPES):
        assert cli.main(["check", name, "--device", "cpu", "--dtype", "bfloat16", "--dry-run"]) in (0, 1)  # some do not fit
        assert "run" in capsys.readouterr().out.splitlines()[-1] or name in SHAPES
    assert cli.main(["check", "tiny", "--device", "cpu", "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith("It will run.\n")


def refused(folder: Path | str, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """What is printed where a model will not run."""
    assert cli.main(["check", str(folder), "--device", "cpu", *more]) == 1
    out = capsys.readouterr().out
    assert "It will not run:" in out
    return out.split("It will not run:\n")[1]


@pytest.mark.usefixtures("nothing_loads")
def test_ranks_that_cannot_share_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures are those of the whole model, and the report says so."""
    assert cli.main(["check", str(folder), "--device", "cpu", "--dry-run", "--tensor-parallel-size", "3"]) == 1
    out = capsys.readouterr().out
    assert "weights, KV and free memory are those of one rank that has the whole model" in out
    assert "3 ranks cannot share num_heads=4: choose a number of ranks that divides it" in out.split("It will not run:\n")[1]


def test_kv_for_requests_of_full_length_is_no_more_than_they_need(folder: Path) -> None:
    found = look(folder)
    assert found.config is not None and found.memory is not None
    short = replace(found, config=replace(found.config, max_position_embeddings=64), memory=replace(found.memory, tokens=256 * 64))
    assert "room for 16,384 tokens, all that 256 requests of full length need" in " ".join(text(short).split())
    less = replace(short, memory=replace(found.memory, tokens=256 * 64 - 16))
    assert "of full length need" not in " ".join(text(less).split())


@pytest.mark.usefixtures("nothing_loads")
def test_groups_that_ranks_would_cut_too_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of matrices that would be rounded, and of those that the checkpoint has quantised."""
    sizes = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    wide = Encoder(config={**FP8, "weight_block_size": [128, 128]}, encode=block_fp8(128, "weight_scale_inv", torch.float32), kind="fp8")
    quantised, plain = folders(tmp_path, wide, tiny_config(intermediate_size=272, **sizes))
    two, told = ("--tensor-parallel-size", "2", "--dry-run"), "columns 0 to 136 cut groups of 128 columns into groups of 8, fewer than 16"
    first = "model.layers.0.mlp.down_proj cannot be shared by 2 ranks: "
    assert f"{first}{told}; choose another number of ranks\n" in refused(quantised, capsys, *two)
    more = f"{first}quantization='int4': {told}; choose another number of ranks or quantization='int8'\n"
    assert more in refused(plain, capsys, "--quantization", "int4", *two)
    for folder, how in ((plain, ("--quantization", "int8", *two)), (plain, ("--quantization", "int4", "--dry-run")), (quantised, two[2:])):
        assert cli.main(["check", str(folder), "--device", "cpu", *how]) == 0


@pytest.mark.usefixtures("nothing_loads")
def test_tensors_that_are_missing_misshapen_or_too_many_are_all_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = torch.zeros(31)
    save_file({**tensors, "visual.weight": torch.zeros(2)}, file, metadata={"format": "pt"})
    told = refused(folder, capsys)
    assert "lacks the tensor model.layers.1.mlp.up_proj.weight" in told and "visual.weight" in told
    assert "model.norm.weight has shape [31], the config asks for [32]" in told
    change(folder, num_hidden_layers=9, layer_types=["full_attention"] * 9)
    assert told.count("\n") < refused(folder, capsys).count("\n") == 9 and "more" in refused(folder, capsys)
    file.write_bytes(b"no header")
    assert "not a whole safetensors file" in refused(folder, capsys)
    file.rename(folder / "model.bin")
    assert "pickle" in refused(folder, capsys)


@pytest.mark.usefixtures("nothing_loads")
def test_a_head_beside_the_table_that_it_is_said_to_be_is_counted(tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path, tiny_config(tie_word_embeddings=True))
    one = look(folder, "float32").weights
    file = folder / "model.safetensors"
    save_file({**load_file(file), "lm_head.weight": torch.ones(264, 32)}, file, metadata={"format": "pt"})
    two = look(folder, "float32").weights
    assert one is not None and two is not None and two.held - one.held == 4 * 264 * 32


def test_the_options_reach_the_outlook_and_the_loader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, loads, real = [], [], command.outlook

    def seen(name: str, *given: Any, **how: Any) -> Outlook:
        looks.append({key: value for key, value in how.items() if key != "shapes"})
        return real(name, *given, **how)

    def loaded(*given: Any, **where: Any) -> None:
        loads.append((given, where))
        raise nv.CheckpointError("enough")

    monkeypatch.setattr(command, "outlook", seen)
    monkeypatch.setattr(command, "loaded", loaded)
    flags = "--device cpu --dtype bfloat16 --max-model-len 100 --memory-fraction 1 --download --trust-remote-code"
    flags += " --quantization int8 --quantize-head --kv-dtype fp8"
    assert cli.main(["check", str(folder), *flags.split()]) == 2
    where = {
        "max_model_len": 100,
        "revision": None,
        "download": True,
        "trust_remote_code": True,
        "quantization": "int8",
        "quantize_head": True,
        "fp8_activations": False,
    }
    assert looks == [{"memory_fraction": 1.0, "kv_dtype": "fp8", **where, "ranks": 1}]
    assert loads == [((str(folder), "cpu", "bfloat16"), {**where, "download": False})]  # the outlook has downloaded the files


def test_kv_in_fp8_takes_about_half_and_runs_by_the_same_kernels_on_a_cpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for more in ([], ["--kv-dtype", "fp8"]):
        assert cli.main(["check", str(folder), "--device", "cpu", "--dtype", "bfloat16", "--dry-run", "--json", *more]) == 0
        said.append(json.loads(capsys.readouterr().out)["outlook"])
    config = said[0]["config"]
    assert [look["memory"]["token_bytes"] for look in said] == [
        config["num_layers"] * 2 * config["num_kv_heads"] * size for size in (2 * config["head_dim"], config["head_dim"] + 4)
    ]
    assert said[1]["kernels"] == said[0]["kernels"]


def test_the_report_says_that_kv_is_not_rounded(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for more in ([], ["--kv-dtype", "fp8"]):
        cli.main(["check", "tiny", "--device", "cpu", "--tokens", "24", *more])
        shown.append("do not round keys and values as --kv-dtype fp8 does" in capsys.readouterr().out)
    assert shown == [False, True]


def test_random_weights_have_no_revisions(capsys: pytest.CaptureFixture[str]) -> None:
    name = next(iter(SHAPES))
    assert cli.main(["check", name, "--revision", "abc", "--device", "cpu", "--dry-run"]) == 2
    assert f"--revision abc: {name} has random weights and no revisions; omit --revision" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_loads")
def test_what_does_not_run_is_said_with_the_reason(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder, quantization_config={"bits": 4})
    assert "quant_method=None is not supported" in refused(folder, capsys)
    change(folder, quantization_config=None, architectures=["OwnForCausalLM"], auto_map={"AutoConfig": "own.Config"})
    assert cli.main(["check", str(folder), "--device", "cpu", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["outlook"]["runs"] and found["outlook"]["code"] and "trust_remote_code" in found["outlook"]["problems"][0]
    change(folder, auto_map=None, architectures=["Qwen3ForCausalLM"], hidden_act="relu")
    assert "hidden_act='relu'" in refused(folder, capsys)
    change(folder, hidden_act="silu", architectures=["BertForMaskedLM"], model_type="bert")
    assert "BertForMaskedLM" in refused(folder, capsys)
    change(folder, architectures=None)
    assert "unknown architecture None" in refused(folder, capsys)


@pytest.mark.usefixtures("nothing_loads")
def test_texts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "chat_template.jinja").write_text("{% if %}")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256]}))
    found = look(folder)
    assert found.texts is not None and found.texts.chat_template is not None and "does not compile" in found.texts.chat_template
    assert [token for token, _ in found.texts.end_tokens] == [258, 256]
    (folder / "chat_template.jinja").unlink()
    assert "no chat template" in text(look(folder))
    change(folder, vocab_size=200)
    assert "the tokenizer has the id 255, but the model's vocab_size is 200" in refused(folder, capsys)
    (folder / "tokenizer.json").unlink()
    told = refused(folder, capsys)
    assert "no tokenizer" in told and "tokenizer=False" in told
    change(folder, eos_token_id=None)
    (folder / "generation_config.json").unlink()
    assert any("no end token" in note for note in look(folder).notes)


@pytest.mark.usefixtures("nothing_loads")
def test_too_little_memory(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    held, page = look(folder).weights, 16 * 2 * 2 * 2 * 16 * 4
    assert held is not None

    def free(count: int) -> None:
        monkeypatch.setattr(kv_memory, "room", lambda _: Room(total=1 << 40, free=count))

    free(held.held - 1)
    assert "the weights take" in refused(folder, capsys)
    free(held.held + 2 * page - 1)
    assert "no room for KV" in refused(folder, capsys)
    free(held.held + 3 * page)
    found = look(folder)
    assert found.problems == () and found.memory is not None and found.memory.tokens == 32
    assert any("32 tokens" in note for note in found.notes)
    free(1 << 40)
    memory = look(folder).memory
    assert memory is not None and memory.left == 4 << 30
    state = nv.init_state(nv.load_model(folder, "cpu"))
    assert memory.tokens == 16 * state.config.num_pages
    monkeypatch.setattr(kv_memory, "room", lambda _: None)
    unknown = look(folder)
    assert unknown.problems == () and any("does not report" in note for note in unknown.notes)


def test_memory_of_a_gpu_is_what_the_fraction_leaves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "room", lambda _: Room(total=1000 << 20, free=900 << 20))
    monkeypatch.setattr(preflight, "device_name", lambda _: "a GPU")
    monkeypatch.setattr(backends, "capability", lambda _: (9, 0))
    monkeypatch.setattr(kv_memory, "default_tokens", lambda _: 8192)
    found = preflight.outlook(str(folder), CUDA, None, shapes={}, memory_fraction=0.5)
    assert found.weights is not None and found.memory is not None
    assert found.memory.left == (500 << 20) - (100 << 20) - found.weights.held
    assert found.weights.host == 32 << 20


def test_kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(architecture: str, dtype: str, **changes: Any) -> tuple[str, str]:
        found = kernels(tiny_config(architecture, **{"head_dim": 64, **changes}), CUDA, dtype_of(dtype))
        return found.decode, found.against

    monkeypatch.setattr(backends, "installed", lambda _: True)
    monkeypatch.setattr(backends, "capability", lambda _: (8, 0))
    assert of("LlamaForCausalLM", "bfloat16") == ("fused kernels in CUDA graphs", "")
    assert of("Gemma2ForCausalLM", "float16") == ("fused kernels in CUDA graphs", "")
    assert of("GPT2LMHeadModel", "float16") == ("compiled layers in CUDA graphs", "layer norms with biases")
    assert of("LlamaForCausalLM", "bfloat16", mlp_bias=True) == ("compiled layers in CUDA graphs", "biases of gates")
    plain = "compiled layers, attention in plain torch"
    assert of("LlamaForCausalLM", "float32") == (plain, "FlashInfer does not support it: the dtype float32")
    assert 96 not in FLASHINFER_HEAD_DIMS
    assert of("Phi3ForCausalLM", "bfloat16", head_dim=96) == (plain, "FlashInfer does not support it: head_dim 96")
    padded = fitted(tiny_config("Phi3ForCausalLM", head_dim=96), CUDA, torch.bfloat16)
    assert kernels(padded, CUDA, torch.bfloat16).captured and "heads of 96 channels padded to 128" in features(padded)
    assert not any("rotated" in feature for feature in features(padded))
    monkeypatch.setattr(backends, "capability", lambda _: (7, 5))
    assert of("LlamaForCausalLM", "float16") == (plain, "FlashInfer does not support it: compute capability 7.5")
    monkeypatch.setattr(backends, "installed", lambda package: package == "triton")
    assert of("LlamaForCausalLM", "float16")[1] == "FlashInfer does not support it: flashinfer cannot be imported"


def test_lengths(tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path / "phi", tiny_config("Phi3ForCausalLM", eos_token_ids=(258,)))
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    change(folder, rope_parameters=rope, original_max_position_embeddings=64)
    found = look(folder)
    assert found.config is not None and found.config.max_position_embeddings == 64
    assert any("up to 512 tokens, give --max-model-len" in note for note in found.notes)
    longer = look(folder, max_model_len=100)
    assert longer.config is not None and longer.config.max_position_embeddings == 512 and longer.problems == longer.notes == ()
    assert look(folder, max_model_len=513).problems == ("max_model_len=513 exceeds the model's 512 positions",)


@pytest.mark.parametrize("windows", [(), (8, 0), (8, 8)])
def test_tokens_are_those_of_an_engine(windows: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_hf_folder(tmp_path / "model", tiny_config(windows=windows, max_position_embeddings=4096))
    state = nv.init_state(nv.load_model(folder, "cpu"))
    memory = look(folder).memory
    assert memory is not None
    pages, frames = state.config.num_pages, state.config.num_frames
    assert memory.tokens == 16 * (frames if windows == (8, 8) else pages)
    assert memory.window_tokens == (16 * frames if windows == (8, 0) else None)
    assert ("tokens in sliding-window layers" in text(look(folder))) == (windows == (8, 0))


@pytest.mark.parametrize("name", ["fp8 in blocks", "compressed W8A8", "compressed W4A16", None])
@pytest.mark.parametrize("gpu", [False, True])
def test_the_fill_of_quantised_matrices_is_counted(name: str | None, gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of codes are filled to whole blocks: for the layout of a GPU always, else those of 4 bits. None: rounded while loading."""
    if gpu:
        for module in ("loading.quantisation.arranging", "ops.linear.quantise"):
            monkeypatch.setattr(f"nanovllm.{module}.laid_out", gpu_layout)
    folder = folders(tmp_path, ENCODERS[name or "gptq"], tiny_config(**SIZES))[0 if name else 1]
    for kind in ("fp8", "int8", "int4") if name is None else (None,):
        model = nv.load_model(folder, "cpu", "float32", tokenizer=False, quantization=kind)
        leaves = pytree.tree_leaves(model.params, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))
        assert any(isinstance(leaf, QuantisedMatrix) and leaf.columns % 128 for leaf in leaves)
        hf = json.loads((folder / "config.json").read_text())
        found = preflight._weights(
            folder, model.spec, model.config, CUDA if gpu else CPU, torch.float32, preflight.read_quantisation(hf, folder),
            preflight.require_rounding(kind, False), [],
        )  # fmt: skip
        stored = 7 * 16 * len(model.params.layers) if name == "compressed W4A16" else 0  # `weight_shape` of seven matrices a layer
        assert found.held == sum(leaf.nbytes for leaf in leaves if leaf is not None) + stored
