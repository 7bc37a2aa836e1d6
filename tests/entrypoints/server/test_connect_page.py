"""The page docs/how-to/connect-clients.md: its programs run against a server, where LangChain is installed."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.server.live import Live

pytestmark = [
    pytest.mark.unhooked,
    pytest.mark.skipif(importlib.util.find_spec("langchain_openai") is None, reason="needs langchain-openai"),
]
ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/how-to/connect-clients.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
PRINTED = [
    r"27 \+ 38 = 65\.\n2 \+ 2 = 4\.\n \{'cache_read': \d+\}\n",
    r"\['27 \+ 38 = 65\.', '2 \+ 2 = 4\.'\]\n",
    r"27 \+ 38 = 65\..+",
    r"kind='(fox|owl|bear)' wild=(True|False)\n",
    r"\[\] 27 \+ 38 = 65\.\n",
]


@pytest.mark.parametrize(("program", "printed"), [*zip(PROGRAMS, PRINTED, strict=True)], ids=["own", "in_process", "chat", "form", "tools"])
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # LangChain's clients are closed with their process
def test_programs_print_what_the_model_says(live: Live, program: str, printed: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "integrations/langchain-nanovllm")
    code = program.replace("127.0.0.1:8000", f"127.0.0.1:{live.port}")
    assert code != program or "InProcess" in program
    names: dict[str, Any] = {"__name__": "page"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "connect-clients.md", "exec"), names)
    assert re.fullmatch(printed, out.getvalue(), re.S), out.getvalue()
