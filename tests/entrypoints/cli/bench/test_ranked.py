"""`nanovllm bench --tensor-parallel-size`: the engine of two processes is measured, and its roofline is that of one rank's part."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nanovllm as nv
from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cli.bench import command, ranked
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES
from nanovllm.entrypoints.cli.bench.ranked import ONE_DEVICE
from nanovllm.entrypoints.cli.bench.roofline import Ceiling, decode_work, held_bytes, limit_seconds, num_weights
from nanovllm.entrypoints.cli.bench.workloads import WORKLOADS
from nanovllm.models.common.sharding import sharded_config, sharded_params
from nanovllm.testing.models import random_model, save_hf_folder, tiny_config
from tests.entrypoints.ranks.hooks import SMALL

TWO = ["--device", "cpu", "--tensor-parallel-size", "2"]


@pytest.mark.unhooked  # hundreds of steps
def test_two_ranks_run_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_hf_folder(tmp_path / "weights", tiny_config(max_position_embeddings=1024))
    where = ["bench", "--model", str(folder), "--repeats", "1", "--json", "--which", "b1"]
    results = []
    for ranks in ([], TWO[2:]):
        assert cli.main([*where, *TWO[:2], *ranks]) == 0
        results.append(json.loads(capsys.readouterr().out))
    one, two = results
    assert "ranks" not in one and two["ranks"] == 2 and two["ranks_init_s"] > 0 and "init_s" not in two
    assert two["b1_decode_tok_s"] > 0 and two["roofline"]["read_gb_s"] > 0
    whole, part = (result["workloads"][0]["step_bytes"] for result in results)
    assert whole / 2 <= part < 0.6 * whole  # a matrix that is not divided is read by both


@pytest.mark.unhooked
def test_two_ranks_run_random_weights(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL)
    monkeypatch.setattr(ranked, "MAKER", "tests.entrypoints.ranks.hooks:small_weights")  # other processes know no such shape
    assert cli.main(["bench", "--model", "small", *TWO, "--which", "b1,host", "--repeats", "1"]) == 0
    told = capsys.readouterr().out
    assert "small (random weights), float32, 2 ranks, each on" in told and "b1 " in told and "host time of a decode step" in told


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--which", "b1,start"], f"the workload 'start' cannot be run: {ONE_DEVICE}"),
        (["--which", "bare"], f"the workload 'bare' cannot be run: {ONE_DEVICE}"),
        (["--peer", "transformers"], "--peer transformers: it runs on one device"),
        (["--model", "tiny", "--tensor-parallel-size", "3", "--which", "b1"], "3 ranks cannot share num_heads=4"),
        (["--model", "gpt2-xl", "--which", "b1", "--dtype", "bfloat16"], "2 ranks cannot share num_heads=25"),
    ],
)
def test_what_ranks_cannot_run_is_refused(
    arguments: list[str], match: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "measure_ceiling", lambda *_: Ceiling(read_bytes=1.0, flops=1.0))
    assert cli.main(["bench", "--model", "tiny", *TWO, *arguments]) == 2
    captured = capsys.readouterr()
    assert not captured.out and match in captured.err


def test_starts_are_left_out_if_nobody_asked_for_them() -> None:
    which, left = command.find_workloads(None, "qwen3-0.6b", cuda=True, ranks=2)
    assert which == [one for one in WORKLOADS if one not in ("start", "bare")]
    assert left == [{"workload": one, "why": ONE_DEVICE} for one in ("start", "bare")]


def test_a_rank_does_its_part_of_the_work() -> None:
    model = random_model(replace(tiny_config(), vocab_size=131))
    work, ceiling = decode_work([128], [2]), Ceiling(read_bytes=1e9, flops=1e18)
    whole = held_bytes(model.params, model.config, torch.float32)
    parts, limits = [], []
    for rank in range(2):
        mesh = nv.Mesh(size=2, rank=rank, group=0)
        config = sharded_config(model.config, mesh)
        params = sharded_params(model.params, model.config, mesh)
        parts.append(held_bytes(params, config, torch.float32))
        limits.append(limit_seconds(config, torch.float32, work, ceiling, parts[-1]))
        assert num_weights(config, 0)[1] == 66 * model.config.hidden_size
    assert parts[0] == parts[1] and limits[0] == limits[1]
    assert parts[0].dense * 2 == whole.dense and parts[0].token * 2 == whole.token
    assert parts[0].head == 66 * model.config.hidden_size * 4  # 131 rows and one of zeros
    assert limits[0] == pytest.approx(limit_seconds(model.config, torch.float32, work, ceiling, whole) / 2, rel=0.01)
