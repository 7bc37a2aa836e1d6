"""`/openapi.json` and `/docs`: they have all routes and nothing else, and answers are what they say."""

import json
import re
from typing import Any

import pytest

from nanovllm.entrypoints.server.openapi.document import document
from nanovllm.entrypoints.server.openapi.operations import OPERATIONS
from nanovllm.entrypoints.server.openapi.page import page
from nanovllm.entrypoints.server.openapi.requests import CHECKED, NOTES
from nanovllm.entrypoints.server.routes import ROUTES
from tests.entrypoints.server.live import Live, parsed
from tests.entrypoints.server.schema_check import faults, references, resolved
from tests.entrypoints.server.stand_in import answering

DOCUMENT = document(ROUTES, "tiny", "1.2.3")
SCHEMAS = DOCUMENT["components"]["schemas"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
FLAT = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]


def entries() -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, entry) for path, methods in DOCUMENT["paths"].items() for method, entry in methods.items()]


def test_it_has_every_route_and_nothing_else():
    wanted = set()
    for path, methods, _ in ROUTES:
        for method in methods:
            only = OPERATIONS[method, path.removeprefix("/v1")].path
            shown = path if only is None else path.replace(path.removeprefix("/v1"), only)
            wanted.add((re.sub(r":\w+", "", shown), method.lower()))
    assert {(path, method) for path, method, _ in entries()} == wanted
    assert {(method, path.removeprefix("/v1")) for path, methods, _ in ROUTES for method in methods} == OPERATIONS.keys(), (
        "each route has an entry in OPERATIONS"
    )


def test_its_structure_is_that_of_openapi():
    assert DOCUMENT["openapi"] == "3.1.0" and DOCUMENT["info"].keys() == {"title", "version", "description"}
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT
    for reference in references(DOCUMENT):
        assert resolved(reference, DOCUMENT) is not None, reference
    ids = [entry["operationId"] for _, _, entry in entries()]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"\w+", name) for name in ids)
    schemes = DOCUMENT["components"]["securitySchemes"].keys()
    assert {name for one in DOCUMENT["security"] for name in one} == schemes
    for path, method, entry in entries():
        assert entry["summary"], f"{method} {path}"
        assert [one["name"] for one in entry.get("parameters", ())] == re.findall(r"{(\w+)}", path)
        assert ("requestBody" in entry) <= (method == "post")
        for status, answer in entry["responses"].items():
            assert re.fullmatch(r"[1-5]\d\d", status)
            assert resolved(answer["$ref"], DOCUMENT)["description"] if "$ref" in answer else answer["description"]
        assert entry.get("x-alias-of", path).endswith(path)


def test_fields_of_requests_have_types_and_no_note_is_left_over():
    fields = {name: field for op in OPERATIONS.values() if op.takes for name, field in SCHEMAS[op.takes.__name__]["properties"].items()}
    for name, field in {**fields, **SCHEMAS["TextOptions"]["properties"]}.items():
        assert field.keys() & {"type", "anyOf", "$ref", "enum"}, f"{name} needs a schema in CHECKED"
    assert NOTES.keys() <= {*fields, "format"} and CHECKED.keys() <= {*fields, "format"}
    assert fields["temperature"]["description"].startswith("Divides") and "kept as" not in json.dumps(SCHEMAS)


def test_references_to_nothing_and_wrong_answers_are_found():
    with pytest.raises(KeyError):
        resolved("#/components/schemas/Nothing", DOCUMENT)
    right = {"error": {"message": "m", "type": "t", "param": None, "code": None}}
    assert not [*faults(right, SCHEMAS["Error"], DOCUMENT)]
    for wrong in ({}, {"error": {}}, {"error": {**right["error"], "code": 3}}, {"error": {**right["error"], "more": 3}}, [right], None):
        assert [*faults(wrong, SCHEMAS["Error"], DOCUMENT)], wrong
    assert [*faults({"object": "list", "data": [3]}, SCHEMAS["Models"], DOCUMENT)]


def placed(path: str) -> str:
    """A path with the name of a chunk or of the model."""
    return path.replace("{name}", "story" if "/chunks/" in path else "tiny")


def assert_conforms(live: Live, path: str, method: str, body: Any = None) -> None:
    """Send a request, and check its answer against what the document says of the answer."""
    entry = DOCUMENT["paths"][path][method]
    answer = live.call(method.upper(), placed(path), body)
    kind = answer.headers["content-type"].partition(";")[0]
    described = entry["responses"][str(answer.status)]
    described = resolved(described["$ref"], DOCUMENT) if "$ref" in described else described
    content = {name.partition(";")[0]: value for name, value in described["content"].items()}[kind]
    if kind == "text/event-stream":
        first, *others = content["schema"]["properties"]["data"]["anyOf"]
        *events, last = parsed(re.sub(rb"(?m)^event: .*\n", b"", answer.body))
        events += [] if others == [{"const": last}] else [last]
        assert not [fault for event in events for fault in faults(event, first["contentSchema"], DOCUMENT)]
    elif kind == "application/json":
        assert not [*faults(answer.json(), content["schema"], DOCUMENT)], answer


@pytest.mark.unhooked
@pytest.mark.parametrize(("path", "method"), [(path, method) for path, method, _ in entries()])
def test_examples_are_taken_and_answered_as_the_document_says(live: Live, path: str, method: str):
    entry = DOCUMENT["paths"][path][method]
    if "requestBody" not in entry:
        assert_conforms(live, path, method)
        return
    body = entry["requestBody"]["content"]["application/json"]
    for example in body["examples"].values():
        assert not [*faults(example["value"], body["schema"], DOCUMENT)]
        short = {name: 4 if name.startswith("max_") else value for name, value in example["value"].items()}
        assert live.post("/v1/chunks", {"name": "story", "text": "Once upon a time, a fox", "replace": True}).status == 200
        found = live.call(method.upper(), placed(path), short)
        assert found.status == (400 if path.endswith(("/save", "/load")) else 200), found  # this server has no folder for files
        for more in ({}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}, {"stream": 3}):
            assert_conforms(live, path, method, {**short, **more})


@pytest.mark.unhooked
@pytest.mark.parametrize("text", [f"<think>\nHm\n</think>\n\nOnce{CALL}{CALL}", CALL[:-20], ""])
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2, "return_token_ids": True}, {"stream": True, "return_token_ids": True}])
def test_reasoning_and_calls_are_as_the_document_says(live: Live, text: str, more: dict[str, Any]):
    with answering(live, text):
        messages = [{"role": "user", "content": "x"}]
        assert_conforms(live, "/v1/chat/completions", "post", {"messages": messages, "tools": TOOLS, **more})
        assert_conforms(live, "/v1/completions", "post", {"prompt": "x", **more})
        assert_conforms(live, "/v1/responses", "post", {"input": "x", "tools": FLAT, **more})
        assert_conforms(live, "/v1/responses", "post", {"input": "x", "tools": FLAT, "stream": "stream" in more})


@pytest.mark.unhooked
@pytest.mark.parametrize("stream", [False, True])
def test_chunks_of_replies_are_as_the_document_says(live: Live, stream: bool):
    assert live.post("/v1/chunks", {"name": "story", "text": "Once upon a time, a fox", "replace": True}).status == 200
    more = {"chunks": ["story"], "keep": "turn", "keep_replace": True, "stream": stream, "temperature": 0}
    assert_conforms(live, "/v1/completions", "post", {"prompt": " and", "max_tokens": 4, **more})
    assert_conforms(live, "/v1/chat/completions", "post", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, **more})
    assert_conforms(live, "/v1/responses", "post", {"input": "x", "max_output_tokens": 4, **more})
    for name in ("story", "turn"):
        assert live.call("DELETE", f"/v1/chunks/{name}").status == 200


@pytest.mark.unhooked
def test_tokens_with_their_texts_are_as_the_document_says(live: Live):
    for more in ({"return_token_strs": True}, {"with_pieces": True}, {"prompt": None}):
        assert_conforms(live, "/tokenize", "post", {"prompt": "Zürich 🦊", **more})


@pytest.mark.unhooked
def test_the_server_gives_both(live: Live):
    found = live.get("/openapi.json")
    assert found.status == 200 and found.json()["paths"] == DOCUMENT["paths"]
    answer = live.get("/docs")
    assert answer.status == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline';") and "script" not in policy
    assert f"http://127.0.0.1:{live.port}/v1/chat/completions" in answer.body.decode()


def test_the_page_has_every_route_and_asks_nobody_for_anything():
    text = page(DOCUMENT, "http://here")
    for path, method, entry in entries():
        shown = entry.get("x-alias-of", path)
        assert f"{method.upper()} {shown}</h2>" in text and (path == shown or f"<code>{path}</code>" in text)
    ids = re.findall(r'id="(\w+)"', text)
    assert len(set(ids)) == len(ids) and {*re.findall(r'href="#(\w+)"', text)} <= {*ids}
    assert {*re.findall(r'href="([^#"][^"]*)"', text)} == {"openapi.json"}
    assert not re.search(r"<(script|img|link|iframe|form)|src=|@import|url\(", text)
    assert {*re.findall(r"\w+://[\w.]+", text)} == {"http://here"}
    assert ":root{color-scheme:light dark}" in text  # of the body alone, dark colours would stand on white ground


def test_the_page_shows_names_as_text():
    text = page(document(ROUTES, "<script>&'\"", "<b>"), 'http://"><script>')
    assert "<script" not in text and "<b>" not in text
