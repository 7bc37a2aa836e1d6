"""docs/performance.md: its figures are those of the files in bench/results."""

import json
import sys
from pathlib import Path

from nanovllm.bench.report import markdown

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import bench_docs  # noqa: E402

RESULTS = ROOT / "bench/results"


def test_the_document_says_what_was_measured() -> None:
    text = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert bench_docs.filled(text, RESULTS) == text, "run tools/bench_docs.py"
    found = bench_docs.pictures(text, RESULTS)
    assert found
    for name, picture in found.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == picture, "run tools/bench_docs.py"


def test_a_block_is_filled_again_and_again(tmp_path: Path) -> None:
    result = json.loads((RESULTS / "h200-bench.json").read_text())
    (tmp_path / "one.json").write_text(json.dumps(result))
    text = "before\n<!-- bench: one.json -->\nbygone\n<!-- /bench -->\nbetween\n<!-- bench: two.json -->\n<!-- /bench -->\nafter"
    once = bench_docs.filled(text, tmp_path)
    assert markdown(result) in once and "bygone" not in once
    assert once.startswith("before\n<!-- bench: one.json -->\n![") and once.endswith("No figures yet.\n<!-- /bench -->\nafter")
    assert bench_docs.filled(once, tmp_path) == once
    assert set(bench_docs.pictures(text, tmp_path)) == {"performance-one.svg"}
