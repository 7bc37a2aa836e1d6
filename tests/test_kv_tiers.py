"""`benchmarks/kv_tiers.py` measures a prompt whose KV comes back from host memory, and users who come back at random."""

import json
from pathlib import Path

import pytest

from benchmarks import kv_tiers
from nanovllm.testing.models import save_hf_folder, tiny_config

pytestmark = pytest.mark.unhooked  # it measures


def test_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_hf_folder(tmp_path / "model", tiny_config(max_position_embeddings=1024)))
    lengths = ["--prompt", "320", "--repeats", "1", "--users", "4", "--history", "96", "--visits", "8", "--turn", "8", "--reply", "4"]
    output = tmp_path / "tiers.json"
    options = ["--model", model, "--device", "cpu", *lengths, "--host-kv-gib", "0.01", "--commit", "abc", "--output", str(output)]
    options += ["--kv-dir", str(tmp_path / "kv"), "--at-once", "2"]
    kv_tiers.main(options)
    told = json.loads(output.read_text())
    assert told["commit"] == "abc" and "--host-kv-gib 0.01" in told["command"]
    first, users = told["kv_tiers"]["first_token_ms"], told["kv_tiers"]["users"]
    assert all(first[name] > 0 for name in ("cold", "device", "host", "lost", "pushing"))
    assert first["disk"] > 0 and first["read_bytes_per_second"] > 0 and first["write_bytes_per_second"] > 0
    assert first["host_pages"] > 0 and first["rates"]["tokens_per_second"] > 0
    assert users["device_only"]["loaded_tokens"] == 0
    needed = [way["prefill_tokens"] + way["reused_tokens"] for way in users.values()]
    assert needed[0] == needed[1] == needed[2] and all(way["visits_per_second"] > 0 for way in users.values())
    assert users["host_memory"]["reused_tokens"] >= users["device_only"]["reused_tokens"]
    disk, lines = users["disk"]["disk"], [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert disk["measured_read_bytes_per_second"] > 0 and not disk["errors"]
    ended = [name for name, found in lines if "phase" not in json.loads(found)]
    assert ended == ["first_token_ms", "device_only", "host_memory", "disk"]
    phases = [json.loads(found).get("phase") for name, found in lines if name == "disk"]
    assert list(dict.fromkeys(phases)) == ["start", "histories", "visits", None]
    kv_tiers.main([*options, "--which", "users", "--ways", "device_only"])
    told = json.loads(output.read_text())
    assert list(told["kv_tiers"]) == ["users"] and list(told["kv_tiers"]["users"]) == ["device_only"]
    assert told["command"].endswith("--ways device_only --which users")
    noted = list[dict]()
    progress = kv_tiers.Progress(noted.append)
    progress.tell("visits", 3, 8)
    progress.tell("visits", 4, 8)
    assert [found["done"] for found in noted] == [3], "a phase is noted when it begins, and then every few seconds"
    with pytest.raises(SystemExit):
        kv_tiers.main([*options, "--which", "nothing"])
    assert "cannot measure nothing; choose from first_tokens, users" in capsys.readouterr().err
