"""The programs of README.md, and the examples of docstrings."""

import contextlib
import doctest
import importlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langchain_openai", reason="needs langchain-openai: pip install -e 'integrations/langchain-nanovllm[test]'")

from tests.entrypoints.server.live import Live

PAGE = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```(?:\nIt prints\n```\n(.*?)^```)?", PAGE, re.M | re.S)
MODULES = ["base", "chat_models", "event_loop", "in_process", "replies", "structured"]


@pytest.mark.parametrize(("program", "printed"), PROGRAMS, ids=["http", "in_process", "chunks"])
def test_programs_print_what_they_show(monkeypatch: pytest.MonkeyPatch, program: str, printed: str) -> None:
    monkeypatch.delenv("NANOVLLM_API_KEY", raising=False)
    names: dict[str, Any] = {"__name__": "page"}
    with Live() as live, contextlib.redirect_stdout(io.StringIO()) as out:
        monkeypatch.setenv("NANOVLLM_BASE_URL", f"http://127.0.0.1:{live.port}/v1")
        exec(compile(program, "README.md", "exec"), names)
    assert out.getvalue().strip() == printed.strip() or (not printed and re.fullmatch(r"\d+ tokens reused; \d+ kept\n", out.getvalue()))


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NANOVLLM_BASE_URL", raising=False)
    failed, tried = doctest.testmod(importlib.import_module(f"langchain_nanovllm.{name}"))
    assert tried and not failed
