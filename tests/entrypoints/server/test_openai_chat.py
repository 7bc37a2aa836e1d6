"""`OpenAIChat`: what a server answers, without a server."""

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

import nanovllm as nv
from nanovllm.entrypoints.openai_chat import OpenAIChat
from nanovllm.testing.models import random_model, tiny_config
from tests.entrypoints.server.live import Live
from tests.entrypoints.server.scripted import FORMATS, say, scripted, scripted_model
from tests.entrypoints.server.test_openai_tools import TOOLS, written

pytestmark = pytest.mark.unhooked
CHANGING = ("id", "created", "model")  # fields that two answers to the same request may differ in
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 27 + 38?"}], "temperature": 0, "max_tokens": 200}
KING = "The king of Aistonia is Oswin."


def same(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs from one to the next: names, times, ids of calls, and what was reused."""
    answer = {key: value for key, value in answer.items() if key not in CHANGING}
    if answer.get("usage"):
        answer["usage"] = {key: value for key, value in answer["usage"].items() if key != "prompt_tokens_details"}
    for choice in answer["choices"]:
        for call in (choice.get("message") or choice["delta"]).get("tool_calls", ()):
            call.pop("id", None)
    return answer


async def events_of(chat: OpenAIChat, body: dict[str, Any]) -> list[dict[str, Any]]:
    return [event async for event in chat.stream(body)]


def told(events: list[dict[str, Any]]) -> dict[str, str]:
    """The texts of a stream by field."""
    found: dict[str, str] = {}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            parts = {key: value for key, value in delta.items() if key in ("content", "reasoning_content")}
            for call in delta.get("tool_calls", ()):
                parts |= {f"{call['index']}.{key}": value for key, value in call["function"].items()}
            for key, value in parts.items():
                found[key] = found.get(key, "") + value
    return found


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


@pytest.mark.parametrize("more", [{}, {"chat_template_kwargs": {"enable_thinking": False}}, {"stop": ["65"]}, {"max_tokens": 3}], ids=str)
def test_answers_and_streams_are_those_of_the_server(live: Live, more: dict[str, Any]) -> None:
    body = {**ASKED, **more}
    whole = live.post("/v1/chat/completions", body).json()
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}

    async def main() -> tuple[Any, Any]:
        async with OpenAIChat(live.model, num_pages=64) as chat:
            return await chat.create(body), await events_of(chat, streamed)

    answer, events = run(main())
    assert same(answer) == same(whole)
    assert events[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"] and not events[-1]["choices"]
    assert events[-2]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]
    assert told(events)["content"] == answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "add"}}], ids=str)
def test_tools_are_read_and_forced_as_by_the_server(name: str, choice: Any) -> None:
    reply = written(name, ("add", {"a": 1, "b": 2}))
    body = {"messages": [{"role": "user", "content": say(reply)}], "tools": TOOLS, "tool_choice": choice, "max_tokens": 300}
    model, forced = scripted_model(name)

    async def main() -> tuple[Any, Any]:
        async with OpenAIChat(model, process_logits=forced, num_pages=512) as chat:
            return await chat.create(body), await events_of(chat, body)

    answer, events = run(main())
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    assert told(events)["0.name"] == "add" and json.loads(told(events)["0.arguments"]) == {"a": 1, "b": 2}
    with scripted(name) as live:
        assert same(answer) == same(live.post("/v1/chat/completions", body).json())


def test_think_blocks_are_split_and_counted() -> None:
    model, forced = scripted_model("hermes")
    body = {"messages": [{"role": "user", "content": say("<think>\nHm.\n</think>\n\nYes.")}], "stream_options": {"include_usage": True}}

    async def main() -> tuple[Any, Any]:
        async with OpenAIChat(model, process_logits=forced, num_pages=512) as chat:
            hidden = await events_of(chat, {**body, "include_reasoning": False})
            return await events_of(chat, body), hidden

    events, hidden = run(main())
    assert told(events) == {"content": "Yes.", "reasoning_content": "Hm."} and told(hidden) == {"content": "Yes."}
    assert events[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_forms_are_forced(live: Live) -> None:
    schema = {"type": "object", "properties": {"kind": {"enum": ["fox", "owl"]}}, "required": ["kind"], "additionalProperties": False}
    body = {**ASKED, "response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}}

    async def main() -> Any:
        async with OpenAIChat(live.model, num_pages=64) as chat:
            choice = await chat.create({**ASKED, "structured_outputs": {"choice": ["left", "right"]}})
            return await chat.create(body), choice

    answer, choice = run(main())
    assert json.loads(answer["choices"][0]["message"]["content"])["kind"] in ("fox", "owl")
    assert choice["choices"][0]["message"]["content"] in ("left", "right")


def test_chunks_are_reused_joined_and_kept(live: Live) -> None:
    question = {"messages": [{"role": "user", "content": "Who is the king of Aistonia?"}], "temperature": 0, "max_tokens": 200}

    async def main() -> None:
        async with OpenAIChat(live.model, num_pages=128) as chat:
            facts = await chat.llm.apply(lambda model, state: nv.prefill(model, state, KING))
            more = await chat.llm.apply(lambda model, state: nv.prefill(model, state, "It is cold."))
            assert facts is not None and more is not None
            chat.chunks["facts"] = facts
            answer = await chat.create({**question, "chunks": ["facts"], "keep": "talk"})
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(facts)
            assert answer["nanovllm"]["exact"] is True
            assert answer["nanovllm"]["kept"]["tokens"] == len(chat.chunks["talk"]) and len(chat.llm.state.chunks) == 3
            again = await events_of(chat, {**question, "chunks": ["talk"], "keep": "talk", "keep_replace": True})
            assert again[-1]["nanovllm"]["kept"]["tokens"] == len(chat.chunks["talk"]) and len(chat.llm.state.chunks) == 3
            joined = await chat.create({**question, "chunks": [facts, more]})
            assert joined["nanovllm"] == {"exact": False} and len(chat.llm.state.chunks) == 3  # the joined chunk is gone
            assert joined["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(facts) + len(more)
            with pytest.raises(nv.ChunkExistsError):
                await chat.create({**question, "keep": "talk"})
            with pytest.raises(nv.UnknownChunkError, match="'nothing'"):
                await chat.create({**question, "chunks": ["nothing"]})
            nv.check(chat.llm.state)

    run(main())


@pytest.mark.parametrize("thinking", [False, True])
def test_kept_chunks_leave_think_blocks_out_unless_they_are_asked_for(thinking: bool) -> None:
    model, forced = scripted_model("hermes")
    body = {"messages": [{"role": "user", "content": say("<think>\nHm.\n</think>\n\nYes.")}], "keep": "talk", "keep_thinking": thinking}

    async def main() -> str:
        async with OpenAIChat(model, process_logits=forced, num_pages=512) as chat:
            await chat.create(body)
            assert chat.llm.tokenizer is not None
            return chat.llm.tokenizer.decode(chat.chunks["talk"].token_ids.tolist(), skip_special_tokens=False)

    text = run(main())
    assert "Yes." in text and ("Hm." in text) == thinking


def test_closing_a_stream_cancels_its_request(live: Live) -> None:
    async def main() -> None:
        async with OpenAIChat(live.model, num_pages=64) as chat:
            stream = chat.stream({**ASKED, "max_tokens": 500, "ignore_eos": True})
            for _ in range(3):
                await anext(stream)
            assert chat.llm.state.running
            await stream.aclose()
            while chat.llm.state.running:
                await asyncio.sleep(0.001)
            nv.check(chat.llm.state)

    run(main())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"logprobs": True}, "logprobs is not supported without a server"),
        ({"n": 2}, "n=2 must be 1"),
        ({"chunks": "facts"}, "must be a list"),
        ({"chunks": [3]}, "neither a name nor a chunk"),
        ({"top_p": 7}, "top_p=7"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 10**6}, "max_tokens=1000000"),
        ({"tools": TOOLS, "tool_choice": "required"}, "--tool-parser"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}, "cannot be enforced|type"),
    ],
    ids=str,
)
def test_what_is_refused(live: Live, more: dict[str, Any], message: str) -> None:
    async def main() -> None:
        async with OpenAIChat(live.model, num_pages=64) as chat:
            with pytest.raises(nv.InvalidRequestError, match=message):
                await chat.create({**ASKED, **more})
            with pytest.raises(nv.InvalidRequestError, match=message):
                await events_of(chat, {**ASKED, **more})
            assert not chat.llm.state.running and not chat.llm.state.waiting

    run(main())


def test_a_model_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(nv.InvalidRequestError, match="no tokenizer"):
        OpenAIChat(replace(random_model(tiny_config()), tokenizer=None), num_pages=16)
