"""Replies of a form that the request gives: they are in it, after a think block or without one, and what cannot be enforced is refused."""

import json
import re
import threading
from typing import Any

import pytest

from nanovllm.entrypoints.server import engine_loop
from nanovllm.entrypoints.server.peer import Peer
from tests.entrypoints.server.live import LIMIT, Live

pytestmark = pytest.mark.unhooked  # uvloop's transports are of types of its own

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 120, "seed": 3}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 80, "seed": 3}
NAMED = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


def is_person(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "age"} and len(value["name"]) <= 10 and isinstance(value["age"], int) and 0 <= value["age"] <= 150


def content(answer: Any) -> str:
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_schema_is_obeyed_after_the_think_block(live: Live, thinking: bool, stream: bool):
    body = CHAT | {"response_format": NAMED, "chat_template_kwargs": {"enable_thinking": thinking}, "stream": stream}
    if stream:
        deltas = [event["choices"][0]["delta"] for event in live.events("/v1/chat/completions", body)]
        text = "".join(delta.get("content", "") for delta in deltas)
        thought = any("reasoning" in delta for delta in deltas)
    else:
        answer = live.post("/v1/chat/completions", body).json()
        text, thought = content(answer), "reasoning" in answer["choices"][0]["message"]
    assert is_person(text) and (thinking or not thought)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_choice": ["yes", "no/never"]}, "yes|no/never"),
        ({"guided_regex": "[0-9]{3}-[a-c]/x"}, "[0-9]{3}-[a-c]/x"),
        ({"structured_outputs": {"regex": "a{2,3}\nb"}}, "a{2,3}\nb"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]{2}/'}}, "x[0-9]{2}"),
        ({"guided_json": {"type": "integer", "minimum": 5, "maximum": 7}}, "[567]"),
    ],
)
def test_forms_of_other_servers(live: Live, fields: dict[str, Any], pattern: str):
    answer = live.post("/v1/chat/completions", CHAT | fields)
    assert answer.status == 200, answer
    assert re.fullmatch(pattern, content(answer.json())), answer
    plain = live.post("/v1/completions", TEXT | {"max_tokens": 200} | fields).json()["choices"][0]
    assert re.fullmatch(pattern, plain["text"]) and plain["finish_reason"] == "stop"


def test_rows_of_one_request_and_others_beside_them_are_independent(live: Live):
    answer = live.post("/v1/completions", TEXT | {"n": 4, "guided_json": SCHEMA, "temperature": 1.0}).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert all(map(is_person, texts)) and len(set(texts)) > 1
    assert live.post("/v1/completions", TEXT | {"temperature": 0, "max_tokens": 5}).json()["choices"][0]["finish_reason"] == "length"
    live.wait_until_idle()


class SlowCompiler:
    """An engine that has no compiled grammar before `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        compile_grammar = engine_loop.compile_grammar

        def waiting(*args: Any) -> None:
            self.reached.set()
            assert self.go.wait(LIMIT)
            compile_grammar(*args)

        monkeypatch.setattr(engine_loop, "compile_grammar", waiting)
        monkeypatch.setattr(engine_loop, "is_compiled", lambda *_: self.go.is_set())


@pytest.mark.parametrize("stream", [True, False])
def test_others_run_while_the_engine_compiles_a_grammar(live: Live, monkeypatch: pytest.MonkeyPatch, stream: bool):
    compiler, texts = SlowCompiler(monkeypatch), list[str]()

    def ask() -> None:
        answer = live.post("/v1/completions", TEXT | {"guided_json": SCHEMA, "n": 2, "stream": stream}).body.decode()
        parts = [json.loads(line[6:]) for line in answer.split("\n\n")[:-2]] if stream else [json.loads(answer)]
        choices = [choice for part in parts for choice in part["choices"]]
        texts.extend("".join(choice["text"] for choice in choices if choice["index"] == index) for index in (0, 1))

    asking = threading.Thread(target=ask)
    asking.start()
    assert compiler.reached.wait(LIMIT)
    assert live.post("/v1/completions", TEXT | {"max_tokens": 5}).status == 200
    assert asking.is_alive() and not live.engine.state.waiting
    compiler.go.set()
    asking.join(LIMIT)
    assert len(texts) == 2 and all(map(is_person, texts))


def test_a_client_that_leaves_while_its_grammar_is_compiled_leaves_no_request(live: Live, monkeypatch: pytest.MonkeyPatch):
    compiler, count = SlowCompiler(monkeypatch), live.engine.state.next_id
    connection = live.connect()
    connection.request("POST", "/v1/completions", json.dumps(TEXT | {"guided_json": SCHEMA}), {"content-type": "application/json"})
    assert compiler.reached.wait(LIMIT)
    assert all(peer.coming for peer in peers(live))
    connection.close()
    while any(peer.coming for peer in peers(live)):
        assert live.get("/health").status == 200
    compiler.go.set()
    live.wait_until_idle()
    assert live.engine.state.next_id == count
    assert is_person(live.post("/v1/completions", TEXT | {"guided_json": SCHEMA}).json()["choices"][0]["text"])


def peers(live: Live) -> list[Peer]:
    """The front ends that the engine knows."""
    return [key.data for key in live.engine._selector.get_map().values() if isinstance(key.data, Peer)]


def test_responses_have_a_form_too(live: Live):
    form = {"type": "json_schema", "name": "person", "schema": SCHEMA}
    answer = live.post("/v1/responses", {"model": "tiny", "input": "Hello", "max_output_tokens": 120, "text": {"format": form}}).json()
    (message,) = [item for item in answer["output"] if item["type"] == "message"]
    assert answer["status"] == "completed" and is_person(message["content"][0]["text"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": 3}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 123}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "hiccup"}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "schema": {"uniqueItems": True, "type": "array"}}}, "response_format"),
        ({"guided_regex": "(a{1000}){1000}"}, "guided_regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"ebnf": "root ::= x"}, "ebnf"),
    ],
)
def test_what_cannot_be_enforced_is_refused_before_the_engine_sees_it(live: Live, fields: dict[str, Any], param: str):
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        answer = live.post(path, body | fields)
        assert answer.status == 400, answer
        assert answer.json()["error"]["param"] == param and not live.engine.state.running
