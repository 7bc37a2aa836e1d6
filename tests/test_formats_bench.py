"""`benchmarks/formats.py`: run end to end with a few cases, and its arithmetic by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import formats
from nanovllm.testing.models import tiny_config

pytestmark = pytest.mark.unhooked  # the hook makes an engine ten times as slow


def test_the_program_measures_formats_and_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(hidden_size=256, head_dim=64, intermediate_size=384, vocab_size=300, tie_word_embeddings=True)
    experts = tiny_config("Qwen3MoeForCausalLM", hidden_size=128, head_dim=32, vocab_size=300)
    assert experts.moe is not None
    more = replace(experts, moe=replace(experts.moe, num_experts=40, intermediate_size=128))
    monkeypatch.setattr(formats, "SHAPES", {"plain": config, "experts": more})
    monkeypatch.setattr(formats, "WIDTHS", {"plain": 1, "experts": 1})
    file = tmp_path / "formats.json"
    names = ["bfloat16", "int8", "int4", "fp8 KV"]
    formats.main(["--share", "0", "--formats", *names, "--shapes", "plain", "experts", "--output", str(file)])
    found = json.loads(file.read_text())
    assert {"commit", "versions", "command", "cpu"} <= set(found)
    assert list(found["formats"]) == names
    for each in found["formats"].values():
        assert each["cases"] == 2 * len(formats.RECALL) == 2 * len(each["by_measure"])
        assert each["recall"] >= 0.8 and abs(each["points"]) <= 20
    base, eight, four, kv = (found["formats"][name] for name in names)
    assert base["worst_layer"] == base["divergence"] == base["points"] == base["changed"] == 0
    assert base["same_tokens"] == base["tokens"] > four["same_tokens"] and "bytes" not in kv
    rounded = [
        (eight, four),
        *((found["shapes"][name]["formats"]["int8"], found["shapes"][name]["formats"]["int4"]) for name in formats.SHAPES),
    ]
    for one, other in rounded:
        assert one["bytes"] > other["bytes"] and 0 < one["worst_layer"] < other["worst_layer"] and one["divergence"] < other["divergence"]
    assert [each["layers"] for each in found["shapes"].values()] == [1, 1]


def test_recall_by_hand() -> None:
    base = {"a": [True, True, False, True], "b": [True, False, False, True]}
    found = formats.recall({"a": [True, False, False, False], "b": [True, True, False, True]}, base)
    assert found["recall"] == 0.5 and found["cases"] == 8 and found["changed"] == 3 and found["by_measure"] == {"a": 0.25, "b": 0.75}
    assert found["points"] == -12.5
    assert found["points_error"] == pytest.approx(100 * ((3 / 8 - 1 / 64) / 8) ** 0.5, abs=0.01)
