"""OpenAI's clients, tools and think blocks, with a scripted model: in all formats of tool calls, whole and streamed."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.entrypoints.server.live import Live
from tests.entrypoints.server.openai_clients import async_client_of, client_of
from tests.entrypoints.server.scripted import FORMATS, say, scripted

pytestmark = pytest.mark.unhooked  # uvloop's transports are of types of its own

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": NUMBERS}},
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]


def written(name: str, *calls: tuple[str, dict[str, Any]], content: str = "") -> str:
    """A reply of a model of this format that calls tools."""
    match name:
        case "hermes":
            each = [f"<tool_call>\n{json.dumps({'name': tool, 'arguments': given})}\n</tool_call>" for tool, given in calls]
            return content + "\n".join(each)
        case "llama3":
            return f"{content}<|python_tag|>" + "; ".join(json.dumps({"name": tool, "parameters": given}) for tool, given in calls)
        case "mistral":
            return content + "".join(f"[TOOL_CALLS]{tool}[ARGS]{json.dumps(given)}" for tool, given in calls)
        case _:
            parts = []
            for tool, given in calls:
                values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
                inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
                parts.append(f"<tool_call>\n<function={tool}>\n{inner}</function>\n</tool_call>")
            return content + "\n".join(parts)


@pytest.fixture(scope="module", params=FORMATS)
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, Live]]:
    with scripted(request.param) as live:
        yield request.param, live


@pytest.fixture(scope="module")
def hermes() -> Iterator[Live]:
    with scripted("hermes") as live:
        yield live


def asked(*replies: str, **more: Any) -> Any:
    return {"model": "scripted", "messages": [{"role": "user", "content": say(*replies)}], "tools": TOOLS, **more}


def called(message: Any) -> list[tuple[str, Any]]:
    """The calls of a message. Their ids differ."""
    calls = message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls) and all(call.type == "function" and call.id for call in calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


PARIS: tuple[str, dict[str, Any]] = ("get_weather", {"city": 'Paris "é" \\ {"a": [1]}'})
SUM: tuple[str, dict[str, Any]] = ("add", {"a": 2, "b": -3})
REPLIES = [("", [SUM]), ("I look.", [PARIS]), ("", [SUM, PARIS, ("now", {})]), ("é 日本 <b>{[", [])]


@pytest.mark.parametrize(("content", "calls"), REPLIES)
def test_calls_whole_and_streamed(server: tuple[str, Live], content: str, calls: Any):
    name, live = server
    reply = written(name, *calls, content=content) if calls else content
    reason = "tool_calls" if calls else "stop"
    client = client_of(live)
    choice = client.chat.completions.create(**asked(reply)).choices[0]
    assert (choice.message.content or "", called(choice.message), choice.finish_reason) == (content, calls, reason)
    assert choice.message.content is None or content
    with client.chat.completions.stream(**asked(reply)) as stream:
        events = [*stream]
    final = stream.get_final_completion().choices[0]
    assert (final.message.content or "", called(final.message), final.finish_reason) == (content, calls, reason)
    assert [(event.name, json.loads(event.arguments)) for event in events if event.type == "tool_calls.function.arguments.done"] == calls
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(event.arguments_delta for event in deltas) == "".join(call.function.arguments for call in final.message.tool_calls or [])
    if calls == [PARIS]:
        assert len(deltas) > 3  # arguments come while they are written

    async def the_same() -> Any:
        async with async_client_of(live) as client:
            parts = [chunk.choices[0] async for chunk in await client.chat.completions.create(**asked(reply, stream=True))]
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [reason]
        return [delta for part in parts for delta in part.delta.tool_calls or []]

    for delta in asyncio.run(the_same()):
        assert (delta.id is None) == (delta.type is None) == (delta.function.name is None) and delta.function.arguments is not None
    ids = [call.id for call in choice.message.tool_calls or []]
    assert all(len(i) == 9 and i.isalnum() if name == "mistral" else i.startswith("call_") for i in ids)


def test_choices_of_tools(hermes: Live):
    client = client_of(hermes)
    reply = written("hermes", SUM, PARIS)
    for more in ({"tool_choice": "none"}, {"tools": openai.omit, "tool_choice": openai.omit}, {"tools": []}):
        message = client.chat.completions.create(**asked(reply, **more)).choices[0]
        assert (message.message.content, message.message.tool_calls, message.finish_reason) == (reply, None, "stop")
    for more in ({"tool_choice": "auto"}, {"tool_choice": None}, {"parallel_tool_calls": True}):
        assert called(client.chat.completions.create(**asked(reply, **more)).choices[0].message) == [SUM, PARIS]
    one = client.chat.completions.create(**asked(reply, parallel_tool_calls=False)).choices[0]
    assert called(one.message) == [SUM] and one.finish_reason == "tool_calls"
    allowed: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]},
    }
    assert not client.chat.completions.create(**asked(reply, tool_choice=allowed)).choices[0].message.tool_calls
    allowed["allowed_tools"]["mode"] = "required"
    named: Any = {"type": "function", "function": {"name": "add"}}
    for choice, last in (("required", "tool_calls"), (named, "stop")):  # the grammar lets through what the script writes
        one = client.chat.completions.create(**asked(written("hermes", SUM), tool_choice=choice)).choices[0]
        assert called(one.message) == [SUM] and one.finish_reason == last
    free = {"model": "tiny", "messages": [{"role": "user", "content": "Add."}], "tools": TOOLS, "max_tokens": 200}
    with Live(hermes.model, max_model_len=2048) as live:
        for choice in ("required", named, allowed):  # nothing else would make a random model write a call
            given: Any = free | {"tool_choice": choice, "temperature": 0.0}
            found = client_of(live).chat.completions.create(**given).choices[0]
            names = {"add"} if choice is named else {"now"} if choice is allowed else {tool["function"]["name"] for tool in TOOLS}
            if found.finish_reason != "length":
                assert {name for name, _ in called(found.message)} <= names and called(found.message)


@pytest.mark.parametrize("cut", [0.3, 0.5, 0.7])
def test_calls_that_break_off(server: tuple[str, Live], cut: float):
    """Nothing is lost: a call without an end is content of the whole answer, and an open call of the streamed one."""
    name, live = server
    reply = written(name, PARIS)
    reply = reply[: int(cut * len(reply))]
    client = client_of(live)
    choice = client.chat.completions.create(**asked(reply)).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (reply, None, "stop")
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked(reply, stream=True))]
    assert chunks[-1].finish_reason == "stop"
    begun = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    content = "".join(chunk.delta.content or "" for chunk in chunks)
    assert content == reply if not begun else begun[0].function is not None and begun[0].function.name == "get_weather"


def test_a_call_to_nothing_known_is_content(server: tuple[str, Live]):
    name, live = server
    reply = written(name, ("rm", {"path": "/"}))
    choice = client_of(live).chat.completions.create(**asked(reply)).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (reply, None, "stop")


def test_a_call_at_the_limit_of_tokens_ends_with_length(hermes: Live):
    client = client_of(hermes)
    for stream in (False, True):
        given = asked(written("hermes", SUM), max_completion_tokens=30, stream=stream)
        answer: Any = client.chat.completions.create(**given)
        assert ([*answer][-1] if stream else answer).choices[0].finish_reason == "length"


def test_several_choices_with_calls(hermes: Live):
    client = client_of(hermes)
    reply = written("hermes", SUM, PARIS, content="Both.")
    whole = client.chat.completions.create(**asked(reply, n=3))
    with client.chat.completions.stream(**asked(reply, n=3)) as stream:
        streamed = stream.get_final_completion()
    for answer in (whole, streamed):
        assert [called(choice.message) for choice in answer.choices] == [[SUM, PARIS]] * 3
        assert [choice.message.content for choice in answer.choices] == ["Both."] * 3
        assert len({call.id for choice in answer.choices for call in choice.message.tool_calls or []}) == 6


class AddNumbers(BaseModel):
    """Adds."""

    a: int
    b: int


def test_parsed_arguments(hermes: Live):
    client = client_of(hermes)
    given: Any = asked(written("hermes", ("AddNumbers", SUM[1]))) | {"tools": [openai.pydantic_function_tool(AddNumbers)]}
    (call,) = client.chat.completions.parse(**given).choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == AddNumbers(a=2, b=-3)
    form: Any = asked('{"a": 2, "b": -3}') | {"tools": openai.omit, "response_format": AddNumbers}
    assert client.chat.completions.parse(**form).choices[0].message.parsed == AddNumbers(a=2, b=-3)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_gets_to_its_answer(server: tuple[str, Live], stream: bool):
    name, live = server
    client = client_of(live)
    replies = [written(name, ("add", {"a": 2, "b": 3}), content="First."), written(name, ("add", {"a": 5, "b": 4})), "2 + 3 + 4 is 9."]
    messages: Any = [{"role": "system", "content": "You add."}, *asked(*replies)["messages"]]
    for _ in range(5):
        given: Any = {"model": "scripted", "messages": messages, "tools": TOOLS}
        if stream:
            with client.chat.completions.stream(**given) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**given).choices[0].message
        messages.append(message.to_dict())
        for call in message.tool_calls or []:
            assert call.type == "function"
            total = sum(json.loads(call.function.arguments).values())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
        if not message.tool_calls:
            break
    assert message.content == "2 + 3 + 4 is 9."
    assert [each["content"] for each in messages if each["role"] == "tool"] == ["5", "9"]


# Think blocks

THOUGHT = "<think>\nHm, é.\nSo: <b>\n</think>\n\nYes."


@pytest.mark.parametrize("shown", [None, True, False])
def test_reasoning(hermes: Live, shown: bool | None):
    client = client_of(hermes)
    more: Any = {"extra_body": {} if shown is None else {"include_reasoning": shown}, "n": 2}
    whole = client.chat.completions.create(**asked(THOUGHT, **more))
    for choice in whole.choices:
        message = choice.message.to_dict()
        assert message["content"] == "Yes." and choice.finish_reason == "stop"
        thoughts = (message.get("reasoning_content"), message.get("reasoning"))
        assert thoughts == ((None, None) if shown is False else ("Hm, é.\nSo: <b>",) * 2)
    usage = whole.usage
    assert usage is not None and usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 2 * len("Hm, é.\nSo: <b>".encode())
    *chunks, last = client.chat.completions.create(**asked(THOUGHT, **more, stream=True, stream_options={"include_usage": True}))
    assert last.usage is not None and last.usage.completion_tokens_details == usage.completion_tokens_details
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (usage.prompt_tokens, usage.completion_tokens)
    texts: dict[str, list[str]] = {"reasoning_content": ["", ""], "reasoning": ["", ""], "content": ["", ""]}
    for chunk in chunks:
        for field, found in texts.items():
            found[chunk.choices[0].index] += chunk.choices[0].delta.to_dict().get(field) or ""
    thought = "" if shown is False else "Hm, é.\nSo: <b>"
    assert texts == {"reasoning_content": [thought] * 2, "reasoning": [thought] * 2, "content": ["Yes."] * 2}


def test_reasoning_and_then_a_call(hermes: Live):
    client = client_of(hermes)
    reply = "<think>\nI add.\n</think>\n\n" + written("hermes", SUM)
    message = client.chat.completions.create(**asked(reply)).choices[0].message
    assert called(message) == [SUM] and message.content is None and message.to_dict()["reasoning"] == "I add."
    again = [*asked(reply)["messages"], message.to_dict(), {"role": "tool", "tool_call_id": "x", "content": "-1"}]
    tokens = hermes.post("/tokenize", {"messages": again, "tools": TOOLS}).json()["tokens"]
    text = hermes.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert "<think>\nI add.\n</think>" in text and "<tool_response>\n-1" in text


def test_variables_of_the_template(hermes: Live):
    client = client_of(hermes)
    for more in ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, {"reasoning_effort": "none"}):
        given = asked("Yes.", **more)
        given["extra_body"] = {**given.get("extra_body", {}), "return_token_ids": True}
        answer = client.chat.completions.create(**given).to_dict()
        text = hermes.post("/detokenize", {"tokens": answer["prompt_token_ids"]}).json()["prompt"]
        assert text.endswith("<think>\n\n</think>\n\n") and answer["choices"][0]["message"]["content"] == "Yes."
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked("x", extra_body={"chat_template_kwargs": {"messages": "x"}}))
    assert caught.value.param == "chat_template_kwargs.messages"
