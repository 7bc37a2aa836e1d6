"""Loading: every bad folder is refused by name, and a good one costs the host little more than the model."""

import json
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

import nanovllm as nv
from nanovllm.config import Mesh
from nanovllm.entrypoints.cli.bench.model_shapes import random_model as bench_model
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.loading import weights
from nanovllm.loading.load_model import load_model
from nanovllm.loading.quantisation.rounding import Rounding, rounded_params
from nanovllm.loading.safetensors_headers import read_headers
from nanovllm.loading.weights import fingerprint
from nanovllm.models import init_params
from nanovllm.models.common.params import ParamInfo, matrices
from nanovllm.models.common.sharding import sharded_params
from nanovllm.models.init_params import drawn_by, random_fingerprint, random_params
from nanovllm.models.registry import REGISTRY
from nanovllm.ops.linear.quantise import quantise
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.testing.models import random_model, save_hf_folder, tiny_config

NORM = "model.layers.1.post_attention_layernorm.weight"


def edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def overwrite(name: str, make: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes(make((folder / name).read_bytes()))

    return apply


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def set_config(**change: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **change}))

    return apply


# what is wrong: (what is done to a good single-file folder, what the message names)
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "config is not JSON": (overwrite("config.json", lambda data: data[:-9]), "config.json: not JSON"),
    "config is a list": (overwrite("config.json", lambda data: b"[]"), "expected an object"),
    "unknown architecture": (set_config(architectures=["MambaForCausalLM"]), "MambaForCausalLM.*Qwen3ForCausalLM"),
    "no architecture": (set_config(architectures=None), "unknown architecture None"),
    "quantised": (set_config(quantization_config={"quant_method": "gptq"}), "gptq"),
    "remote code": (
        set_config(architectures=["MineForCausalLM"], auto_map={"AutoModelForCausalLM": "modeling.Mine"}),
        "trust_remote_code",
    ),
    "missing tensor": (edit(lambda t: t.pop(NORM)), f"lacks the tensor {NORM}"),
    "extra tensor": (edit(lambda t: t.update({"model.layers.0.extra": torch.ones(3)})), "model.layers.0.extra"),
    "extra layer": (edit(lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(48, 32)})), "layers.2.mlp.up_proj"),
    "wrong shape": (edit(lambda t: t.update({NORM: torch.ones(31)})), rf"{NORM} has shape \[31\].*\[32\]"),
    "wrong dtype": (edit(lambda t: t.update({NORM: torch.ones(32, dtype=torch.int8)})), f"{NORM} has dtype I8"),
    "truncated": (overwrite("model.safetensors", lambda data: data[:-100]), "model.safetensors: not a whole"),
    "truncated header": (overwrite("model.safetensors", lambda data: data[:50]), "model.safetensors: not a whole"),
    "empty": (overwrite("model.safetensors", lambda data: b""), "model.safetensors: not a whole"),
    "garbage": (overwrite("model.safetensors", lambda data: bytes(range(256)) * 40), "model.safetensors: not a whole"),
    "pickle only": (pickle_only, "pytorch_model.bin.*expected model.safetensors"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer"),
    "garbage tokenizer": (overwrite("tokenizer.json", lambda data: data[: len(data) // 2]), "tokenizer.json: not a tokenizer"),
    "tokenizer beyond the vocabulary": (set_config(vocab_size=250), "tokenizer has the id 255.*vocab_size is 250"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_folder_is_refused_by_name_and_the_next_loads(fault: str, tmp_path: Path) -> None:
    spoil, named = FAULTS[fault]
    bad = save_hf_folder(tmp_path / "bad", tiny_config())
    spoil(bad)
    with pytest.raises(CheckpointError, match=named):
        load_model(bad, device="cpu")
    assert load_model(save_hf_folder(tmp_path / "good", tiny_config()), device="cpu").params.head is not None


def test_a_head_that_differs_at_its_end_alone_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors are compared piece by piece."""
    monkeypatch.setattr(weights, "STAGE", 64)
    folder = save_hf_folder(tmp_path, tiny_config(tie_word_embeddings=True))
    edit(lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))(folder)
    assert load_model(folder, device="cpu").params.head is None
    edit(lambda tensors: tensors["lm_head.weight"].view(-1)[-1].add_(1))(folder)
    assert load_model(folder, device="cpu").params.head is not None


def test_two_tensors_for_one_parameter_are_refused_by_name(tmp_path: Path) -> None:
    """GPT-2's names may lack their prefix: a folder that has a tensor under both names does not say which one counts."""
    folder = save_hf_folder(tmp_path, tiny_config("GPT2LMHeadModel"))
    names = load_file(folder / "model.safetensors").keys()
    assert "transformer.wte.weight" in names and "wte.weight" not in names
    edit(lambda tensors: tensors.update({"wte.weight": torch.zeros_like(tensors["transformer.wte.weight"])}))(folder)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.* transformer\.wte\.weight.* wte\.weight"):
        load_model(folder, device="cpu")


def test_remote_code_with_the_opt_in_uses_what_is_built_in(tmp_path: Path, capsys: pytest.CaptureFixture[str], untyped: None) -> None:
    folder = save_hf_folder(tmp_path, tiny_config())
    (folder / "modeling.py").write_text("raise SystemExit('the code of a checkpoint ran')")
    set_config(auto_map={"AutoModelForCausalLM": "modeling.Mine"})(folder)
    assert load_model(folder, device="cpu", trust_remote_code=True).config.architecture == "Qwen3ForCausalLM"
    assert "Qwen3ForCausalLM is built in: the checkpoint's own code is not run" in capsys.readouterr().err
    with pytest.raises(InvalidRequestError, match="trust_remote_code='no' must be True or False"):
        load_model(folder, device="cpu", trust_remote_code="no")  # pyright: ignore[reportArgumentType]


def test_harmless_extras_are_ignored(tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path, tiny_config(tie_word_embeddings=True))
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    edit(lambda tensors: tensors.update(frequencies, **{"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))(folder)
    params = load_model(folder, device="cpu").params
    assert params.head is None


def test_a_head_beside_the_table_that_it_is_said_to_be_counts(tmp_path: Path) -> None:
    """As in transformers: a fine-tune may have trained it apart from the embedding table."""
    folder = save_hf_folder(tmp_path, tiny_config(tie_word_embeddings=True))
    other = torch.ones(264, 32)
    edit(lambda tensors: tensors.update({"lm_head.weight": other}))(folder)
    model = load_model(folder, device="cpu")
    assert not model.config.tie_word_embeddings
    assert torch.equal(model.params.head, other)


def test_tensors_that_predict_several_tokens_are_left_out(tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path, tiny_config("Ernie4_5_MoeForCausalLM"))
    edit(lambda tensors: tensors.update({"model.mtp_linear_proj.0.weight": torch.ones(32, 64)}))(folder)
    assert load_model(folder, device="cpu").config.moe is not None


def test_code_beside_what_is_built_in_is_neither_asked_for_nor_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_hf_folder(tmp_path, tiny_config())
    set_config(auto_map={"AutoModelForCausalLM": "modeling.Mine"})(folder)
    assert load_model(folder, device="cpu").config.architecture == "Qwen3ForCausalLM"
    assert "the checkpoint's own code is not run" in capsys.readouterr().err


def test_an_added_token_may_lie_beyond_the_table(tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path, tiny_config(vocab_size=258))  # of the byte-level tokenizer's 261 ids the last are added tokens
    model = load_model(folder, device="cpu")
    assert model.tokenizer is not None and model.tokenizer.max_token_id >= 258
    state = nv.init_state(model, num_pages=8)
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        nv.submit(model, state, "a</think>b", nv.SamplingParams(max_tokens=1))
    nv.submit(model, state, "ab", nv.SamplingParams(max_tokens=1))


@pytest.mark.parametrize("architecture", REGISTRY)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_have_the_structure_of_the_table(architecture: str, tied: bool, tmp_path: Path) -> None:
    biased = {"LlamaForCausalLM", "Qwen3ForCausalLM", "GemmaForCausalLM"}
    config = tiny_config(architecture, tie_word_embeddings=tied, **({"attention_bias": True} if architecture in biased else {}))
    table = REGISTRY[architecture].param_table(config)
    folder = save_hf_folder(tmp_path, config, num_shards=2, dtype="float16")
    for model in (load_model(folder, device="cpu"), random_model(config)):
        params = model.params
        assert pytree.tree_structure(params) == pytree.tree_structure(table)
        for info, param in zip(pytree.tree_leaves(table), pytree.tree_leaves(params), strict=True):
            if isinstance(info, ParamInfo):
                assert (tuple(param.shape), param.dtype) == (info.shape, info.dtype or torch.float32)
            else:
                assert info is None
                assert param is None


def test_values_and_names_do_not_depend_on_sharding(tmp_path: Path) -> None:
    config = tiny_config(attention_bias=True)
    one, three = (load_model(save_hf_folder(tmp_path / str(n), config, num_shards=n), device="cpu") for n in (1, 3))
    assert one.fingerprint == three.fingerprint
    for a, b in zip(pytree.tree_leaves(one.params), pytree.tree_leaves(three.params), strict=True):
        assert a is b is None or torch.equal(a, b)
    tensors = load_file(tmp_path / "1" / "model.safetensors")
    attn, layer = "model.layers.1.self_attn", one.params.layers[1]
    assert torch.equal(layer.qkv, torch.cat([tensors[f"{attn}.{x}_proj.weight"] for x in "qkv"]))
    assert torch.equal(layer.qkv_bias, torch.cat([tensors[f"{attn}.{x}_proj.bias"] for x in "qkv"]))
    assert torch.equal(layer.gate_up[:48], tensors["model.layers.1.mlp.gate_proj.weight"])


def test_fingerprint_sees_config_headers_and_bytes(tmp_path: Path) -> None:
    config = tiny_config()
    folder = save_hf_folder(tmp_path, config)
    headers = read_headers(folder)
    first = fingerprint(config, headers)
    assert first == fingerprint(config, read_headers(folder))
    assert len(first) == 64
    assert first != fingerprint(replace(config, rms_norm_eps=1e-5), headers)
    for at in (0, -1, len(load_file(folder / "model.safetensors")[NORM]) // 2):
        before = fingerprint(config, read_headers(folder))
        edit(lambda tensors, at=at: tensors[NORM].view(-1)[at].add_(1))(folder)
        assert before != fingerprint(config, read_headers(folder))
    assert random_model(config, 0).fingerprint != random_model(config, 1).fingerprint
    assert random_model(config, 0).fingerprint == random_model(config, 0).fingerprint


def test_random_params_repeat_and_norms_are_near_one() -> None:
    config = tiny_config(tie_word_embeddings=True)
    one, same, other = (random_params(config, seed=s, device=torch.device("cpu"), dtype=torch.float32) for s in (1, 1, 2))
    assert torch.equal(one.embed, same.embed)
    assert not torch.equal(one.embed, other.embed)
    assert one.embed.std().item() == pytest.approx(0.02, rel=0.1)
    assert one.final_norm.mean().item() == pytest.approx(1.0, abs=0.05)


def test_random_values_do_not_depend_on_how_many_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config, where = tiny_config(vocab_size=267, hidden_size=31), {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    whole = random_params(config, seed=1, **where)
    expected = torch.empty(267 * 31).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(1)).view(267, 31).bfloat16()
    assert torch.equal(whole.embed, expected)
    monkeypatch.setattr(init_params, "DRAWN", 64)
    for a, b in zip(pytree.tree_leaves(whole), pytree.tree_leaves(random_params(config, seed=1, **where)), strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("mesh", [None, Mesh(size=2, rank=1, group=0)])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_random_matrices_are_rounded_one_after_another(architecture: str, mesh: Mesh | None) -> None:
    """The weights are those of rounding all of them and cutting them then, and no matrix outlives its rounding."""
    config, drawn, alive = tiny_config(architecture), list[weakref.ref[torch.Tensor]](), list[int]()

    def rounded(matrix: torch.Tensor) -> QuantisedMatrix:
        alive.append(sum(each() is not None for each in drawn))
        drawn.append(weakref.ref(matrix))
        return quantise(matrix, "int8")

    where: dict[str, Any] = {"seed": 3, "device": torch.device("cpu"), "dtype": torch.float32, "mesh": mesh}
    got = random_params(config, **where, rounded=rounded)
    want = rounded_params(random_params(config, **where | {"mesh": None}), Rounding(kind="int8"))
    want = want if mesh is None else sharded_params(want, config, mesh)
    assert pytree.tree_structure(got) == pytree.tree_structure(want)
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        assert a is b is None or torch.equal(a, b)
    assert len(drawn) == sum(len(matrices(layer)) for layer in got.layers)
    assert not any(alive)


def test_a_fingerprint_tells_who_drew_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the benchmark's models are those of every other seed-0 draw; each kind of GPU draws its own."""
    config, cpu, gpu = tiny_config(), torch.device("cpu"), torch.device("cuda", 0)
    model = bench_model("small", config, device="cpu")
    assert torch.equal(model.params.embed, random_params(config, seed=0, device=cpu, dtype=torch.float32).embed)
    assert model.fingerprint == random_fingerprint(config, 0) == random_fingerprint(config, 0, by=drawn_by(cpu))
    found = {model.fingerprint}
    for name in ("NVIDIA H200", "NVIDIA L4"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        found.add(random_fingerprint(config, 0, by=drawn_by(gpu)))
    assert len(found) == 3


def test_device_and_dtype_by_name(tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path, tiny_config(), dtype="bfloat16")
    model = load_model(folder, device="cpu")
    assert (model.dtype, model.config.dtype, model.params.embed.dtype) == (torch.float32, "bfloat16", torch.float32)
    assert load_model(str(folder), device=torch.device("cpu"), dtype="bfloat16").params.embed.dtype == torch.bfloat16
    for bad in (
        {"device": "toaster"},
        {"device": "cuda:99"},
        {"device": "meta"},
        {"device": "cpu", "dtype": "int8"},
        {"device": "cpu", "dtype": "Tensor"},
    ):
        with pytest.raises(InvalidRequestError):
            load_model(folder, **bad)


def test_progress_bar_only_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_hf_folder(tmp_path, tiny_config())
    load_model(folder, device="cpu")
    assert "weights" not in capsys.readouterr().err
    load_model(folder, device="cpu", progress=True)
    assert "weights" in capsys.readouterr().err


def test_the_bar_ends_at_its_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its total is what is read: tensors that are ignored are not."""
    folder, bars = save_hf_folder(tmp_path, tiny_config(tie_word_embeddings=True), dtype="bfloat16"), []

    class Bar(weights.tqdm):
        def close(self) -> None:
            bars.append((self.total, self.n))
            super().close()

    monkeypatch.setattr(weights, "tqdm", Bar)
    size = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    edit(lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))(folder)
    load_model(folder, device="cpu", progress=True)
    assert bars[0] == (size, size)


MEASURE = """
import sys
import torch
from nanovllm.loading.load_model import load_model
# Of this program alone; `ru_maxrss` begins with what its parent held.
peak = lambda: next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
model = load_model(sys.argv[1], device="cpu", dtype=sys.argv[2])
print(peak() - before)
"""
BESIDE = 32 << 20  # bytes that loading may take beside the parameters themselves: the 4 MiB buffer, and what allocators keep


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize("saved,loaded,layers", [("bfloat16", "bfloat16", 24), ("bfloat16", "float32", 8), ("float32", "float32", 8)])
def test_loading_takes_little_more_memory_than_the_model(saved: str, loaded: str, layers: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64, "vocab_size": 32000}
    config = tiny_config(**sizes, num_layers=layers)
    folder = save_hf_folder(tmp_path, config, dtype=saved, num_shards=2)
    size = init_params.num_params(config) * getattr(torch, loaded).itemsize
    command = [sys.executable, "-c", MEASURE, str(folder), loaded]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert size > 256e6
    assert 0.9 * size < grown < size + BESIDE


def test_fingerprint_costs_milliseconds(tmp_path: Path) -> None:
    config = tiny_config(num_layers=28)
    headers = read_headers(save_hf_folder(tmp_path, config))
    begin = time.thread_time()
    fingerprint(config, headers)
    assert time.thread_time() - begin < 0.5
