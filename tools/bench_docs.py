"""The figures in docs/performance.md, from the JSON files of `nanovllm bench`: tables and pictures between markers.

    nanovllm bench --output bench/results/h200-bench.json
    python tools/bench_docs.py

A block begins with `<!-- bench: NAME.json -->`, a file in bench/results, and ends with `<!-- /bench -->`; what stands between is replaced.
"""

import argparse
import json
import re
from pathlib import Path

from nanovllm.bench.plot import draw
from nanovllm.bench.report import markdown

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- bench: ([\w.-]+)\.json -->\n).*?(<!-- /bench -->)", re.S)
NONE = "No figures yet.\n"


def filled(text: str, results: Path) -> str:
    """The document with the tables of each block's file in `results`, behind its picture, which lies beside the document."""

    def block(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        file = results / f"{name}.json"
        if not file.exists():
            return begin + NONE + end
        picture = f"![Workloads beside the roofline, and how a step's time grows](performance-{name}.svg)"
        return f"{begin}{picture}\n\n{markdown(json.loads(file.read_text()))}\n{end}"

    return BLOCK.sub(block, text)


def pictures(text: str, results: Path) -> dict[str, str]:
    """The pictures that the blocks of a document show, by file name."""
    files = {name: results / f"{name}.json" for _, name, _ in BLOCK.findall(text)}
    return {f"performance-{name}.svg": draw(json.loads(file.read_text())) for name, file in files.items() if file.exists()}


def main() -> None:
    """Fill the document in and write its pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--document", type=Path, default=ROOT / "docs/performance.md")
    parser.add_argument("--results", type=Path, default=ROOT / "bench/results")
    options = parser.parse_args()
    text = options.document.read_text(encoding="utf-8")
    for name, picture in pictures(text, options.results).items():
        (options.document.parent / name).write_text(picture, encoding="utf-8")
    options.document.write_text(filled(text, options.results), encoding="utf-8")


if __name__ == "__main__":
    main()
