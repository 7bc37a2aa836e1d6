"""Chats and tokens as other servers' tests have them: the shape of streams, bodies that are wrong, paths with and without /v1."""

import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.entrypoints.server.request_fields import REFUSED
from nanovllm.tokenizer.messages import render
from tests.entrypoints.server.live import Live
from tests.entrypoints.server.openai_clients import client_of
from tests.entrypoints.server.stand_in import answering

pytestmark = pytest.mark.unhooked  # uvloop's transports are of types of its own

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"messages": HELLO, "max_tokens": 24, "temperature": 0}


def test_the_shape_of_a_stream(live: Live):
    whole = live.post(PATH, GREEDY).json()
    events = live.events(PATH, GREEDY | {"stream": True})
    for event in events:
        assert set(event) == {"id", "object", "created", "model", "choices"} and event["object"] == "chat.completion.chunk"
        (choice,) = event["choices"]
        assert set(choice) == {"index", "delta", "logprobs", "finish_reason"} and choice["logprobs"] is None
    first, *middle, last = [event["choices"][0] for event in events]
    assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
    assert last["delta"] == {} and last["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert all(choice["finish_reason"] is None and "role" not in choice["delta"] and choice["delta"] for choice in middle)
    message = whole["choices"][0]["message"]
    for field in ("content", "reasoning", "reasoning_content"):
        assert "".join(choice["delta"].get(field, "") for choice in middle) == message.get(field, "")


@pytest.mark.parametrize("n", [1, 3])
def test_the_roles_come_when_the_request_is_accepted(live: Live, n: int):
    """Before any token, once for each choice."""
    held = threading.Event()
    with answering(live, "Once upon", held=held), client_of(live) as client:
        events = iter(client.chat.completions.create(model="tiny", messages=HELLO, stream=True, n=n))  # pyright: ignore
        first = [next(events).choices[0] for _ in range(n)]
        assert not held.is_set()
        held.set()
        found = [choice for event in events for choice in event.choices]
    assert [(choice.index, choice.delta.role, choice.delta.content) for choice in first] == [(i, "assistant", "") for i in range(n)]
    assert found and all(choice.delta.role is None for choice in found)


@pytest.mark.parametrize(("path", "body"), [(PATH, GREEDY), ("/v1/completions", {"prompt": "Once", "max_tokens": 24, "temperature": 0})])
def test_usage_in_every_event_and_in_none(live: Live, path: str, body: dict[str, Any]):
    def usages(**options: Any) -> list[Any]:
        return [event.get("usage", "absent") for event in live.events(path, body | {"stream": True, "stream_options": options})]

    for options in ({}, {"include_usage": False}, {"include_usage": None}, {"continuous_usage_stats": True}, {"include_obfuscation": True}):
        assert set(usages(**options)) == {"absent"}
    *before, last = usages(include_usage=True)
    assert set(before) == {None} and last == usages(include_usage=True)[-1]
    *before, last = usages(include_usage=True, continuous_usage_stats=True)
    counts = [usage["completion_tokens"] for usage in before]
    assert counts == sorted(counts) and counts[-1] == last["completion_tokens"] > 9
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in [*before, last])
    assert {usage["prompt_tokens"] for usage in before} == {last["prompt_tokens"]}


def test_paths_with_and_without_v1(live: Live):
    for path, body in (("/chat/completions", GREEDY), ("/completions", {"prompt": "Hello", "max_tokens": 3, "temperature": 0})):
        one, two = (live.post(prefix + path, body).json()["choices"] for prefix in ("", "/v1"))
        assert one == two
        assert live.get("/v1" + path).status == 405
    assert live.get("/models").json() == live.get("/v1/models").json()
    for path in ("/v1/embeddings", "/v1/audio/speech", "/v1/files", "/v2/models", "/page"):
        answer = live.post(path, {})
        assert answer.status == 404 and set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("body", [b"", b"[]", b"3", b'"text"', b"null", b"[{}]", b"{", b'{"messages": [NaN]}', b"[" * 10_000])
@pytest.mark.parametrize("path", [PATH, "/v1/completions", "/tokenize", "/detokenize"])
def test_a_body_that_is_no_object(live: Live, path: str, body: bytes):
    answer = live.post(path, body)
    assert answer.status == 400 and answer.json()["error"]["type"] == "invalid_request_error"


TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c"}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (PATH, {}, "messages"),
        (PATH, {"messages": None}, "messages"),
        (PATH, {"messages": "Hello"}, "messages"),
        (PATH, {"messages": [123]}, "messages[0]"),
        (PATH, {"messages": [{}]}, "messages[0].role"),
        (PATH, {"messages": [{"content": "Hello"}]}, "messages[0].role"),
        (PATH, {"messages": [{"role": 123}]}, "messages[0].role"),
        (PATH, {"messages": [{"role": "system", "content": 123}]}, "messages[0].content"),
        (PATH, {"messages": [*HELLO, {}]}, "messages[1].role"),
        (PATH, {"messages": TURNS}, "messages[2].role"),
        (PATH, {"messages": [{"role": "user", "content": "\x00" * 10 + "word " * 9000}]}, "messages"),
        (PATH, {"messages": HELLO, "stop": 3}, "stop"),
        (PATH, {"messages": HELLO, "logit_bias": {"99999": 1}}, "logit_bias"),
        (PATH, {"messages": HELLO, "stop_token_ids": [99999]}, "stop_token_ids"),
        (PATH, {"messages": HELLO, "max_tokens": "many"}, "max_tokens"),
        (PATH, {"messages": HELLO, "maxtokens": 3}, "maxtokens"),
        (PATH, {"messages": HELLO, "tools": "all"}, "tools"),
        (PATH, {"messages": HELLO, "tool_choice": "bogus"}, "tool_choice"),
        (PATH, {"messages": HELLO, "n": 129}, "n"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": None}, "prompt"),
        ("/v1/completions", {"prompt": {}}, "prompt"),
        ("/v1/completions", {"prompt": [""]}, "prompt[0]"),
        ("/v1/completions", {"prompt": [["a"]]}, "prompt[0][0]"),
        ("/v1/completions", {"prompt": ["a"] * 2049}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 20, "n": 128}, "n"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": HELLO, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [4096]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_a_wrong_field_is_named(live: Live, path: str, body: Any, param: str):
    answer = live.post(path, body)
    assert answer.status == 400, answer
    assert answer.json()["error"]["param"] == param, answer
    assert live.post(path, body | {"model": "gpt-5"}).status in (400, 404)


@pytest.mark.parametrize("field", sorted(REFUSED.keys() - {"tools", "tool_choice"}))
def test_fields_that_are_not_supported_may_ask_for_nothing(live: Live, field: str):
    for nothing in REFUSED[field]:
        assert live.post(PATH, GREEDY | {"max_tokens": 1, field: nothing}).status == 200
    answer = live.post(PATH, GREEDY | {field: "something"})
    assert answer.status == 400 and answer.json()["error"]["param"] == field
    assert answer.json()["error"]["code"] == "unsupported_parameter"


def test_logit_bias_forces_and_forbids(live: Live):
    text = "Hello"
    ids = live.model.tokenizer.encode(text, add_special_tokens=False)
    body = {"prompt": "Once", "max_tokens": 3, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    forced = live.post("/v1/completions", body | {"logit_bias": {str(ids[0]): 100}}).json()["choices"][0]
    assert forced["token_ids"] == [ids[0]] * 3
    plain = live.post("/v1/completions", body).json()["choices"][0]["token_ids"]
    other = live.post("/v1/completions", body | {"logit_bias": {str(plain[0]): -100}}).json()["choices"][0]["token_ids"]
    assert other[0] != plain[0]


# Tokens


@settings(max_examples=25)
@given(st.text(max_size=40))
def test_tokens_of_a_text_and_back(live: Live, text: str):
    answer = live.post("/tokenize", json.dumps({"prompt": text, "add_special_tokens": False, "return_token_strs": True}).encode())
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        assert answer.status == 400
        return
    value = answer.json()
    assert value["tokens"] == live.model.tokenizer.encode(text, add_special_tokens=False)
    assert value["count"] == len(value["tokens"]) == len(value["token_strs"])
    assert live.post("/detokenize", {"tokens": value["tokens"]}).json() == {"prompt": text, "content": text}
    pieces = live.post("/tokenize", json.dumps({"content": text, "with_pieces": True}).encode()).json()["tokens"]
    assert [one["id"] for one in pieces] == value["tokens"]
    joined = b"".join(bytes(one["piece"]) if isinstance(one["piece"], list) else one["piece"].encode() for one in pieces)
    assert joined.decode() == text


def test_tokens_of_a_conversation(live: Live):
    tokenizer = live.model.tokenizer
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    for more in ({}, {"add_generation_prompt": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        given = {**more, **more.get("chat_template_kwargs", {})}
        given.pop("chat_template_kwargs", None)
        tokens = live.post("/tokenize", {"model": "tiny", "messages": messages, **more}).json()["tokens"]
        assert tokens == render(tokenizer, messages, **given)
        text = live.post("/detokenize", {"tokens": tokens}).json()["prompt"]
        assert "Be brief." in text
        assert live.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"] == tokens
    continued = {"messages": [*HELLO, {"role": "assistant", "content": "Well"}], "continue_final_message": True}
    tokens = live.post("/tokenize", continued).json()["tokens"]
    assert live.post("/detokenize", {"tokens": tokens}).json()["prompt"].endswith("Well")
    assert live.post("/v1/chat/completions", continued | {"max_tokens": 1}).json()["usage"]["prompt_tokens"] == len(tokens)
    assert live.post("/tokenize", {"messages": HELLO, "model": "gpt-5"}).status == 404


def test_what_the_remote_tokenizer_of_lm_eval_asks_for(live: Live):
    info = live.get("/tokenizer_info").json()
    assert info["eos_token"] == live.model.tokenizer.special_tokens["eos_token"] and "messages" in info["chat_template"]
    assert live.post("/detokenize", {"tokens": []}).json() == {"prompt": "", "content": ""}
    assert live.post("/tokenize", {"prompt": "", "add_special_tokens": False}).json()["count"] == 0


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/v1/completions", {"prompt": "a"}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "max_completion_tokens"),
        ("/v1/responses", {"input": "a"}, "max_output_tokens"),
    ],
)
def test_errors_name_the_limit_as_the_request_does(live: Live, path: str, body: dict[str, Any], limit: str) -> None:
    error = live.post(path, {**body, limit: 2, "min_tokens": 9}).json()["error"]
    assert error["param"] == "min_tokens" and error["message"] == f"min_tokens=9: must be an integer in [0, 2], at most {limit}"
