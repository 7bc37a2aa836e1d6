"""The documents: their figures are those of the files in benchmarks/results."""

import json
import re
from pathlib import Path

from benchmarks import write_docs as bench_docs
from benchmarks.host import CLIENTS
from nanovllm.entrypoints.cli.bench.report import markdown
from nanovllm.loading.quantisation.rounding import Rounding
from nanovllm.ops.linear.quantise import KINDS

ROOT = Path(__file__).resolve().parents[1]

RESULTS = ROOT / "benchmarks/results"


def test_the_documents_say_what_was_measured() -> None:
    shown = {}
    for document in bench_docs.DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        assert bench_docs.filled(text, RESULTS) == text, "run benchmarks/write_docs.py"
        assert "No figures yet" not in text and "cut short" not in text
        found = bench_docs.pictures(text, RESULTS)
        shown |= found
        for name, picture in found.items():
            assert (document.parent / name).read_text(encoding="utf-8") == picture, "run benchmarks/write_docs.py"
    assert {"performance-h200-bench.svg", "performance-cpu-tiny-bench.svg"} <= set(shown)


def test_the_rates_of_several_gpus_are_those_of_their_files() -> None:
    text = (ROOT / "docs/how-to/use-several-gpus.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| \[(\d)\]\(../../benchmarks/results/([\w.-]+)\) \| (.+) \|$", text, re.M)
    assert len(rows) >= 19
    keys = ("b1_decode_tok_s", "b8_decode_tok_s", "b64_decode_tok_s", "offline_tok_s", "prompt_16k_ms")
    for model, gpus, name, cells in rows:
        recorded = json.loads((RESULTS / name).read_text(encoding="utf-8"))
        assert recorded["model"].startswith(model.split()[0].lower())
        assert recorded.get("share_of", recorded.get("gpus", 1)) == int(gpus)
        assert ("share_of" in recorded) == (text.index(name) > text.index("**One rank alone.**")), name
        assert ("FP8" in model) == (recorded.get("quantization") is not None)
        *shown, start = (cell.strip() for cell in cells.split("|"))
        rows_of_bench = recorded.get("workloads", ())  # a file of `nanovllm bench`: the first token of its long prompt is a row
        shares = recorded.get("roofline_percent") or {row["key"]: row["roofline_percent"] for row in rows_of_bench}
        steps = {row["key"]: row["step_ms"] for row in rows_of_bench}
        if "ttft_16k_cold_ms" in steps:
            recorded["prompt_16k_ms"] = steps["ttft_16k_cold_ms"]
        for key, cell in zip(keys, shown, strict=True):
            rate, _, share = cell.partition(" ")
            assert bool(rate) == (key in recorded), (name, key)
            assert not rate or rate == f"{recorded[key]:,.0f}", (name, key)
            assert not share or share == f"({shares[key]:.0f}%)", (name, key)
        assert not start or int(start) == round(sum(recorded["start_s"].values())), name


def test_the_sums_of_several_gpus_are_those_of_their_files() -> None:
    text = (ROOT / "docs/how-to/use-several-gpus.md").read_text(encoding="utf-8")
    files = ("h200x2-8b.json", "h200x4-8b.json", "h100x4-8b.json")
    known = [json.loads((RESULTS / name).read_text(encoding="utf-8"))["all_reduce_us"] for name in files]
    rows = re.findall(r"^\| (\d+) (KiB|MiB) \| (\d+) \| (.+) \|$", text, re.M)
    assert len(rows) >= 5
    for size, unit, count, cells in rows:
        key = str(int(size) << (10 if unit == "KiB" else 20))
        assert int(key) == 8192 * int(count)
        want = [each[form].get(key) for each in known for form in ("add_norm_push", "add_norm_meet")]
        assert [cell.strip() for cell in cells.split("|")] == ["" if us is None else f"{us:.1f}" for us in want], key


def test_blocks_are_filled_again_and_again(tmp_path: Path) -> None:
    """Any number of them, of both kinds, those without a file too."""
    result = json.loads((RESULTS / "h200-bench.json").read_text())
    (tmp_path / "one.json").write_text(json.dumps(result))
    (tmp_path / "three.json").write_text(json.dumps(result | {"model": "another"}))
    names = ("one", "two", "three")
    blocks = [f"<!-- {kind}: {name}.json -->\nbygone\n<!-- /{kind} -->" for kind in ("bench", "brief") for name in names]
    text = "\nbetween\n".join(("before", *blocks, "after"))
    once = bench_docs.filled(text, tmp_path)
    assert markdown(result) in once and markdown(result | {"model": "another"}) in once and "bygone" not in once
    assert once.startswith("before\nbetween\n<!-- bench: one.json -->\n![") and once.count("between\n") == 7
    assert once.count("No figures yet.\n<!-- /bench -->") == once.count("No figures yet.\n<!-- /brief -->") == 1
    assert once.endswith("% |\n<!-- /brief -->\nbetween\nafter")
    assert bench_docs.filled(once, tmp_path) == once
    assert set(bench_docs.pictures(text, tmp_path)) == {"performance-one.svg", "performance-three.svg"}


def test_other_engines_figures_stand_beside_those_of_the_same_card_model_and_dtype(tmp_path: Path) -> None:
    result = json.loads((RESULTS / "h200-bench.json").read_text()) | {"start_s": 7.25, "peers": {"here": {"b1_decode_tok_s": 100.0}}}
    theirs = {"there": {"b1_decode_tok_s": 425.8, "start_s": 74}}
    file, other = tmp_path / "run.json", tmp_path / "some-peers.json"
    file.write_text(json.dumps(result))
    other.write_text(json.dumps({"gpu": result["gpu"], "dtype": result["dtype"], "models": {result["model"]: theirs}}))
    found = bench_docs.read(file)
    assert list(found["peers"]) == ["here", "there (other run)"]
    assert "| here | there (other run) |" in markdown(
        found | {"start": dict.fromkeys(("imports_s", "weights_s", "engine_s", "first_token_s"), 1.0)}
    )
    lines = bench_docs.brief(found).splitlines()
    assert lines[0] == "| workload | nanovllm | here | there | of the roofline |"
    told = ("b1_decode_tok_s", "b8_decode_tok_s")
    ours = [(result[row["key"]], row["roofline_percent"]) for row in result["workloads"] if row["key"] in told]
    (one, share), (eight, of_eight) = ours
    assert lines[2] == f"| decode, 1 sequence (128 tokens in, 512 out) | {one:,.0f} tokens/s | 100 | 426 | {share:.0f}% |"
    assert lines[3] == f"| 8 sequences (256 out) | {eight:,.0f} tokens/s |  |  | {of_eight:.0f}% |"
    assert lines[-1] == "| from the start of a process to its first token, caches warm | 7.2 s | - | 74 s |  |"
    for changed in ({"gpu": "another"}, {"dtype": "float16"}, {"model": "another"}, {"quantization": "int4 in groups of 128"}):
        file.write_text(json.dumps(result | changed))
        assert list(bench_docs.read(file)["peers"]) == ["here"]


def test_other_engines_figures_of_quantised_weights_are_for_the_same_quantisation(tmp_path: Path) -> None:
    here = json.loads((RESULTS / "h200-8b.json").read_text())
    for file in RESULTS.glob("*-peers.json"):
        (tmp_path / file.name).write_text(file.read_text())
    rounded = {kind: Rounding(kind=kind).summary for kind in KINDS}
    rates = {None: {194.3, 174.1}, rounded["fp8"]: {271}, rounded["int4"]: {229}, rounded["int8"]: set[float]()}
    rates |= {"fp8 in blocks of 128 x 128": {271}, "int4 in groups of 128": {229}, Rounding(kind="fp8", head=True).summary: set[float]()}
    for quantization, expected in rates.items():
        (tmp_path / "run.json").write_text(json.dumps(here | {"quantization": quantization}))
        found = bench_docs.read(tmp_path / "run.json").get("peers", {})
        assert {figures["b1_decode_tok_s"] for figures in found.values()} == expected


def test_the_figures_of_other_engines_have_the_names_of_ours() -> None:
    found = json.loads((RESULTS / "h200-peers.json").read_text())
    assert set(found["models"]) == {f"{name} (random weights)" for name in ("qwen3-0.6b", "qwen3-8b")}
    for peers in found["models"].values():
        for figures in peers.values():
            newer = {name for name in bench_docs.BRIEF if name.startswith(("fewshot", "burst", "ttft"))} - {
                "ttft_16k_cold_ms",
                "ttft_16k_warm_ms",
            }
            assert set(bench_docs.BRIEF) - newer <= set(figures) | {"start_s", "bare_start_s"} and set(figures) <= set(bench_docs.BRIEF)


def test_families_stand_in_a_table_of_their_own(tmp_path: Path) -> None:
    rows = {f"{batch}_decode_tok_s": {"tok_s": 1234.5, "step_ms": 1.0, "roofline_percent": 71.6} for batch in ("b1", "b8", "b64")}
    models = {"one": {"decode": "fused kernels in CUDA graphs", "against": ""}, "two": {"decode": "compiled layers", "against": "norms"}}
    models = {name: model | rows for name, model in models.items()}
    result = {"gpu": "card", "dtype": "bfloat16", "commit": "abc", "command": "python it", "models": models}
    (tmp_path / "some.json").write_text(json.dumps(result))
    found = bench_docs.filled("<!-- families: some.json -->\n<!-- /families -->", tmp_path)
    assert "card, bfloat16, commit abc (`python it`)" in found
    assert "| one | 1,234 (72%) | 1,234 (72%) | 1,234 (72%) | fused kernels |" in found and "| compiled layers: norms |" in found
    assert bench_docs.filled(found, tmp_path) == found and not bench_docs.pictures(found, tmp_path)


def test_steps_of_a_program_are_a_table_with_a_row_for_each_way() -> None:
    result = json.loads((RESULTS / "h200-embed.json").read_text())
    head, _, *rows = bench_docs.embed(result).split("\n\n")[0].splitlines()
    assert head.endswith("| 1 row | 8 rows | 64 rows |")
    assert len(rows) == len(bench_docs.EMBED) + len(bench_docs.EMBED_SECONDS)
    captured = next(row for row in rows if "captured by `capture`" in row)
    assert captured.split("|")[2].strip() == f"{result['captured_b1_ms']:.2f}"


def test_the_hosts_time_is_a_table_with_a_row_for_each_kind_of_client(tmp_path: Path) -> None:
    figures = {f"{client}_x{rows}_us": 1000.0 * at + rows + 0.4 for at, client in enumerate(CLIENTS) for rows in (1, 64, 256)}
    result = {"cpu": "x86_64, 1 thread", "versions": {"python": "3.12.3"}, "commit": "abc", "command": "python it", **figures}
    (tmp_path / "some.json").write_text(json.dumps(result))
    found = bench_docs.filled("<!-- host: some.json -->\n<!-- /host -->", tmp_path)
    assert "x86_64, 1 thread, Python 3.12.3, commit abc (`python it`)" in found
    assert "| clients ask for | 1 row | 64 rows | 256 rows |" in found
    for at, client in enumerate(CLIENTS):
        assert f"| {bench_docs.HOST[client]} | {1000 * at + 1:,} | {1000 * at + 64:,} | {1000 * at + 256:,} |" in found
    assert list(bench_docs.HOST) == list(CLIENTS) and bench_docs.filled(found, tmp_path) == found
