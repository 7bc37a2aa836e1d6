"""What became of the parts, as a table and as a file that is written again after every change."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.recording.outcomes import Outcomes
from benchmarks.recording.side_by_side import Row

NAMED = 40  # tests that are printed by name; the file has all


def table(rows: Sequence[Row], tests: Mapping[str, Outcomes]) -> str:
    """What became of the tests, with a line for each test that failed or did not end, and a table with a line for each part.

    Args:
        rows: The parts.
        tests: What is known of the tests of a part, by its name.
    """
    cells = [("part", "cards", "seconds", "result")]
    cells += [(row.part.name, ",".join(map(str, row.cards)) or "-", f"{row.seconds:.0f}" if row.cards else "-", row.result) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = list[str]()
    for name, known in tests.items():
        named = [f"  failed: {test}" for test in known.failed] + [f"  unfinished: {test}" for test in known.unfinished]
        lines += [f"{name}: {known}", *named[:NAMED], *([f"  and {len(named) - NAMED} more"] if len(named) > NAMED else [])]
    lines += [f"{name:<{widths[0]}}  {cards:>{widths[1]}}  {seconds:>{widths[2]}}  {result}" for name, cards, seconds, result in cells]
    return "\n".join(lines)


def write(to: Path, about: Mapping[str, Any], rows: Sequence[Row], tests: Mapping[str, Outcomes]) -> None:
    """Write a JSON object of all that is known, `about` at its head. The file is whole at any time."""
    parts = list[dict[str, Any]]()
    for row in rows:
        part = {"part": row.part.name, "cards": list(row.cards), "seconds": round(row.seconds, 1), "result": row.result}
        parts.append(part | ({"tests": vars(tests[row.part.name])} if row.part.name in tests else {}))
    whole = to.with_suffix(".tmp")
    whole.write_text(json.dumps({**about, "parts": parts}, indent=1) + "\n", encoding="utf-8")
    whole.replace(to)
