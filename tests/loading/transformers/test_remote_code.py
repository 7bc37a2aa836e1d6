"""Checkpoints that bring their own code: no code runs without the opt-in, and each file is named before it runs."""

import sys
from pathlib import Path

import pytest

import nanovllm as nv
from nanovllm.entrypoints.cli.main import main
from nanovllm.errors import CheckpointError
from nanovllm.loading.load_model import load_model
from tests.loading.transformers.made import GREEDY, GROUPED, ROWS, Made, change, copied, greedy, save

pytestmark = pytest.mark.filterwarnings("ignore:.*runs through transformers")
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
