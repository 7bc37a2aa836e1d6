"""The page docs/how-to/serve.md: its programs run against a server, and its lists of fields are those of the code."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from nanovllm.entrypoints.server.api.responses import NAMED_OTHERWISE, STATEFUL, ResponsesRequest
from nanovllm.entrypoints.server.request_fields import CONSTRAINTS, IGNORED, REFUSED
from tests.entrypoints.server.live import Live

PAGE = (Path(__file__).parents[3] / "docs/how-to/serve.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


@pytest.mark.unhooked
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_run(live: Live, program: str):
    code = program.replace("127.0.0.1:8000", f"127.0.0.1:{live.port}")
    assert code != program
    names: dict[str, Any] = {}
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, "serve.md", "exec"), names)
    finally:
        if "client" in names:  # a program ends with its process, a test does not
            names["client"].close()
    assert len(out.getvalue()) > 5


def test_all_fields_are_named():
    named = {name.partition(".")[0] for name in re.findall(r"`([\w.]+)`", PAGE)}
    refused = PAGE.partition("These are refused")[2]
    for name in (*IGNORED, *CONSTRAINTS, *ResponsesRequest.__struct_fields__):
        assert name in named, name
    for name in (*REFUSED, *STATEFUL):
        assert f"`{name}`" in refused, name
    assert {one.partition(".")[0] for one in NAMED_OTHERWISE.values()} <= named
