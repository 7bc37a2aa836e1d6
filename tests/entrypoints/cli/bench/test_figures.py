"""What `nanovllm bench` says of a workload: bytes and limits by hand, tables and pictures from its JSON, growth, other engines."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import nanovllm as nv
from nanovllm.config import EngineConfig, ModelConfig, RopeConfig
from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cli.bench import command, peers, report, scaling, stopwatch, workloads
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.journal import Journal
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, random_weights
from nanovllm.entrypoints.cli.bench.model_shapes import random_model as random_model_of
from nanovllm.entrypoints.cli.bench.plot import decades, draw, number, steps
from nanovllm.entrypoints.cli.bench.roofline import (
    Ceiling,
    decode_bytes,
    decode_work,
    held_bytes,
    limit_seconds,
    measure_ceiling,
    num_weights,
    prompt_bytes,
    prompt_work,
    prompts_and_decode,
    step_bytes,
    weight_bytes,
)
from nanovllm.entrypoints.cli.bench.stopwatch import Engine, host_time
from nanovllm.entrypoints.cli.bench.workloads import WORKLOADS, Measured, Spent, measure
from nanovllm.entrypoints.display.tables import WORDS, aligned
from nanovllm.loading.quantisation.rounding import Rounding, rounded_params
from nanovllm.ops.kv_cache.fp8 import FP8
from nanovllm.ops.linear.quantise import Kind
from nanovllm.testing.models import random_model, save_hf_folder, tiny_config

# By hand: of a layer q 8x4, k and v 2x4 each, o 4x8, gate and up 6x4 each, down 4x6; two layers; a head of 10x4.
SMALL = ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=10, hidden_size=4, intermediate_size=6, num_layers=2, num_heads=4, num_kv_heads=1,
    head_dim=2, rms_norm_eps=1e-6, rope=RopeConfig(), tie_word_embeddings=True,
)  # fmt: skip
LAYERS, HEAD = 2 * (32 + 8 + 8 + 32 + 24 + 24 + 24), 40
TOKEN = 2 * 2 * 2  # layers, keys and values, head_dim of one head
CEILING = Ceiling(read_bytes=1e3, flops=1e5)
MODEL = random_model(tiny_config(max_position_embeddings=1024))
FAST = scaling.Settings(batches=(1, 2, 512), context=24, contexts=(32, 64, 4096), rows=(1, 2), pools=(64, 128), ended=(0, 40), steps=4)


def test_bytes_of_a_step_by_hand() -> None:
    assert num_weights(SMALL, 1) == (LAYERS, HEAD)
    assert num_weights(replace(SMALL, tie_word_embeddings=False), 1) == (LAYERS, HEAD)
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        assert step_bytes(SMALL, dtype, 3, 10) == size * (LAYERS + HEAD + 3 * 10 * TOKEN)
        assert step_bytes(SMALL, dtype, 3, 10, shared=8) == size * (LAYERS + HEAD + (8 + 3 * 2) * TOKEN)


def test_bytes_of_a_real_shape() -> None:
    """Qwen3-0.6B reads 596 million weights a token; its KV takes 112 KiB a token."""
    config = SHAPES["qwen3-0.6b"]
    assert step_bytes(config, torch.bfloat16, 1, 0) == pytest.approx(2 * 596e6, rel=1e-3)
    assert step_bytes(config, torch.bfloat16, 1, 1) - step_bytes(config, torch.bfloat16, 1, 0) == 112 * 1024


def test_quantised_matrices_count_with_the_bytes_of_their_codes_and_scales() -> None:
    whole, moe = SMALL, tiny_config("Qwen3MoeForCausalLM", dtype="bfloat16")
    cases: list[tuple[ModelConfig, Kind, bool]] = [
        (whole, "int8", False),
        (whole, "int8", True),
        (whole, "int4", False),
        (moe, "fp8", True),
    ]
    for config, kind, head in cases:
        model = random_model_of("small", config, device="cpu", dtype="bfloat16")
        plain = held_bytes(model.params, config, model.dtype)
        assert plain.dense + plain.experts + plain.head == weight_bytes(config, torch.bfloat16)
        assert step_bytes(config, torch.bfloat16, 3, 10, held=plain) == step_bytes(config, torch.bfloat16, 3, 10)
        params = rounded_params(model.params, Rounding(kind=kind, head=head))
        held = held_bytes(params, config, model.dtype)
        if config is whole and kind == "int8":  # a byte per code, and 4 per row: of q, k and v 12, of o 4, of gate and up 12, of down 4
            assert (held.dense, held.experts) == (LAYERS + 2 * 4 * (12 + 4 + 12 + 4), 0)
            assert held.head == (HEAD + 10 * 4 if head else 2 * HEAD)
        elif config is whole:  # 128 columns are 64 bytes with a scale of 2, and no matrix has more
            assert held.dense == 2 * (12 + 4 + 12 + 4) * 66
        else:
            each = [w.experts for w in params.layers if w.experts is not None]
            assert held.experts == sum(w.gate_up.nbytes + w.down.nbytes for w in each) and held.experts < 0.7 * plain.experts
            assert config.moe is not None
            share = config.moe.top_k / config.moe.num_experts
            assert weight_bytes(config, torch.bfloat16, 1, held) == held.dense + round(held.experts * share) + held.head
        work = decode_work([9], [3])
        assert decode_bytes(config, torch.bfloat16, work, held) < decode_bytes(config, torch.bfloat16, work) or kind == "int4"
        eight = held_bytes(params, config, FP8)  # of a token and a head one byte per number, and a scale
        assert (held.token, eight.token) == tuple(
            2 * config.num_layers * config.num_kv_heads * (config.head_dim * size + more) for size, more in ((2, 0), (1, 4))
        )
        assert decode_bytes(config, torch.bfloat16, work, eight) == decode_bytes(config, torch.bfloat16, work, held) - work.kv_tokens * (
            held.token - eight.token
        )
        assert prompt_bytes(config, torch.bfloat16, prompt_work([9]), held) == weight_bytes(config, torch.bfloat16, 9, held)


def test_work_adds_up_step_by_step() -> None:
    lengths, counts, shared = [5, 9, 7], [4, 1, 3], 5
    found = decode_work(lengths, counts, shared)
    read = tokens = 0
    for step in range(1, max(counts)):
        rows = [length for length, count in zip(lengths, counts, strict=True) if count > step]
        tokens += len(rows)
        read += shared + sum(length - shared + step for length in rows)
    assert (found.steps, found.tokens, found.kv_tokens) == (3, tokens, read)
    assert decode_bytes(SMALL, torch.float32, found) == 4 * (3 * (LAYERS + HEAD) + read * TOKEN)
    prompts = prompt_work(lengths, 4)
    assert (prompts.prompt_tokens, prompts.num_prompts, prompts.found_tokens) == (1 + 5 + 3, 3, 4)
    assert prompts.pairs == sum(position for length in lengths for position in range(5, length + 1))
    both = prompts_and_decode(lengths, counts, shared)
    assert both == replace(prompt_work(lengths, shared), steps=found.steps, tokens=found.tokens, kv_tokens=found.kv_tokens)


def test_limits_by_hand() -> None:
    read = decode_work([9], [2])
    assert limit_seconds(SMALL, torch.float32, read, CEILING) == 4 * (LAYERS + HEAD + 10 * TOKEN) / 1e3
    many = decode_work([1] * 500, [2] * 500)
    slow = replace(CEILING, flops=1e4)
    assert limit_seconds(SMALL, torch.float32, many, slow) == 2 * (LAYERS + HEAD) * 500 / 1e4  # bound by arithmetic
    prompt = prompt_work([200])
    flops = 2 * LAYERS * 200 + 2 * HEAD + 4 * 2 * 4 * 2 * (200 * 201 // 2)
    assert limit_seconds(SMALL, torch.float32, prompt, CEILING) == flops / 1e5
    warm = prompt_work([501], found=500)
    assert limit_seconds(SMALL, torch.float32, warm, CEILING) == 4 * (LAYERS + HEAD + 500 * TOKEN) / 1e3


def test_the_ceiling_is_that_of_a_machine() -> None:
    found = measure_ceiling(torch.device("cpu"), torch.float32)
    assert 1e8 < found.read_bytes < 1e14 and 1e8 < found.flops < 1e15


def test_a_row_of_the_report_by_hand() -> None:
    work = decode_work([9], [3])
    one = Measured(workload="b1", what="", key="b1_decode_tok_s", work=work, tokens=2, seconds=20.0, steps=2, host=0.25)
    row = report.row(one, SMALL, torch.float32, CEILING)
    limit = limit_seconds(SMALL, torch.float32, work, CEILING)
    assert row["step_bytes"] == 4 * (LAYERS + HEAD) + 4 * TOKEN * (10 + 11) // 2
    assert (row["tok_s"], row["step_ms"], row["host_percent"]) == (0.1, 10000.0, 25.0)
    assert row["roofline_percent"] == round(100 * limit / 20, 1) and row["roofline_tok_s"] == round(2 / limit, 1)
    first = Measured(workload="b1", what="", key="b1_ttft_ms", work=prompt_work([9]), tokens=1, seconds=0.5)
    row = report.row(first, SMALL, torch.float32, CEILING)
    assert row["step_ms"] == first.figure == 500.0 and "tok_s" not in row and row["host_percent"] is None


def test_an_engine_tells_what_its_calls_cost() -> None:
    ours = Engine(MODEL, num_pages=64)
    replies = ours.generate([[1, 2, 3], [4, 5]], [5, 2], 0.0)
    assert list(map(len, replies)) == [5, 2]
    assert ours.spent.steps == 4 and ours.spent.model_seconds > 0
    assert ours.generate([[1, 2, 3]], [5], 0.0) == replies[:1] and ours.spent.steps == 8
    assert Spent(steps=3, model_seconds=2.0).less(Spent(steps=1, model_seconds=0.5)) == Spent(steps=2, model_seconds=1.5)


def test_a_wrong_number_of_tokens_is_no_figure() -> None:
    with pytest.raises(AssertionError, match="another number of tokens"):
        {one.key: one.figure for one in measure(lambda prompts, counts, _: [[0] * count for count in counts[:-1]], ["b1"], 100, 1)}


class Idle:
    """A peer that does nothing, in a little time."""

    name = "idle"

    def __init__(self, model: nv.Model, source: str):
        assert model.name == source.rpartition("/")[2] == "weights"

    def generate(self, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[list[int]]:
        time.sleep(1e-4 * max(max_tokens))
        return [[0] * count for count in max_tokens]


def test_every_workload_has_its_keys() -> None:
    """An engine that does nothing runs all of them; peers are compared by these keys."""
    found = {one.key: one.figure for one in measure(Idle(replace(MODEL, name="weights"), "weights").generate, WORKLOADS, 151936, 1)}
    rates = [f"b{size}_{what}" for size in (1, 8, 64) for what in ("decode_tok_s", "ttft_ms")]
    many = ["offline_tok_s", "ttft_16k_cold_ms", "ttft_16k_warm_ms", "shared16k_x32_tok_s", "fewshot_16x8_tok_s", "burst_300_tok_s"]
    assert list(found) == [*rates, *many, *(f"ttft_{length}_ms" for length in (64, 256, 768, 1500, 3000))]


def test_the_longest_request_of_each_workload() -> None:
    """No request of a workload is longer than what a model is asked for, and one of them is as long, but where lengths are drawn."""
    for name in workloads.TIMED:
        longest = 0

        def generate(prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[list[int]]:
            nonlocal longest
            longest = max(longest, *(len(prompt) + count for prompt, count in zip(prompts, max_tokens, strict=True)))
            return [[0] * count for count in max_tokens]

        {one.key: one.figure for one in measure(generate, [name], 151936, 1)}
        assert 0.95 * workloads.LONGEST[name] < longest <= workloads.LONGEST[name] and (
            name in ("offline", "fewshot", "burst") or longest == workloads.LONGEST[name]
        )
    needed = workloads.LONGEST["host"]
    drawn = []
    for most in (needed + 100, needed, needed - 1):
        state, _ = host_time(MODEL, nv.init_state(MODEL, num_pages=256, max_model_len=most), 2)
        drawn.append(state.stats.decode_tokens)
    assert drawn[0] == drawn[1] > drawn[2]


def test_workloads_that_are_too_long_for_a_model() -> None:
    """Those of the defaults are left out, those that were asked for refused; TinyLlama's context takes not all."""
    which, left = command.find_workloads(None, "tinyllama-1.1b", cuda=True)
    long = {"prefix": "16,672", "ttft": "3,001"}
    assert which == [name for name in WORKLOADS if name not in long]
    assert left == [
        {"workload": name, "why": f"its requests take {length} tokens, the context of tinyllama-1.1b has 2,048"}
        for name, length in long.items()
    ]
    assert command.find_workloads(None, "qwen3-0.6b", cuda=True) == (list(WORKLOADS), [])
    with pytest.raises(
        nv.InvalidRequestError, match=r"'prefix' cannot be run: its requests take 16,672 tokens, .*tinyllama-1.1b has 2,048"
    ):
        command.find_workloads("b1,prefix", "tinyllama-1.1b", cuda=True)


@pytest.mark.unhooked
def test_a_short_context_is_told_before_weights_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_hf_folder(tmp_path / "weights", tiny_config(max_position_embeddings=400))
    options = ["bench", "--model", str(folder), "--device", "cpu", "--repeats", "1", "--output", str(tmp_path / "run.json")]
    with monkeypatch.context() as patch:
        patch.setattr(command, "find_model", lambda *_: pytest.fail("weights were made"))
        assert cli.main([*options, "--which", "b1,host"]) == 2
    refused = capsys.readouterr().err
    assert "'b1'" in refused and "640 tokens" in refused and "has 400" in refused and "host" not in refused
    assert cli.main(options) == 0
    captured = capsys.readouterr()
    told = f"left out: b1 (its requests take 640 tokens, the context of {folder} has 400)"
    assert captured.err.startswith(f"{told}\n") and told in captured.out
    result = json.loads((tmp_path / "run.json").read_text())
    assert [one["workload"] for one in result["left_out"]] == ["b1"] and f"- {told}" in report.markdown(result)
    assert {row["workload"] for row in result["workloads"]} == {"b8"} and "b1_host_us" in result


@pytest.fixture(scope="module")
def grown() -> dict[str, Any]:
    measured = Engine(MODEL, num_pages=256, max_num_seqs=16)
    curves = dict(scaling.grow(measured, Ceiling(read_bytes=1e10, flops=1e11), FAST))
    assert not measured.state.running and not measured.state.waiting
    nv.check(measured.state)
    assert list(curves) == ["batch", "context", "pool", "ended"]
    assert curves["batch"].batch and not curves["batch"].context and curves["pool"].context == curves["ended"].context
    return curves["ended"].as_json()


def test_growth_measures_what_fits(grown: dict[str, Any]) -> None:
    assert [(p["rows"], p["context"]) for p in grown["batch"]] == [(1, 24), (2, 24)]  # 512 rows have no room
    assert [(p["rows"], p["context"]) for p in grown["context"]] == [(1, 32), (1, 64), (2, 32), (2, 64)]
    assert [(one["curve"], one["rows"], one["context"]) for one in grown["left_out"]] == [
        ("batch", 512, 24), ("context", 1, 4096), ("context", 2, 4096)
    ]  # fmt: skip
    lines = report.left_out({"growth": grown})
    assert lines[0] == "left out: growth with the batch at 512 rows of 24 tokens (the engine runs at most 16 rows)"
    assert "with the context at 1 row of 4,096 tokens (with its steps a row takes 4,1" in lines[1] and "has 1,024)" in lines[1]
    for point in (*grown["batch"], *grown["context"]):
        assert 0 < point["host_us"] < point["step_us"] and point["limit_us"] > 0
        assert point["step_bytes"] == step_bytes(MODEL.config, MODEL.dtype, point["rows"], point["context"])
        assert point["tok_s"] == pytest.approx(1e6 * point["rows"] / point["step_us"], rel=1e-2)
    assert [p["num_pages"] for p in grown["pool"]] == [64, 128]
    assert [(p["ended"], p["num_cached"]) for p in grown["ended"]] == [(0, 0), (40, 80)]  # two pages each


def test_a_point_fits_just_as_far_as_the_engine_goes() -> None:
    """What is said of a point is so: one page, one token or one row less of an engine and it would not fit."""
    rows, length, steps = 3, 40, 8
    whole = length + stopwatch.room_for(rows, length, steps, 64)
    pages = rows * -(-(whole + 64) // 16)
    limits = EngineConfig(num_pages=pages, page_size=16, max_model_len=whole, max_num_seqs=rows, max_num_batched_tokens=64, seed=0)
    assert scaling.obstacle(limits, rows, length, steps) is None
    for less, told in (
        ({"num_pages": pages - 1}, f"its KV takes {pages} pages, the pool has {pages - 1}"),
        ({"max_model_len": whole - 1}, f"with its steps a row takes {whole} tokens, the context has {whole - 1}"),
        ({"max_num_seqs": rows - 1}, f"the engine runs at most {rows - 1} rows"),
    ):
        assert scaling.obstacle(replace(limits, **less), rows, length, steps) == told


@pytest.mark.unhooked  # hundreds of steps, which the hook makes five to nine times as long
def test_host_time_does_not_follow_the_pool() -> None:
    """A pool a hundred times as large, and hundreds of ended requests, cost the host no more: loosely, since machines are shared."""
    settings = replace(FAST, steps=24)
    least = [min(scaling.host_point(*where, settings).host_us for _ in range(2)) for where in ((1 << 9, 0), (1 << 16, 0), (1 << 16, 500))]
    assert max(least) < 4 * least[0]


def full(grown: dict[str, Any]) -> dict[str, Any]:
    """A run's object with everything in it; a workload that a peer did not run, and one whose share is above the roofline."""
    rows = []
    for key, work, seconds in (("b1_decode_tok_s", decode_work([9], [3]), 20.0), ("ttft_16k_cold_ms", prompt_work([9]), 1e-5)):
        one = Measured(workload="<b1>", what="1 & 2", key=key, work=work, tokens=max(1, work.tokens), seconds=seconds, steps=2, host=0.2)
        rows.append(report.row(one, SMALL, torch.float32, CEILING))
    figures = {"b1_step_us": 7.5, "b1_host_us": 2.5, "roofline": report.ceiling_json(CEILING), "workloads": rows, "growth": grown}
    return record(MODEL, figures | {"peers": {"other": {"b1_decode_tok_s": 0.05}}}, "nanovllm bench --json")


def test_tables_are_aligned(grown: dict[str, Any]) -> None:
    result = full(grown)
    text = report.text(result)
    for title, head, rows in report.sections(result):
        assert all(len(cells) == len(head) for cells in rows) and title in text
        lines = aligned(head, rows)
        if head[-1] not in WORDS:
            assert len({len(line) for line in lines}) == 1, lines
    rates = next(rows for _, head, rows in report.sections(result) if head[0] == "workload")
    assert rates[0][0] == "<b1>" and rates[0][-2:] == ("20%", "0")
    document = report.markdown(result | {"command": "nanovllm bench --which b1 --output a/b.json --json"})
    assert report.HOST in text and "| workload |" in document and "(`nanovllm bench --which b1`)" in document
    assert "workload" not in report.text(record(MODEL, {}, ""))


def test_pictures_are_svg(grown: dict[str, Any]) -> None:
    result = full(grown)
    for some in (result, {k: v for k, v in result.items() if k != "growth"}, {k: v for k, v in result.items() if k != "workloads"}):
        root = ElementTree.fromstring(draw(some))
        assert root.tag.endswith("svg")
        wide, high = float(root.get("width", 0)), float(root.get("height", 0))
        for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
            x, y, w, h = (float(rect.get(name, 0)) for name in ("x", "y", "width", "height"))
            assert 0 <= x <= x + w <= wide and 0 <= y <= y + h <= high
        lines = [line.get("points", "").split() for line in root.iter("{http://www.w3.org/2000/svg}polyline")]
        assert all(0 <= float(x) <= wide and 0 <= float(y) <= high for points in lines for x, y in (p.split(",") for p in points))
        assert len(lines) > 8 or "growth" not in some


def test_axes() -> None:
    assert decades(3, 700) == [1, 10, 100, 1000] and decades(10, 10) == [10, 100]
    assert steps(12) == [0, 2, 4, 6, 8, 10, 12] and steps(0.9) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    for high in (0.013, 1, 2.1, 5, 9.99, 47, 1234):
        assert 3 <= len(steps(high)) <= 8 and steps(high)[-1] >= high > steps(high)[-2]
    assert [number(n) for n in (0.25, 12, 256, 1000, 1024, 32768, 1 << 20, 10**6, 1500)] == [
        "0.25", "12", "256", "1k", "1k", "32k", "1M", "1M", "1,500",
    ]  # fmt: skip


@pytest.mark.unhooked  # hundreds of steps, which the hook makes five to nine times as long
def test_bench_prints_tables_or_json_and_writes_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(peers.PEERS, "idle", Idle)
    monkeypatch.setattr(scaling, "ON_CPU", replace(FAST, pools=(64,), ended=(4,)))
    folder = save_hf_folder(tmp_path / "weights", tiny_config(max_position_embeddings=1024))
    where = ["--model", str(folder), "--device", "cpu", "--repeats", "1", "--output", str(tmp_path / "new" / "run.json")]
    assert cli.main(["bench", "--which", "b1,growth", "--batches", "1,2", "--contexts", "32", "--peer", "idle", "--json", *where]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((tmp_path / "new/run.json").read_text())
    assert set(result["peers"]["idle"]) == {"b1_decode_tok_s", "b1_ttft_ms"} <= set(result)
    assert [row["workload"] for row in result["workloads"]] == ["b1", "b1"]
    assert result["workloads"][0]["tok_s"] == result["b1_decode_tok_s"] and 0 < result["workloads"][0]["host_percent"] < 100
    assert result["growth"]["settings"]["batches"] == [1, 2] and [p["context"] for p in result["growth"]["context"]] == [32, 32]
    ElementTree.parse(tmp_path / "new/run.svg")
    assert cli.main(["bench", "--which", "growth", "--batches", "1", "--contexts", "32", *where[:6]]) == 0
    assert "growth with the batch" in capsys.readouterr().out
    assert cli.main(["bench", "--which", "growth", "--batches", "1,999", "--contexts", "32", *where[:6]]) == 0
    captured, told = capsys.readouterr(), "left out: growth with the batch at 999 rows of 24 tokens (the engine runs at most 256 rows)"
    assert told in captured.err and told in captured.out


def test_a_run_that_is_killed_keeps_what_it_measured(tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path / "weights", tiny_config(max_position_embeddings=1024))
    file = tmp_path / "new" / "run.json"
    main = "import sys; from nanovllm.entrypoints.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", main, "bench", "--model", str(folder), "--device", "cpu", "--output", str(file)]
    command += ["--which", "b1,b64", "--repeats", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        told = [process.stderr.readline() for _ in range(2)]
        process.kill()
        assert process.stdout.read() == ""
    assert [line.split()[1] for line in told] == ["b1_decode_tok_s", "b1_ttft_ms"]
    result = json.loads(file.read_text())
    assert [row["key"] for row in result["workloads"]] == ["b1_decode_tok_s", "b1_ttft_ms"] and "b64_decode_tok_s" not in result
    assert result["unfinished"] and "cut short" in report.about(result)
    assert draw(result) and report.text(result)


def test_a_journal_replaces_whole_files_and_is_quiet_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, link = tmp_path / "old.json", tmp_path / "link.json"
    file.write_text("the old one")
    link.symlink_to(file)
    journal = Journal(MODEL, "nanovllm bench", "abc", link)
    journal.set({"init_s": 1.0})
    assert file.read_text() == "the old one"
    journal.add({"one": 1})
    assert json.loads(file.read_text()) == journal.result and journal.result["commit"] == "abc"
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            journal.add({"two": 2})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(nv.InvalidRequestError, match="No space"):
            journal.add({})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "old.json"]  # nothing of what failed
    assert json.loads(file.read_text())["one"] == 1 and "two" not in json.loads(file.read_text())
    assert "unfinished" not in journal.end() and json.loads(file.read_text())["two"] == 2
    assert link.is_symlink() and sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "old.json"]
    journal.tell("here")
    Journal(MODEL, "nanovllm bench", "abc").tell("nowhere")
    assert capsys.readouterr().err == "here\n"


@pytest.mark.unhooked  # hundreds of steps, which the hook makes five to nine times as long
def test_bench_rounds_weights_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(SHAPES, "small", tiny_config(max_position_embeddings=1024, dtype="bfloat16"))
    where = ["--model", "small", "--device", "cpu", "--quantization", "int8"]  # in float32, as on every CPU
    file = tmp_path / "run.json"
    assert cli.main(["bench", *where, "--quantize-head", "--which", "b1", "--repeats", "1", "--output", str(file)]) == 0
    result, told = json.loads(file.read_text()), "int8 with a scale per row, rounded while loading, the head too"
    assert result["quantization"] == told and f"float32 and {told}," in capsys.readouterr().out
    params = random_weights("small", device="cpu", quantization="int8", quantize_head=True).params
    held = held_bytes(params, SHAPES["small"], torch.float32)
    assert result["workloads"][1]["step_bytes"] == held.dense + held.head  # a prompt reads each matrix once
    assert cli.main(["bench", *where, "--kv-dtype", "fp8", "--which", "b1", "--repeats", "1", "--output", str(file)]) == 0
    eight = json.loads(file.read_text())
    assert (result["kv_dtype"], eight["kv_dtype"]) == (None, "fp8") and ", KV in fp8," in capsys.readouterr().out
    assert eight["workloads"][0]["step_bytes"] < result["workloads"][0]["step_bytes"]
    assert cli.main(["profile", *where, "--steps", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quantization"] == told.removesuffix(", the head too")
    for one in ("bench", "profile"):
        assert cli.main([one, *where[:4], "--quantize-head"]) == 2
        assert "--quantize-head needs --quantization" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (
            ["--peer", "transformers", "--quantization", "fp8"],
            "rounds nothing; omit --quantization and --fp8-activations, or --peer",
        ),
        (["--peer", "nobody"], "unknown peer 'nobody'; choose from transformers: measure other engines with their own programs"),
        (["--plot", "bench.png"], "ends with .svg"),
        (["--output", "bench.svg"], "ends with .json"),
        (["--output", "/proc/no/run.json"], "/proc/no/run.json cannot be written"),
        (["--output", "/"], "is a folder"),
    ],
)
def test_what_cannot_be_run_is_refused_first(arguments: list[str], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--model", "tiny", "--device", "cpu", *arguments]) == 2
    captured = capsys.readouterr()
    assert not captured.out and match in captured.err


def test_transformers_gives_what_we_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of different lengths, replies of different lengths: padding and cutting change nothing."""
    model = nv.load_model("tiny", device="cpu")
    peer = peers.Transformers(model, "tiny")
    assert model.tokenizer is not None
    prompts = [model.tokenizer.encode(text) for text in ("Once upon a time, there was", "The king")]
    ours = Engine(model, num_pages=64).generate(prompts, [6, 9], 0.0)
    assert peer.generate(prompts, [6, 9], 0.0) == ours
    assert list(map(len, peer.generate(prompts, [3, 2], 0.7))) == [3, 2]
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(nv.InvalidRequestError, match="'transformers' is not installed"):
        peers.Transformers(model, "tiny")
