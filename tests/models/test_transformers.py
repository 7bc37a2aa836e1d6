"""Architectures without a file here: what runs through transformers is compared with transformers, what cannot is refused by name."""

import copy
import json
import re
import subprocess
import sys
from dataclasses import dataclass
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
from nanovllm.testing.models import save_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*runs through transformers")
SIZES = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
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
ROWS = ([3, 7, 11, 200, 5, 9, 9, 14, 250, 31, 77, 8, 41], [90, 4, 5], [3, 7, 11, 200, 5, 9, 9, 14, 60, 61])
GREEDY = nv.SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@dataclass(frozen=True)
class Made:
    """A folder that transformers wrote, and the model that it holds, in float32."""

    folder: Path
    theirs: Any


def save(path: Path, kind: str, changes: dict[str, Any], auto: Any = transformers.AutoModelForCausalLM) -> Made:
    """Random weights, large enough to keep greedy choices apart."""
    sizes = {name: value for name, value in SIZES.items() if name != "pad_token_id" or kind not in ("bart",)}
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **changes})
    torch.manual_seed(0)
    theirs = auto.from_config(config, attn_implementation="eager").eval().float()  # other forms leave soft caps out
    for weight in theirs.parameters():
        weight.add_(torch.randn_like(weight) * 0.15)
    theirs.save_pretrained(path)
    save_tokenizer(path)
    return Made(folder=path, theirs=theirs)


@pytest.fixture(scope="module", autouse=True)
def silent() -> Any:
    """transformers warns of token ids outside of the tiny vocabularies, and draws bars."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """One of them, for what does not depend on the architecture."""
    return save(tmp_path_factory.mktemp("stablelm"), "stablelm", GROUPED)


@pytest.fixture(scope="module")
def model(made: Made) -> Model:
    return load_model(made.folder, device="cpu")


def greedy(theirs: Any, ids: list[int], count: int) -> list[int]:
    """transformers' choices, without a cache."""
    run = list(ids)
    for _ in range(count):
        run.append(int(theirs(input_ids=torch.tensor([run]), use_cache=False).logits[0, -1].argmax()))
    return run[len(ids) :]


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


def copied(folder: Path, to: Path) -> Path:
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


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


CONFIG = """\
from transformers import LlamaConfig

print("the config's file runs")

class OwnConfig(LlamaConfig):
    model_type = "own_decoder"
"""
MODEL = """\
import sys
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig
from .parts_own import PART

print("the model's file runs", file=sys.stderr)

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
APART = """\
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from .configuration_own import OwnConfig

class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, position_ids=None, **kwargs):
        return CausalLMOutput(logits=self.lm_head(self.embed(input_ids).cumsum(1)))
"""
AUTO = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """A checkpoint that brings its own code, and a cache of modules of its own."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "own"
    made = save(folder, "llama", GROUPED)
    change(folder, architectures=["OwnForCausalLM"], model_type="own_decoder", auto_map=AUTO)
    for name, text in {"configuration_own": CONFIG, "modeling_own": MODEL, "parts_own": "PART = 1\n"}.items():
        (folder / f"{name}.py").write_text(text)
    return Made(folder=folder, theirs=made.theirs)


def test_code_of_a_checkpoint_needs_the_opt_in(own: Made, capfd: pytest.CaptureFixture[str]) -> None:
    for refused in (load_model, nv.LLM):
        with pytest.raises(CheckpointError, match=r"brings its own code.*trust_remote_code=True"):
            refused(own.folder, device="cpu")
    assert main(["generate", "--model", str(own.folder), "--device", "cpu", "x"]) == 2
    out = capfd.readouterr()
    assert "runs" not in out.out + out.err.replace("nanovllm: error", "")


def test_code_of_a_checkpoint_is_named_before_it_runs(own: Made, capfd: pytest.CaptureFixture[str]) -> None:
    llm = nv.LLM(own.folder, device="cpu", num_pages=64, page_size=4, trust_remote_code=True)
    told = capfd.readouterr().err
    for name in ("configuration_own", "modeling_own", "parts_own"):
        line = f"the checkpoint's own code will be executed: {own.folder / name}.py\n"
        assert told.count(line) == 1 and told.index(line) < told.index("the model's file runs")
    outs = llm.generate([list(row) for row in ROWS], GREEDY)
    assert [out.token_ids for out in outs] == [greedy(own.theirs, row, 10) for row in ROWS]


def test_check_runs_no_code_without_the_opt_in(own: Made, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(own.folder), "--device", "cpu", "--dry-run"]) == 1
    out = capfd.readouterr()
    assert "trust_remote_code=True" in out.out and "file runs" not in out.out + out.err
    assert main(["check", str(own.folder), "--device", "cpu", "--dry-run", "--trust-remote-code"]) == 0
    out = capfd.readouterr()
    assert "It will run." in out.out and out.err.index("will be executed") < out.err.index("the model's file runs")


def test_code_whose_attention_is_its_own_is_refused(own: Made) -> None:
    (own.folder / "modeling_own.py").write_text(APART)
    with pytest.raises(CheckpointError, match=r"OwnForCausalLM.*does not go through transformers' attention interface"):
        load_model(own.folder, device="cpu", trust_remote_code=True)


def test_a_mask_that_pages_do_not_make_is_refused(own: Made) -> None:
    masked = """
    def forward(self, input_ids, position_ids=None, **kwargs):
        kwargs["attention_mask"] = input_ids.new_ones(1, 1, input_ids.shape[1], input_ids.shape[1], device="cpu").bool()
        return super().forward(input_ids, position_ids=position_ids, **kwargs)
"""
    (own.folder / "modeling_own.py").write_text(MODEL + masked)
    with pytest.raises(CheckpointError, match=r"OwnForCausalLM.*attention in layer 0 has a mask of its own"):
        load_model(own.folder, device="cpu", trust_remote_code=True)


def test_code_of_another_repository_is_looked_for_in_the_cache(own: Made) -> None:
    change(own.folder, auto_map={**AUTO, "AutoModelForCausalLM": "somebody/else--modeling_else.ElseForCausalLM"})
    with pytest.raises(CheckpointError, match=r"modeling_else.py of somebody/else, which is not in the Hugging Face cache"):
        load_model(own.folder, device="cpu", trust_remote_code=True)


def test_code_that_is_missing_or_leads_out_is_refused(own: Made) -> None:
    for reference in ("nowhere.Own", "../modeling_own.OwnForCausalLM", "modeling_own"):
        change(own.folder, auto_map={**AUTO, "AutoModelForCausalLM": reference})
        with pytest.raises(CheckpointError):
            load_model(own.folder, device="cpu", trust_remote_code=True)


def test_code_is_not_run_where_transformers_has_the_architecture(made: Made, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = copied(made.folder, tmp_path)
    (folder / "modeling_own.py").write_text("raise SystemExit('the code of a checkpoint ran')")
    change(folder, auto_map={"AutoModelForCausalLM": "modeling_own.StableLmForCausalLM"})
    for trusted in (False, True):
        assert load_model(folder, device="cpu", trust_remote_code=trusted).foreign
        assert "is in transformers" in capfd.readouterr().err


def test_built_in_architectures_do_not_need_transformers() -> None:
    code = "import sys, nanovllm; nanovllm.load_model('tiny', 'cpu'); sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
