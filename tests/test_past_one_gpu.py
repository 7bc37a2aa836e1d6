"""`benchmarks/past_one_gpu.py`: its bytes are those of recorded runs, its rates are those of a calculation by hand, and its file is new."""

import json
from pathlib import Path

import pytest

from benchmarks import past_one_gpu as past
from benchmarks import write_docs
from benchmarks.past_one_gpu import KIB, MIB, SHAPES, Shape

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
EIGHT = Shape(layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=12288, vocab=151936)


@pytest.mark.parametrize(("name", "dtype"), [("h200-8b.json", "bf16"), ("h200-8b-fp8.json", "fp8")])
def test_the_bytes_are_those_that_recorded_runs_count(name: str, dtype: str) -> None:
    rows = {row["key"]: row for row in json.loads((RESULTS / name).read_text())["workloads"]}
    for batch, (count, length, reply) in past.BATCHES.items():
        read = past.gpu_bytes(EIGHT, dtype, 1, count, length + reply / 2)
        assert read == rows[f"{batch}_decode_tok_s"]["step_bytes"]


def test_experts_are_as_many_as_a_measurement_touched() -> None:
    table = json.loads((RESULTS / "h200-experts.json").read_text())["table"]
    for rows in (1, 2, 8, 16, 64):
        assert past.read_experts(SHAPES["Qwen3-235B-A22B"], rows) == pytest.approx(table[f"qwen3-30b-a3b, {rows} tokens"]["hit"], rel=0.03)
    assert past.read_experts(SHAPES["Llama-3.3-70B"], 64) == 1


def test_the_models_have_the_sizes_of_their_names() -> None:
    sizes = {name: sum(past.matrix_bytes(shape, "bf16", float("inf"))[:2]) / 2e9 for name, shape in SHAPES.items()}
    assert sizes["Llama-3.3-70B"] == pytest.approx(69.5, abs=0.1) and sizes["Qwen3-235B-A22B"] == pytest.approx(234.5, abs=0.1)
    assert past.flops(SHAPES["Qwen3-235B-A22B"], 1) / 2 == pytest.approx(21.6e9, rel=0.02)  # 22B with the embedding


def test_one_rate_by_hand() -> None:
    """Llama 70B in bfloat16 on two H200s, one sequence: 128 tokens in, 512 out."""
    layer = 8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672
    read = (80 * layer * 2 + 8192 * 128256 * 2) / 2 + (128 + 256) * 80 * 2 * 4 * 128 * 2
    limit = read / 4397.4e9
    recorded = json.loads((RESULTS / "h200x2-8b.json").read_text())["all_reduce_us"]
    reduced, least = recorded["add_push"][str(16 * KIB)] / 1e6, min(recorded["sum_push"].values()) / 1e6
    seconds = limit / 0.863 + 160 * reduced + least
    row = next(row for row in past.derived()["rows"] if (row["dtype"], row["card"], row["gpus"], row["batch"]) == ("bf16", "H200", 2, "b1"))
    assert row["share_tok_s"] == pytest.approx(1 / seconds, abs=0.06)
    layered = limit + 80 * (4.002e-3 * (1 - 0.863) / 36) + 160 * reduced + least
    assert row["layer_tok_s"] == pytest.approx(1 / layered, abs=0.06)
    assert row["gpu_gb"] == round(read / 1e9, 2) and row["all_reduce_by"] == "with the residual" and row["all_reduce_from"] == "measured"


def test_a_gpu_has_at_least_one_kv_head() -> None:
    shape = SHAPES["Qwen3-235B-A22B"]
    assert [past.kv_bytes(shape, gpus) / (94 * 2 * 128 * 2) for gpus in (1, 2, 4, 8)] == [4, 2, 1, 1]


def test_sums_are_measured_for_two_and_four_gpus_and_published_for_eight() -> None:
    assert past._between({256 * KIB: 3.0, 512 * KIB: 4.0}, 384 * KIB) == pytest.approx(3.5)
    for (card, gpus), file in past.SUMS.items():
        known = json.loads((RESULTS / file).read_text())
        assert known["gpus"] == gpus and card in known["gpu"]
        for form in past.FORMS.values():
            found = past.all_reduce(64 * KIB, card, gpus, form)
            assert found == {"us": known["all_reduce_us"][form][str(64 * KIB)], "way": past.WAYS[form], "from": "measured"}
        assert past.all_reduce(1, card, gpus, "add_push")["us"] == known["all_reduce_us"]["add_push"][str(2 * KIB)]
    assert past.all_reduce(MIB, "H100", 4, "add_norm_push")["from"] == "extrapolated"
    assert past.all_reduce(8 * KIB, "H200", 8, "add_push") == {"us": 5.7, "way": "one-shot, sglang#2904", "from": "published"}
    beyond = past.all_reduce(MIB, "H100", 8, "add_norm_push")
    assert beyond["from"] == "extrapolated" and beyond["us"] == pytest.approx(16.7 + (16.7 - 7.8) * 512 / 448)


def test_measured_rates_are_near_the_derived_ones() -> None:
    rows = past.derived()["measured"]
    assert len(rows) == 2 * len(past.MEASURED)
    for row in rows:
        recorded, (low, high) = json.loads((RESULTS / row["file"]).read_text()), row["derived_tok_s"]
        assert recorded["gpus"] == row["gpus"] and row["card"] in recorded["gpu"]
        assert recorded["model"].lower().startswith(row["model"].lower())
        assert ("fp8" in (recorded["quantization"] or "")) == (row["dtype"] == "fp8")
        assert row["tok_s"] == recorded[f"{row['batch']}_decode_tok_s"]
        assert (0.9 if row["card"] == "H100" else 0.86) * low < row["tok_s"] < 1.01 * high


def test_a_rate_by_one_rank_alone(tmp_path: Path) -> None:
    """A step of Llama 70B of 5 ms alone, in which each of 160 launches takes 1.5 us."""
    for file in RESULTS.glob("h*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    for name in past.ALONE.values():
        (tmp_path / name).unlink(missing_ok=True)
    assert past.derived(tmp_path)["alone"] == []
    sums = {form: {str(16 * KIB): 1.5, str(MIB): 3.0} for form in past.FORMS.values()}
    alone = {"commit": "abc", "b1_decode_tok_s": 200, "b64_decode_tok_s": 8000, "all_reduce_us": sums}
    (tmp_path / "h200-70b-of-8.json").write_text(json.dumps(alone))
    result = past.derived(tmp_path)
    one, many = result["alone"]
    told = ("Llama-3.3-70B", "bf16", "H200", 8, "b1")
    (row,) = (row for row in result["rows"] if tuple(row[key] for key in ("model", "dtype", "card", "gpus", "batch")) == told)
    assert one["alone_ms"] == 5 and one["beyond_ms"] == pytest.approx(160 * (row["all_reduce_us"] - 1.5) / 1e3, abs=0.006)
    assert one["tok_s"] == pytest.approx(1e3 / (one["alone_ms"] + one["beyond_ms"]), rel=0.002) and one["measured_tok_s"] is None
    assert many["batch"] == "b64" and many["alone_ms"] == 8
    assert "| Llama-3.3-70B | bf16 | 8 H200 | b1 | 5.00 |" in write_docs.past_alone(result)


def test_what_does_not_fit_is_said() -> None:
    result = past.derived()
    short = {(one["model"], one["dtype"], one["card"], one["gpus"]) for one in result["fits"] if one["kv_tokens"] <= 0}
    assert short == {("Llama-3.3-70B", "bf16", "H100", 2), ("Qwen3-235B-A22B", "fp8", "H100", 2)}
    assert {(row["model"], row["dtype"], row["card"], row["gpus"]) for row in result["rows"] if not row["fits"]} == short
    assert result["usable_gb"]["H100"] < 0.9 * 80


def test_more_gpus_are_faster_and_less_than_in_proportion() -> None:
    rates = {(row["model"], row["dtype"], row["card"], row["batch"], row["gpus"]): row["share_tok_s"] for row in past.derived()["rows"]}
    for (*case, gpus), rate in rates.items():
        if gpus > 2:
            assert 1 < rate / rates[*case, gpus // 2] < 2


def test_the_file_is_what_the_script_gives() -> None:
    recorded = json.loads((RESULTS / "past-one-gpu.json").read_text())
    assert recorded == json.loads(json.dumps(past.derived())), "run benchmarks/past_one_gpu.py"
