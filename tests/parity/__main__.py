"""`python -m tests.parity`: measure all cases and write the page."""

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from nanovllm.entrypoints.display.terminal import bar
from tests.parity.cases import CASES
from tests.parity.measure import Measures, measure, settle
from tests.parity.report import page


def main() -> int:
    """Run the command; return 1 if a measure is out of bounds, or if no case name contains the text of `--only`."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description="Compare every architecture with transformers.")
    parser.add_argument("--out", type=Path, metavar="PREFIX", help="write the page to PREFIX.md instead of printing it")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only cases whose names contain this text")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="number of processes, with one thread each (default %(default)s)")
    options = parser.parse_args()
    names = [name for name in CASES if options.only in name]
    found: list[Measures] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context, initializer=settle) as pool, bar(len(names), "parity", "case") as shown:
        for measures in pool.map(measure, names):
            found.append(measures)
            shown.update(1)
    wrong = [f"{m.name}: {', '.join(m.failures)}" for m in found if m.failures]
    if found and options.out is not None:
        options.out.with_name(options.out.name + ".md").write_text(page(found), encoding="utf-8")
    elif found:
        print(page(found), end="")
    print("\n".join([*wrong, f"{len(found)} cases, {len(wrong)} of them out of bounds"]), file=sys.stderr)
    return 1 if wrong or not found else 0


if __name__ == "__main__":
    sys.exit(main())
