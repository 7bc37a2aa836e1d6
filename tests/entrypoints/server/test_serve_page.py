"""The pages docs/how-to/serve.md and chunks-over-http.md: what they say runs against a server, and the lists of fields are the code's."""

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from nanovllm.entrypoints.server.api.responses import NAMED_OTHERWISE, STATEFUL, ResponsesRequest
from nanovllm.entrypoints.server.request_fields import CONSTRAINTS, IGNORED, REFUSED
from tests.entrypoints.server.live import Live

PAGE, CHUNKS = (
    (Path(__file__).parents[3] / f"docs/how-to/{name}.md").read_text(encoding="utf-8") for name in ("serve", "chunks-over-http")
)
CURL = re.compile(r"^curl (?:http://)?[\w.]+:8000(\S+) .*?-d '(.*?)'$", re.M | re.S)
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


@pytest.mark.parametrize(("path", "body"), CURL.findall(PAGE))
def test_calls_of_curl_are_answered(live: Live, path: str, body: str):
    answer = live.post(path, json.loads(body))
    assert answer.status == 200, answer


def test_the_first_chat_has_an_answer_and_says_what_it_shows(live: Live):
    path, body = CURL.findall(PAGE)[0]
    shown = json.loads(re.findall(r"^```json\n(.*?)^```", PAGE, re.M | re.S)[0])
    asked = json.loads(body)
    choice = live.post(path, asked | {"temperature": 0}).json()["choices"][0]
    assert choice["finish_reason"] == shown["finish_reason"] == "stop"
    assert choice["message"]["content"] == shown["message"]["content"]
    assert choice["message"]["reasoning_content"].startswith(shown["message"]["reasoning_content"].removesuffix(" ..."))
    short = live.post(path, asked | {"temperature": 0, "max_completion_tokens": 32}).json()["choices"][0]
    assert short["message"]["content"] == "" and short["finish_reason"] == "length"
    plain = live.post(path, asked | {"temperature": 0, "reasoning_effort": "none"}).json()["choices"][0]["message"]
    assert plain["content"] == shown["message"]["content"] and "reasoning_content" not in plain


def test_the_first_chunk_is_used_as_shown():
    with Live(num_pages=64) as server:
        for path, body in CURL.findall(CHUNKS):
            answer = server.post(path, json.loads(body)).json()
    shown = json.loads(re.findall(r"^```json\n(.*?)^```", CHUNKS, re.M | re.S)[0])
    assert answer["nanovllm"] == shown["nanovllm"] and answer["usage"].items() >= shown["usage"].items()


def test_all_fields_are_named():
    named = {name.partition(".")[0] for name in re.findall(r"`([\w.]+)`", PAGE)}
    refused = PAGE.partition("These are refused")[2]
    for name in (*IGNORED, *CONSTRAINTS, *ResponsesRequest.__struct_fields__):
        assert name in named, name
    for name in (*REFUSED, *STATEFUL):
        assert f"`{name}`" in refused, name
    assert {one.partition(".")[0] for one in NAMED_OTHERWISE.values()} <= named
