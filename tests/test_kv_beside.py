"""`benchmarks/kv_beside.py` measures what KV that moves costs running replies, and workloads that do not need it."""

import json
from pathlib import Path

import pytest

from benchmarks import kv_beside
from nanovllm.testing.models import save_hf_folder, tiny_config

pytestmark = pytest.mark.unhooked  # it measures


def test_the_figures(tmp_path: Path) -> None:
    model = str(save_hf_folder(tmp_path / "model", tiny_config(max_position_embeddings=1024)))
    output = tmp_path / "beside.json"
    sizes = ["--prompt", "320", "--visitors", "8", "--rows", "2", "--reply", "60", "--seconds", "0.4", "--repeats", "1", "--rate", "1e9"]
    options = ["--model", model, "--device", "cpu", *sizes, "--host-kv-gib", "0.05", "--commit", "abc", "--output", str(output)]
    kv_beside.main([*options, "--workloads", "b1", "--pool", "2048"])
    told = json.loads(output.read_text())
    assert told["commit"] == "abc" and "--rows 2 --reply 60 --prompt 320" in told["command"]
    gaps, workloads = told["kv_beside"]["gaps"], told["kv_beside"]["workloads"]
    assert list(gaps) == ["alone", "device", "host", "run"]
    assert all(way["gap_ms"]["p99"] >= way["gap_ms"]["p50"] > 0 and way["reply_tokens_per_second"] > 0 for way in gaps.values())
    assert "visitors" not in gaps["alone"] and all(gaps[way]["visitors"] > 0 for way in ("device", "host", "run"))
    assert gaps["host"]["in_gb_per_second"] > 0 and not any(gaps[way]["in_gb_per_second"] for way in ("alone", "device", "run"))
    assert all(workloads[name].keys() == {"b1_decode_tok_s", "b1_ttft_ms"} for name in ("without", "with", "slower_percent"))
    with pytest.raises(SystemExit):
        kv_beside.main([*options, "--which", "nothing"])
