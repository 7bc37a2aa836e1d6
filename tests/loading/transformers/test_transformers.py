"""Architectures without a file in the package: their logits are those of transformers, or they are refused by name."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import nanovllm as nv
from nanovllm.entrypoints.cli.main import main
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.loading.load_model import load_model
from nanovllm.loading.transformers.trace import causal_mask
from nanovllm.models.model import Model
from nanovllm.models.transformers import ForeignParams
from nanovllm.testing.driver import layout, run_chunks
from tests.loading.transformers.made import GREEDY, GROUPED, ROWS, Made, change, copied, greedy, save

pytestmark = pytest.mark.filterwarnings("ignore:.*runs through transformers")
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA = {
    "n_group": 2, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4}
# Small, and with what is theirs: windows shorter than the prompts, partial rotation, parallel residuals, experts, scales, layer norms.
RUN: dict[str, dict[str, Any]] = {
    "stablelm": GROUPED,
    "olmo2": GROUPED,
    "gpt_neox": {},
    "cohere": GROUPED,
    "cohere2": {**GROUPED, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {**GROUPED, "attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "smollm3": {**GROUPED, "no_rope_layers": [1, 0]},
    "starcoder2": {**GROUPED, "sliding_window": 7},
    "phi": {"partial_rotary_factor": 0.5},
    "olmoe": MOE,
    "qwen2_moe": {**GROUPED, **MOE, "shared_expert_intermediate_size": 24},
    "exaone4": {**GROUPED, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4": {**GROUPED, "head_dim": 8},
    "nemotron": {**GROUPED, "head_dim": 8},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_bigcode": {},
    "deepseek_v3": MLA,
    "vaultgemma": {**GROUPED, "head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 3.0},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gpt_oss": ({**GROUPED, "head_dim": 8, "num_local_experts": 4, "rope_parameters": ROPE}, "s_aux .attention sinks"),
    "mamba": ({}, "a state other than keys and values"),
    "jamba": ({**GROUPED, "attn_layer_period": 2, "attn_layer_offset": 1}, "a state other than keys and values"),
    "recurrent_gemma": ({}, "a state other than keys and values"),
    "falcon": ({}, "does not go through transformers' attention interface"),
    "gptj": ({"rotary_dim": 4}, "does not go through transformers' attention interface"),
    "bloom": ({}, "does not go through transformers' attention interface"),
    "bart": ({"d_model": 32, "is_encoder_decoder": False}, "no position_ids"),
    "gemma3n_text": ({**GROUPED, "head_dim": 8, "num_kv_shared_layers": 1, "vocab_size_per_layer_input": 264}, "share the keys and values"),
    "llama4_text": ({**GROUPED, "head_dim": 8, "num_local_experts": 2}, "attend neither to all tokens nor to a window.*chunked_attention"),
    "diffllama": (GROUPED, "runs 2 times per step"),
    "bert": ({"is_decoder": False}, "is not causal"),
    "roberta": ({"is_decoder": True, "pad_token_id": 1}, "with paged KV its logits have a relative error"),
    "olmo2": ({**GROUPED, "rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 2.0}}, "dynamic.*depends on the length"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(made: Made) -> Model:
    return load_model(made.folder, device="cpu")


@pytest.mark.parametrize("kind", RUN)
def test_logits_and_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    made = save(tmp_path, kind, RUN[kind])
    model = load_model(made.folder, device="cpu")
    assert model.foreign and model.config.architecture == type(made.theirs).__name__
    exact = copy.deepcopy(made.theirs).double()
    if exact._can_set_experts_implementation():
        exact.set_experts_implementation("eager")  # the others have no float64
    for chunk in (64, 4):
        at = layout(model, [len(row) for row in ROWS], 4)
        for row, got in zip(ROWS, run_chunks(model, ROWS, at, chunk), strict=True):
            ids = torch.tensor([row])
            want, true = (each(input_ids=ids, use_cache=False).logits[0] for each in (made.theirs, exact))
            assert (got - want).abs().max() <= max(1e-4, 3 * float((want - true).abs().max()))
    llm = nv.LLM(model, num_pages=64, page_size=4, max_num_batched_tokens=9)
    outs = llm.generate([list(row) for row in ROWS], GREEDY)
    assert [out.token_ids for out in outs] == [greedy(made.theirs, row, 10) for row in ROWS]


def test_alone_reused_and_preempted_are_the_same(made: Made, model: Model) -> None:
    want = [greedy(made.theirs, row, 10) for row in ROWS]
    llm = nv.LLM(model, num_pages=64, page_size=4)
    assert [llm.generate([row], GREEDY)[0].token_ids for row in ROWS] == want
    again = llm.generate([list(row) for row in ROWS], GREEDY)
    assert [out.token_ids for out in again] == want and again[0].num_cached_tokens >= 8
    tiny = nv.LLM(model, num_pages=10, page_size=3, max_num_batched_tokens=5)
    assert [out.token_ids for out in tiny.generate([list(row) for row in ROWS], GREEDY)] == want
    assert tiny.state.stats.rerun_tokens > 0


def test_shared_pages_can_be_read_once(made: Made, model: Model) -> None:
    llm = nv.LLM(model, num_pages=64, page_size=4, cascade=True)
    prompts = [[*ROWS[0], i] for i in range(3)]
    assert [out.token_ids for out in llm.generate(prompts, GREEDY)] == [greedy(made.theirs, row, 10) for row in prompts]


def test_chunks_work_but_for_those_whose_keys_would_turn(made: Made, model: Model, tmp_path: Path) -> None:
    state = nv.init_state(model, num_pages=64, page_size=4)
    ids = list(ROWS[0])
    state, chunk = nv.prefill(model, state, ids)
    state, twin = nv.fork(state, chunk)
    state, head = nv.truncate(state, chunk, 7)
    state, longer = nv.prefill(model, state, [8, 9, 10], after=head)
    nv.save_chunk(state, longer, tmp_path / "chunk")
    state = nv.release(state, longer)
    state, loaded = nv.load_chunk(model, state, tmp_path / "chunk")
    state, kept = nv.drop(model, state, twin, 2, 5)
    state, both = nv.compose(model, state, [head, kept], recompute="all")
    for context, tokens in ((loaded, [*ids[:7], 8, 9, 10]), (kept, ids[:2] + ids[5:]), (both, ids[:7] + ids[:2] + ids[5:])):
        state, made_of = nv.generate(model, state, context, GREEDY)
        assert made_of.token_ids == greedy(made.theirs, tokens, 10)
    with pytest.raises(InvalidRequestError, match=r"it is unknown how StableLmForCausalLM.*does not support compose"):
        nv.compose(model, state, [head, kept])
    with pytest.raises(InvalidRequestError, match=r"it is unknown how.*does not support drop"):
        nv.drop(model, state, chunk, 2, 5, mode="shift")
    state, gapped = nv.drop(model, state, chunk, 2, 5, mode="gap")
    assert len(gapped) == len(ids) - 3
    nv.check(state)


def test_steps_of_a_caller(made: Made, model: Model) -> None:
    state = nv.init_state(model, num_pages=64, page_size=4)
    state, chunk = nv.prefill(model, state, list(ROWS[0]))
    state, carry = nv.begin(model, state, [chunk], GREEDY, room=4)
    drawn = []
    for _ in range(4):
        carry, out = nv.decode_step(model.params, carry, model.config)
        drawn.append(int(out.token_ids[0]))
    assert drawn == greedy(made.theirs, ROWS[0], 4)
    state, _ = nv.commit(model, state, carry)


def test_it_says_that_it_is_slow_once_and_has_no_compiled_form(made: Made, model: Model) -> None:
    with pytest.warns(UserWarning, match="StableLmForCausalLM has no built-in implementation.*slow") as told:
        nv.init_state(model, num_pages=8)
    assert len(told) == 1
    with pytest.raises(InvalidRequestError, match=r"compile=True.*through transformers"):
        nv.init_state(model, num_pages=8, compile=True)
    assert "StableLmForCausalLM" in repr(model) and f"{made.theirs.num_parameters():,} parameters" in repr(model)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    made = save(tmp_path, "cohere", {**GROUPED, "tie_word_embeddings": True})
    model = load_model(tmp_path, device="cpu")
    assert isinstance(model.params, ForeignParams) and model.config.tie_word_embeddings
    assert model.params.weights["lm_head.weight"] is model.params.weights["model.embed_tokens.weight"]
    assert f"{made.theirs.num_parameters():,} parameters" in repr(model)


def test_half_precision(made: Made) -> None:
    model = load_model(made.folder, device="cpu", dtype="bfloat16")
    assert model.params.embed.dtype == model.dtype == torch.bfloat16
    assert len(nv.LLM(model, num_pages=16).generate([list(ROWS[0])], GREEDY)[0].token_ids) == 10


def test_yarn_stretches_the_positions(tmp_path: Path) -> None:
    made = save(tmp_path, "olmo2", {**GROUPED, "max_position_embeddings": 32})
    change(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32})
    model = load_model(tmp_path, device="cpu")
    assert model.config.max_position_embeddings == 128
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made.folder, attn_implementation="eager").float()
    prompt = [3 + 7 * i % 250 for i in range(60)]
    assert nv.LLM(model, num_pages=16).generate([prompt], GREEDY)[0].token_ids == greedy(theirs, prompt, 10)


def test_the_fingerprint_knows_the_whole_config(made: Made, model: Model, tmp_path: Path) -> None:
    folder = copied(made.folder, tmp_path)
    assert load_model(folder, device="cpu").fingerprint == model.fingerprint
    change(folder, layer_norm_eps=1e-3)
    assert load_model(folder, device="cpu").fingerprint != model.fingerprint


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_run_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    changes, reason = REFUSED[kind]
    save(tmp_path, kind, changes)
    if reason != REFUSED["roberta"][1]:  # which shows only with weights; all others are refused before these are read
        (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(CheckpointError, match=reason):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize(("kind", "auto"), [("t5", "AutoModelForSeq2SeqLM"), ("bert", "AutoModelForMaskedLM")])
def test_what_is_no_causal_language_model_is_refused(kind: str, auto: str, tmp_path: Path) -> None:
    save(tmp_path, kind, {"d_model": 32, "d_kv": 8, "d_ff": 48} if kind == "t5" else {}, getattr(transformers, auto))
    with pytest.raises(CheckpointError, match=r"unknown architecture.*Qwen3ForCausalLM.*not a causal language model of transformers 5"):
        load_model(tmp_path, device="cpu")


def test_masks_are_told_apart() -> None:
    assert causal_mask(4, 2).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert causal_mask(3, 0).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


FAULTS: dict[str, tuple[Any, str]] = {
    "missing": (lambda tensors: tensors.pop("model.norm.weight"), r"lacks the tensor model\.norm\.weight \[32\]"),
    "unexpected": (lambda tensors: tensors.update(extra=torch.ones(2)), "holds the tensor extra, which StableLmForCausalLM does not have"),
    "misshapen": (lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}), r"norm\.weight has shape \[3\].*asks for \[32\]"),
    "renamed": (lambda tensors: tensors.update(extra=tensors.pop("model.norm.weight")), "missing keys.*model.norm.weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_tensors_that_do_not_fit_are_named(fault: str, made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, named = FAULTS[fault]
    folder = copied(made.folder, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=named):
        load_model(folder, device="cpu")
    if fault != "renamed":  # transformers may know such a name, and tells when it reads
        assert main(["check", str(folder), "--device", "cpu", "--dry-run"]) == 1
        assert re.search(named, capsys.readouterr().out)


def test_pickles_are_refused(made: Made, tmp_path: Path) -> None:
    folder = copied(made.folder, tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only pickle files"):
        load_model(folder, device="cpu")


def test_check_says_what_runs(made: Made, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["check", str(made.folder), "--device", "cpu", "--output", str(tmp_path / "found.json")]) == 0
    assert "through the transformers fallback" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["path"] == "through transformers"
    look, params = found["outlook"], load_model(made.folder, device="cpu").params
    assert isinstance(params, ForeignParams)
    assert look["runs"] and look["file"] == "" and look["architecture"] == "StableLmForCausalLM"
    once = {weight.data_ptr(): weight.nbytes for weight in params.weights.values()}
    assert look["weights"]["held"] == sum(once.values()) == look["weights"]["stored"]
    assert look["kernels"]["decode"] == look["kernels"]["prompts"] == "transformers' module, attention in plain torch"


def test_check_of_what_is_refused_says_why_and_loads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = save(tmp_path / "bloom", "bloom", {})
    assert main(["check", str(made.folder), "--device", "cpu"]) == 1
    assert "does not go through transformers' attention interface" in capsys.readouterr().out.split("It will not run:")[1]


def test_built_in_architectures_do_not_need_transformers() -> None:
    code = "import sys, nanovllm; nanovllm.load_model('tiny', 'cpu'); sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_kv_in_fp8_is_the_same_in_pieces_and_alone(made: Made, model: Model) -> None:
    llm = nv.LLM(model, num_pages=64, page_size=4, kv_dtype="fp8")
    want = [out.token_ids for out in llm.generate([list(row) for row in ROWS], GREEDY)]
    for row, reply in zip(ROWS, want, strict=True):
        pieces = nv.LLM(model, num_pages=64, page_size=4, max_num_batched_tokens=3, kv_dtype="fp8")
        assert pieces.generate([list(row)], GREEDY)[0].token_ids == reply
