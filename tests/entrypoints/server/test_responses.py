"""`/v1/responses`: whole answers and streams as OpenAI's client reads them, conversations of several turns, and errors."""

import json
import threading
from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

import nanovllm as nv
from nanovllm.entrypoints.server.input_items import input_messages
from nanovllm.errors import EngineDeadError, QueueFullError
from tests.entrypoints.server.live import Live
from tests.entrypoints.server.openai_clients import client_of
from tests.entrypoints.server.stand_in import answering

pytestmark = pytest.mark.unhooked  # uvloop's transports are of types of its own
PATH = "/v1/responses"
ASKED: Any = {"model": "tiny", "input": "Hello", "max_output_tokens": 12, "temperature": 0}
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
ARGUMENTS = '{"city": "Zürich"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
REPLY = f"<think>\nWhere is it?\n</think>\n\nI look it up.{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    """OpenAI's client, which refuses answers that are not of its types."""
    with client_of(live) as found:
        yield found


def stripped(response: Any) -> dict[str, Any]:
    """A response without what differs between two answers to the same request."""
    value = response if isinstance(response, dict) else response.to_dict()
    output = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in value["output"]]
    usage = {k: v for k, v in value["usage"].items() if k != "input_tokens_details"}
    return {**value, "id": "", "created_at": 0, "completed_at": 0, "output": output, "usage": usage}


def test_a_reply_is_that_of_chat_completions(live: Live, client: openai.OpenAI):
    response = client.responses.create(**ASKED, instructions="Be brief.", metadata={"a": "b"}, top_p=0.5)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    chat = live.post("/v1/chat/completions", {"messages": messages, "max_tokens": 12, "temperature": 0}).json()
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert response.status == "incomplete" and response.incomplete_details and response.incomplete_details.reason == "max_output_tokens"
    message = response.output[-1]
    assert message.type == "message" and message.status == "incomplete"
    assert (response.instructions, response.metadata, response.max_output_tokens) == ("Be brief.", {"a": "b"}, 12)
    assert (response.temperature, response.top_p, response.tool_choice, response.tools) == (0, 0.5, "auto", [])
    usage, wanted = response.usage, chat["usage"]
    assert (
        usage
        and (usage.input_tokens, usage.output_tokens) == (wanted["prompt_tokens"], 12)
        and usage.total_tokens == wanted["total_tokens"]
    )


def test_a_stream_is_the_same_response(client: openai.OpenAI):
    asked = {**ASKED, "reasoning": {"effort": "none"}, "max_output_tokens": 7}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events if not event.type.endswith(".delta")] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    # Tokens that come faster than events are written share one.
    assert len(deltas) > 1 and "".join(event.delta for event in deltas) == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete" and stripped(last.response) == stripped(whole)


@pytest.mark.parametrize("step", [1, 4, 1000])
def test_reasoning_text_and_calls_are_items(live: Live, client: openai.OpenAI, step: int):
    asked = {**ASKED, "tools": [WEATHER]}
    with answering(live, REPLY, step=step):
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
        *_, last = client.responses.create(**asked, stream=True)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.status == "completed" and all(getattr(item, "status", None) == "completed" for item in whole.output)
    reasoning, message, call, _ = whole.output
    assert reasoning.type == "reasoning" and reasoning.content and reasoning.content[0].text == "Where is it?"
    assert message.type == "message" and whole.output_text == "I look it up."
    assert call.type == "function_call" and call.name == "weather" and json.loads(call.arguments) == json.loads(ARGUMENTS)
    assert len({item.id for item in whole.output}) == 4
    assert len({item.call_id for item in whole.output if item.type == "function_call"}) == 2
    assert whole.tools[0].to_dict() == WEATHER
    assert whole.usage and 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert last.type == "response.completed" and stripped(last.response) == stripped(whole)
    assert [item.type for item in streamed.output] == [item.type for item in whole.output] and streamed.output_text == whole.output_text
    for kind in ("reasoning_text", "output_text", "function_call_arguments"):
        texts: dict[str, str] = {}
        for event in events:
            if event.type == f"response.{kind}.delta":
                texts[event.item_id] = texts.get(event.item_id, "") + event.delta
        ends = [event.to_dict() for event in events if event.type == f"response.{kind}.done"]
        done = {end["item_id"]: end.get("text", end.get("arguments")) for end in ends}
        assert texts == done and len(texts) == (2 if kind == "function_call_arguments" else 1)


def test_items_of_an_answer_are_the_next_input(live: Live, client: openai.OpenAI):
    """The prompt of the second turn is that of the same conversation as chat messages."""
    with answering(live, REPLY):
        first = client.responses.create(**ASKED, tools=[WEATHER])
    calls = [item for item in first.output if item.type == "function_call"]
    outputs: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "Rain."} for call in calls]
    given: Any = [{"role": "user", "content": "Hello"}, *[item.to_dict() for item in first.output], *outputs]
    function = {"name": "weather", "arguments": json.loads(ARGUMENTS)}
    assert [dict(message) for message in input_messages(given, "Be brief.")] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": "I look it up.",
            "reasoning_content": "Where is it?",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function} for call in calls],
        },
        *[{"role": "tool", "content": "Rain.", "tool_call_id": call.call_id} for call in calls],
    ]
    second = client.responses.create(**{**ASKED, "input": given}, tools=[WEATHER])
    assert second.status in ("completed", "incomplete") and second.usage
    count = client.responses.input_tokens.count(model="tiny", input=given, tools=[WEATHER])
    assert count.input_tokens == second.usage.input_tokens > 30


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("", ["message"]),
        ("Once", ["message"]),
        ("<think>\nHm", ["reasoning"]),
        ("<think>\nHm\n</think>\n\nOnce", ["reasoning", "message"]),
        (CALL[:-24], ["function_call"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_is_cut_off_is_incomplete(live: Live, client: openai.OpenAI, text: str, kinds: list[str], stream: bool):
    with answering(live, text, finish_reason="length"):
        if stream:
            *_, last = client.responses.create(**ASKED, tools=[WEATHER], stream=True)
            assert last.type == "response.incomplete"
            response = last.response
        else:
            response = client.responses.create(**ASKED, tools=[WEATHER])
    assert response.status == "incomplete" and [item.type for item in response.output] == kinds
    assert getattr(response.output[-1], "status", None) == "incomplete"


def test_an_empty_reply_is_an_empty_message(live: Live, client: openai.OpenAI):
    with answering(live, ""):
        with client.responses.stream(**ASKED) as stream:
            assert stream.get_final_response().output_text == ""
        (message,) = client.responses.create(**ASKED).output
    assert message.type == "message" and message.status == "completed" and message.content[0].to_dict()["text"] == ""


@pytest.mark.parametrize("text", ["", "Once upon", "<think>\nHm"])
def test_a_failure_within_a_stream_is_an_event(live: Live, client: openai.OpenAI, text: str):
    with answering(live, text, error=EngineDeadError("the engine has failed")):
        events = list(client.responses.create(**ASKED, stream=True))
        with pytest.raises(openai.InternalServerError):
            client.responses.create(**ASKED)
    assert events[0].type == "response.created" and [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.failed" and last.response.status == "failed" and last.response.usage is None
    assert last.response.error and last.response.error.code == "server_error" and "failed" in last.response.error.message
    assert all(getattr(item, "status", None) == "incomplete" for item in last.response.output)


def test_a_stream_begins_when_the_request_is_accepted(live: Live, client: openai.OpenAI):
    """The first two events come before any token, and once. A stream that fails or ends without text has them, too."""
    begun = ["response.created", "response.in_progress"]
    for text, error in (("Once upon", None), ("", None), ("", EngineDeadError("the engine has failed"))):
        held = threading.Event()
        with answering(live, text, error=error, held=held):
            events = iter(client.responses.create(**ASKED, stream=True))
            first = [next(events), next(events)]
            assert [event.type for event in first] == begun and not held.is_set()
            held.set()
            rest = [*events]
        assert not {event.type for event in rest} & {*begun}
        assert [event.sequence_number for event in [*first, *rest]] == list(range(2 + len(rest)))
        assert rest[-1].type == ("response.completed" if error is None else "response.failed")


@pytest.mark.parametrize("asked", [{}, {"stop": " help"}, {"stop": " help", "include_stop_str_in_output": True}, {"reasoning": None}])
def test_log_probabilities_of_the_text(live: Live, client: openai.OpenAI, asked: dict[str, Any]):
    """Those of the chat that has the same reply, whole and streamed: of the tokens that begin in the text, and of no others."""
    include: Any = ["message.output_text.logprobs"]
    body = {**ASKED, "max_output_tokens": 80, "include": include, "top_logprobs": 2, "reasoning": {"effort": "none"}}
    extra = {name: value for name, value in asked.items() if name != "reasoning"}
    body = {**body, **({"reasoning": None, "input": "What is 27 + 38?"} if "reasoning" in asked else {}), "extra_body": extra}
    whole = client.responses.create(**body)
    events = list(client.responses.create(**body, stream=True))
    (part,) = [part for item in whole.output if item.type == "message" for part in item.content]
    assert part.type == "output_text" and part.logprobs and "".join(one.token for one in part.logprobs) == part.text
    chat = {
        "messages": [{"role": "user", "content": body["input"]}],
        "max_tokens": 80,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    chat |= extra | ({} if "reasoning" in asked else {"reasoning_effort": "none"})
    listed = live.post("/v1/chat/completions", chat).json()["choices"][0]["logprobs"]["content"]
    dicts = [one.to_dict() for one in part.logprobs]
    start = next(i for i in range(len(listed)) if listed[i : i + len(dicts)] == dicts)
    assert start > 3 if "reasoning" in asked else start == 0  # a think block comes before
    assert len(listed) - start - len(dicts) <= 1  # the end token is not part of the text
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [one.to_dict() for delta in deltas for one in delta.logprobs] == dicts == [one.to_dict() for one in done.logprobs]
    last = events[-1]
    assert last.type in ("response.incomplete", "response.completed") and stripped(last.response) == stripped(whole)
    assert whole.top_logprobs == 2 and all(len(one.top_logprobs) == 2 for one in part.logprobs)


def test_log_probabilities_are_told_only_if_they_are_included(client: openai.OpenAI):
    whole = client.responses.create(**ASKED, top_logprobs=3, reasoning={"effort": "none"})
    (part,) = [part for item in whole.output if item.type == "message" for part in item.content]
    assert part.type == "output_text" and part.logprobs == []


def test_a_refusal_before_a_stream_is_a_status(live: Live, client: openai.OpenAI):
    with answering(live, "", error=QueueFullError("full"), error_after=False), pytest.raises(openai.RateLimitError):
        client.responses.create(**ASKED, stream=True)


def test_choices_of_tools_come_back_in_their_flat_form(live: Live, client: openai.OpenAI):
    named = {"type": "function", "name": "weather"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [named]}
    nested = {"type": "function", "function": {"name": "weather"}}
    inner = {"type": "allowed_tools", "allowed_tools": allowed}
    for choice, wanted in (("none", "none"), (named, named), (nested, named), (allowed, allowed), (inner, allowed)):
        asked = {**ASKED, "tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
        with answering(live, CALL):
            answer = client.responses.create(**asked)
        assert answer.to_dict()["tool_choice"] == wanted and answer.parallel_tool_calls is False


def test_fields_that_ask_for_nothing_are_taken(client: openai.OpenAI):
    response = client.responses.create(
        **ASKED,
        store=True,
        background=False,
        truncation="disabled",
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "none", "summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "low"},
        top_logprobs=0,
        service_tier="auto",
        user="me",
        prompt_cache_key="k",
        extra_body={"previous_response_id": None, "conversation": None, "n": 1},
    )
    assert response.reasoning and response.reasoning.effort == "none" and response.to_dict()["store"] is False


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", None),
        ({"input": []}, "input", None),
        ({"input": 3}, "input", None),
        ({"input": "word " * 5000}, "input", "context_length_exceeded"),
        ({"input": ["text"]}, "input[0]", None),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", None),
        ({"input": [{"role": "user"}]}, "input[0].content", None),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type", None),
        ({"input": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "input[1]", None),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]}, "input[0].arguments", None),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", None),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output", None),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id", None),
        ({"input": [{"type": "reasoning", "content": [{}]}]}, "input[0].content[0].text", None),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", None),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", None),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", None),
        ({"input": [{"type": [1]}]}, "input[0].type", None),
        ({"instructions": 3}, "instructions", None),
        ({"max_output_tokens": 0}, "max_output_tokens", None),
        ({"max_output_tokens": 10**6}, "input", "context_length_exceeded"),
        ({"max_output_tokens": 10**30}, "input", "context_length_exceeded"),
        ({"temperature": -1}, "temperature", None),
        ({"top_p": "x"}, "top_p", None),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", None),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", None),
        ({"tools": 3}, "tools", None),
        ({"tool_choice": "required"}, "tool_choice", None),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name", None),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice", None),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", None),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "hiccup"}}}}, "text.format", None),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 3}}}, "text.format.schema", None),
        ({"text": {"format": {"type": "hiccup"}}}, "text.format.type", None),
        ({"text": {"format": 3}}, "text.format", None),
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", None),
        ({"reasoning": {"effort": "frantic"}}, "reasoning.effort", None),
        ({"metadata": {"a": 3}}, None, None),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", None),
        ({"metadata": {"a": "b" * 513}}, "metadata", None),
        ({"top_logprobs": 21}, "top_logprobs", None),
        ({"top_logprobs": -1}, "top_logprobs", None),
        ({"include": ["everything"]}, "include[0]", None),
        ({"truncation": "auto", "input": "word " * 5000}, "input", "context_length_exceeded"),
        ({"truncation": "auto", "max_output_tokens": 10**6}, "input", "context_length_exceeded"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"return_token_ids": True}, "return_token_ids", "unsupported_parameter"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"messages": []}, "messages", "unknown_parameter"),
        ({"max_tokens": 3}, "max_tokens", "unknown_parameter"),
        ({"max_output_token": 3}, "max_output_token", "unknown_parameter"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_fields_are_refused(live: Live, fields: dict[str, Any], param: str | None, code: str | None, stream: bool):
    answer = live.post(PATH, {**ASKED, **fields, "stream": stream})
    error = answer.json()["error"]
    assert answer.status == 400 and error["type"] == "invalid_request_error" and len(error) == 4, answer
    assert (param is None or error["param"] == param) and error["code"] == code and error["message"], error


def test_another_model_is_not_found(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**{**ASKED, "model": "gpt-5"})
    with pytest.raises(openai.NotFoundError):
        client.responses.input_tokens.count(model="gpt-5", input="x")


def test_a_conversation_that_is_too_long_loses_its_oldest_turns(live: Live, client: openai.OpenAI):
    """What is left is the longest end of whole turns, after the instructions, that leaves room for the reply."""
    call = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": ARGUMENTS}
    answer = {"type": "function_call_output", "call_id": "a", "output": "Rain."}
    turns: list[Any] = [[{"role": "user", "content": f"Turn {i}: " + "word " * 250}, call, answer] for i in range(12)]
    turns.append([{"role": "user", "content": "Hello"}])
    asked = {**ASKED, "instructions": "Be brief.", "max_output_tokens": 300}
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**{**asked, "input": [*chain(*turns)]})

    def tokens(**fields: Any) -> int:
        return client.responses.input_tokens.count(model="tiny", instructions="Be brief.", **fields).input_tokens

    most = 2048 - 300
    given = {"input": [*chain(*turns)], "truncation": "auto"}
    response = client.responses.create(**{**asked, **given})
    fitting = [length for i in range(4, 12) if (length := tokens(input=[*chain(*turns[i:])])) <= most]
    assert response.truncation == "auto" and response.usage and response.usage.input_tokens == max(fitting)
    assert 2 < len(fitting) < 8 and tokens(**given) <= 2047
    short = {"input": [*chain(*turns[-2:])]}
    assert tokens(**short, truncation="auto") == tokens(**short)


class Colour(BaseModel):
    """What a reply is to be."""

    name: Literal["red", "green"]
    dark: bool


@pytest.mark.parametrize("effort", ["none", "low"])
def test_the_text_is_of_the_form_that_was_asked_for(client: openai.OpenAI, effort: Any):
    asked = {**ASKED, "max_output_tokens": 400, "reasoning": {"effort": effort}}
    parsed = client.responses.parse(**asked, text_format=Colour)
    assert parsed.status == "completed" and isinstance(parsed.output_parsed, Colour)
    assert parsed.text and parsed.text.format and parsed.text.format.type == "json_schema"
    with client.responses.stream(**asked, text_format=Colour) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_the_engine_is_idle_at_last(live: Live):
    live.wait_until_idle()
    nv.check(live.engine.state)
