"""The block of docs/tutorials/compile-a-decode-loop.md that traces: it runs in a process without the shape-checking import hook."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs/tutorials/compile-a-decode-loop.md"
TRACED = re.compile(r"<!-- not run: [^\n]*test_compiled_tutorial[^\n]*-->\n```python\n(.*?)```\nIt prints\n```\n(.*?)```", re.S)


@pytest.mark.compile
def test_the_traced_block_prints_what_the_page_says(capsys):
    ((code, shown),) = TRACED.findall(PAGE.read_text(encoding="utf-8"))
    exec(compile(code, PAGE.name, "exec"), {"__name__": "tutorial"})
    assert capsys.readouterr().out == shown
