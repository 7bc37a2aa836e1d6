"""`nanovllm check --tensor-parallel-size`: the layers of both ranks, and that their parts amount to the whole model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

import nanovllm as nv
from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cli.bench import ranked
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, random_weights
from nanovllm.entrypoints.cli.check.preflight import outlook
from nanovllm.entrypoints.cli.check.ranked import parts_text, whole_model
from nanovllm.models.check.parts import BOUND, Exact, compare_parts
from nanovllm.testing.models import random_model, save_hf_folder, tiny_config
from nanovllm.types import Tensor
from tests.entrypoints.ranks.hooks import SMALL

CPU = torch.device("cpu")
TWO = ["--device", "cpu", "--tensor-parallel-size", "2", "--tokens", "24"]


@pytest.mark.unhooked
def test_a_checkpoint_on_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_hf_folder(tmp_path / "weights", tiny_config())
    assert cli.main(["check", str(folder), *TWO, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ranks"] == told["outlook"]["ranks"] == 2 and len(told["layers"]) == 2
    assert told["parts"]["holds"] and told["parts"]["hidden"] < 1e-10 and told["parts"]["logits"] < 1e-10
    assert told["parts"]["same"] == told["parts"]["num_tokens"] == told["num_tokens"] == 24


@pytest.mark.unhooked
@pytest.mark.parametrize(
    ("maker", "code", "verdict"), [("small_weights", 0, "are the whole model"), ("other_weights", 1, "are NOT the whole")]
)
def test_random_weights_on_two_ranks(
    maker: str, code: int, verdict: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part with other values passes the comparison with itself, and is found by that with the whole model."""
    monkeypatch.setitem(SHAPES, "small", SMALL)
    monkeypatch.setattr(ranked, "MAKER", f"tests.entrypoints.ranks.hooks:{maker}")
    assert cli.main(["check", "small", *TWO]) == code
    told = capsys.readouterr().out
    assert f"In float64 the parts of 2 ranks {verdict}" in told and "2 ranks\n" in told


def test_a_dry_run_compares_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "tiny", "--device", "cpu", "--dry-run", "--against", "tiny"]) == 2
    assert "--against tiny: --dry-run loads no weights to compare" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "match"),
    [
        (["--against", "tiny"], 2, "--against tiny: it compares on one device"),
        (["--tensor-parallel-size", "3", "--dry-run"], 1, "3 ranks cannot share num_heads=4"),
        (["--dry-run"], 0, "weights, KV and free memory are those of one of 2 ranks"),
    ],
)
def test_what_is_told_before_weights_are_read(arguments: list[str], code: int, match: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "tiny", *TWO, *arguments]) == code
    captured = capsys.readouterr()
    assert match in captured.out + captured.err


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_bytes_of_a_rank(architecture: str, size: int) -> None:
    config = tiny_config(architecture)
    found = outlook("small", CPU, "bfloat16", shapes={"small": config}, ranks=size)
    model = random_model(config, dtype="bfloat16", mesh=nv.Mesh(size=size, rank=0, group=0))
    held = sum(leaf.nbytes for leaf in pytree.tree_leaves(model.params) if isinstance(leaf, Tensor))
    assert not found.problems and found.weights is not None and found.weights.held == held
    whole = outlook("small", CPU, "bfloat16", shapes={"small": config})
    assert whole.ranks == 1 and whole.weights is not None and held < whole.weights.held


def test_the_whole_model_runs_where_it_fits() -> None:
    model = random_model(tiny_config())

    def raising(error: Exception) -> Callable[[], nv.Model]:
        def load() -> nv.Model:
            raise error

        return load

    no_room, full = raising(nv.OutOfPagesError("on cuda:0: no room")), raising(torch.OutOfMemoryError("full"))
    found, why = whole_model([no_room, full, lambda: model], 8)
    assert found is not None and not why and found.final.shape == (8, 32) and found.logits.shape == (8, 2)
    found, why = whole_model([full, no_room], 8)
    assert found is None and why == "on cuda:0: no room"
    assert parts_text(2, None, why) == "The parts of 2 ranks were not compared with the whole model: on cuda:0: no room"
    with pytest.raises(ValueError, match="a bug"):
        whole_model([raising(ValueError("a bug")), lambda: model], 8)


def test_results_that_differ_do_not_hold() -> None:
    final, logits, tokens = torch.ones(3, 4, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64), torch.tensor([[1, 2]] * 3)
    whole = Exact(device="here", final=final, logits=logits, tokens=tokens, routed=False)
    assert compare_parts(whole, whole).holds and compare_parts(whole, whole).same == 3
    for name, value in (("final", final * (1 + 3 * BOUND)), ("logits", logits * (1 + 3 * BOUND)), ("final", final * torch.nan)):
        parts = Exact(**{"device": "here", "final": final, "logits": logits, "tokens": tokens.flip(1), "routed": False, name: value})
        report = compare_parts(parts, whole)
        assert not report.holds and not report.same and "are NOT the whole model" in parts_text(2, report, "")


def test_the_maker_of_random_weights_is_found_by_its_name() -> None:
    assert f"{random_weights.__module__}:{random_weights.__name__}" == ranked.MAKER
