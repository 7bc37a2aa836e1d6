"""Chat requests: what templates get of them equals what transformers renders, and what is malformed is refused with its path."""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nanovllm as nv
from nanovllm.entrypoints.server import chat_limits as limits
from nanovllm.entrypoints.server.fields import InvalidParamError, check_json
from nanovllm.entrypoints.server.messages import chat_prompt
from nanovllm.entrypoints.server.reasoning import reasoning_format_of
from nanovllm.entrypoints.server.tools.formats import tool_format_of
from nanovllm.errors import InvalidRequestError
from nanovllm.testing.models import byte_tokenizer, random_model, tiny_config
from nanovllm.tokenizer.messages import render
from nanovllm.tokenizer.tokenizer import Tokenizer, make_tokenizer

TEMPLATES = {path.stem: path.read_text() for path in (Path(__file__).parent / "templates").glob("*.jinja")}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def tokenizer_of(template: str) -> Tokenizer:
    return make_tokenizer(byte_tokenizer().backend, SPECIAL, template)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The <weather> & more.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "é": {"enum": [1, None, True]}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}}
CALL = {
    "id": "call_0123456789",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris", "n": [1.5, null]}'},
}
ASKED: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"}]
CALLED: list[Any] = [
    *ASKED,
    {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_0123456789", "content": '{"celsius": 3}'},
]
BODIES: dict[str, dict[str, Any]] = {
    "no tools": {"messages": ASKED},
    "tools": {"messages": ASKED, "tools": [WEATHER, NOW]},
    "a call": {"messages": CALLED, "tools": [WEATHER, NOW]},
    "a call answered": {
        "messages": [*CALLED, {"role": "assistant", "content": "3 °C"}, {"role": "user", "content": "Thanks"}],
        "tools": [WEATHER],
    },
    "no thinking": {"messages": ASKED, "chat_template_kwargs": {"enable_thinking": False}},
    "variables": {"messages": ASKED, "tools": [NOW], "chat_template_kwargs": {"tools_in_user_message": False, "date_string": "1 May"}},
    "no generation prompt": {"messages": ASKED, "add_generation_prompt": False},
    "continued": {"messages": [*ASKED, {"role": "assistant", "content": "It is "}], "continue_final_message": True},
}


def as_transformers(template: str, body: dict[str, Any]) -> str:
    """The prompt that transformers renders, from messages whose arguments are objects."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = json.loads(json.dumps(body["messages"]))
    for message in messages:
        message["content"] = message["content"] or ""
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    continued = body.get("continue_final_message", False)
    (text,), _ = render_jinja_template(
        conversations=[messages],
        tools=body.get("tools"),
        chat_template=template,
        continue_final_message=continued,
        add_generation_prompt=body.get("add_generation_prompt", not continued),
        **{"enable_thinking": True, **SPECIAL, **body.get("chat_template_kwargs", {})},
    )
    return text


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_prompts_equal_those_of_transformers(template: str, body: str) -> None:
    tokenizer = tokenizer_of(TEMPLATES[template])
    text = tokenizer.decode(chat_prompt(BODIES[body]).token_ids(tokenizer), skip_special_tokens=False)
    assert text == as_transformers(TEMPLATES[template], BODIES[body])
    assert ("get_weather" in text) == (WEATHER in BODIES[body].get("tools", []))


def test_formats_are_recognised_by_the_template() -> None:
    formats = {name: tool_format_of(tokenizer_of(template)) for name, template in TEMPLATES.items()}
    assert {name: form and form.name for name, form in formats.items()} == {
        "tagged_calls": "hermes",
        "bracketed_calls": "mistral",
        "header_roles": "llama3",
        "tagged_parameters": "qwen3_coder",
    }
    assert tool_format_of(byte_tokenizer()) is None
    with_tools = make_tokenizer(byte_tokenizer().backend, {}, {"default": "{{ 1 }}", "tool_use": TEMPLATES["tagged_calls"]})
    assert (tool_format_of(with_tools) or formats["bracketed_calls"]) is formats["tagged_calls"]
    assert reasoning_format_of(tokenizer_of(TEMPLATES["tagged_calls"])) is not None
    assert reasoning_format_of(tokenizer_of(TEMPLATES["header_roles"])) is None


def test_messages_become_what_templates_take() -> None:
    prompt = chat_prompt(
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "input_text", "text": "brief."}]},
                {"role": "user", "name": "Ann", "content": "Hi", "audio": None},
                {
                    "role": "assistant",
                    "reasoning": "hm",
                    "content": [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}],
                },
                {"role": "assistant", "function_call": {"name": "now", "arguments": ""}},
                {"role": "function", "name": "now", "content": "12:00"},
                CALLED[2],
                CALLED[3],
            ],
            "reasoning_effort": "none",
            "parallel_tool_calls": False,
        }
    )
    function = {"name": "get_weather", "arguments": {"city": "Paris", "n": [1.5, None]}}
    assert prompt.messages == (
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "Hi", "name": "Ann"},
        {"role": "assistant", "content": "a\nb", "reasoning_content": "hm"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": {}}}]},
        {"role": "tool", "content": "12:00", "name": "now"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I look.",
            "tool_calls": [{"id": "call_0123456789", "type": "function", "function": function}],
        },
        {"role": "tool", "content": '{"celsius": 3}', "tool_call_id": "call_0123456789"},
    )
    assert (prompt.enable_thinking, prompt.variables, prompt.parallel_tool_calls) == (False, {"reasoning_effort": "none"}, False)
    assert chat_prompt({"messages": ASKED, "reasoning_effort": "low"}).enable_thinking


CHOICES: list[tuple[Any, str, tuple[str, ...]]] = [
    (None, "auto", ("get_weather", "now")),
    ("auto", "auto", ("get_weather", "now")),
    ("none", "none", ()),
    ("required", "required", ("get_weather", "now")),
    ({"type": "function", "function": {"name": "now"}}, "required", ("now",)),
    ({"type": "function", "name": "now"}, "required", ("now",)),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NOW]}}, "auto", ("now",)),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}, "required", ("now",)),
]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("choice", "mode", "names"), CHOICES)
def test_tool_choices(choice: object, mode: str, names: tuple[str, ...], flat: bool) -> None:
    tools = [{"type": "function", "strict": True, **tool["function"]} for tool in (WEATHER, NOW)] if flat else [WEATHER, NOW]
    prompt = chat_prompt({"messages": ASKED, "tools": tools, "tool_choice": choice})
    assert (prompt.tool_choice.mode, prompt.tool_choice.names) == (mode, names)
    assert prompt.tool_choice.single == (isinstance(choice, dict) and choice["type"] == "function")
    assert [tool.definition for tool in prompt.tools] == [WEATHER, NOW]
    assert tuple(prompt.callable_tools) == names
    text = tokenizer_of("{{ tools }}").decode(prompt.token_ids(tokenizer_of("{{ tools is none }}")))
    assert text == str(mode == "none")


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def tool(**function: Any) -> dict[str, Any]:
    return {"messages": ASKED, "tools": [{"type": "function", "function": {"name": "f", **function}}]}


def kwargs(**variables: Any) -> dict[str, Any]:
    return {"messages": ASKED, "chat_template_kwargs": variables}


def call(arguments: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}, *ASKED]}


DEEP: list[Any] = []
for _ in range(limits.MAX_DEPTH + 1):
    DEEP = [DEEP]
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "must be an array"),
    ({"messages": []}, "messages", "has 0 elements"),
    ({"messages": [3]}, "messages[0]", "is 3; it must be an object"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "'robot'; it must be one of system, developer"),
    ({"messages": [{"role": ["user"], "content": ""}]}, "messages[0].role", "must be one of"),
    (user(None), "messages[0].content", "is missing"),
    (user(5), "messages[0].content", "must be a string or an array"),
    (user("\ud800"), "messages[0].content", "lone surrogate U+D800"),
    (user([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]), "messages[0].content[1].type", "is 'image_url'"),
    (user([{"type": "input_audio"}]), "messages[0].content[0].type", "takes text alone"),
    (user([{"type": "text"}]), "messages[0].content[0].text", "is None; it must be a string"),
    (user(["a"] * (limits.MAX_PARTS + 1)), "messages[0].content", "elements"),
    (call("{"), "messages[0].tool_calls[0].function.arguments", "is not JSON"),
    (call("[1]"), "messages[0].tool_calls[0].function.arguments", "a JSON object"),
    (call('{"a": NaN}'), "messages[0].tool_calls[0].function.arguments", "NaN is not JSON"),
    (call('{"a": ' + "[" * 9999), "messages[0].tool_calls[0].function.arguments", "is not JSON"),
    (call('{"a": "\\ud800"}'), "messages[0].tool_calls[0].function.arguments.a", "lone surrogate"),
    (call('{"a": ' + "1" * 9999 + "}"), "messages[0].tool_calls[0].function.arguments", "is not JSON"),
    (call('{"a": ' + "1" * 1010 + "}"), "messages[0].tool_calls[0].function.arguments.a", "1000 digits"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "messages[0].role", "set continue_final_message"),
    ({"messages": ASKED, "continue_final_message": True}, "continue_final_message", "last message of the assistant"),
    ({"messages": ASKED, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "together"),
    ({"messages": ASKED, "add_generation_prompt": 1}, "add_generation_prompt", "true or false"),
    ({"messages": ASKED, "reasoning_effort": "much"}, "reasoning_effort", "must be one of none"),
    ({"messages": ASKED, "tools": {}}, "tools", "must be an array"),
    ({"messages": ASKED, "tools": [NOW] * 2}, "tools[1].function.name", "once more"),
    ({"messages": ASKED, "tools": [{"type": "function", **NOW["function"]}] * 2}, "tools[1].name", "once more"),
    ({"messages": ASKED, "tools": [NOW] * (limits.MAX_TOOLS + 1)}, "tools", "elements"),
    ({"messages": ASKED, "tools": [{"type": "web_search"}]}, "tools[0].type", "only 'function'"),
    (tool(name="a b"), "tools[0].function.name", "letters"),
    (tool(name="n" * 65), "tools[0].function.name", "at most 64"),
    (tool(name=None), "tools[0].function.name", "string"),
    (tool(parameters=[]), "tools[0].function.parameters", "an object"),
    (tool(parameters={"a": DEEP}), "tools[0].function.parameters.a", "deeper"),
    (tool(description="d" * limits.MAX_TOOLS_CHARS), "tools", "characters"),
    (tool(parameters={"enum": [0] * limits.MAX_NODES}), "tools", "values"),
    (tool(parameters={"default": float("inf")}), "tools[0].function.parameters.default", "inf"),
    (tool(parameters={"default": {1}}), "tools[0].function.parameters.default", "set"),
    (tool(parameters={3: 1}), "tools[0].function.parameters", "keys"),
    ({"messages": ASKED, "tool_choice": "required"}, "tool_choice", "no tools"),
    ({"messages": ASKED, "tool_choice": "any", "tools": [NOW]}, "tool_choice", "must be 'none'"),
    ({"messages": ASKED, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name", "not among"),
    ({"messages": ASKED, "tool_choice": {"type": "allowed_tools", "mode": "none"}}, "tool_choice.mode", "'auto' or 'required'"),
    ({"messages": ASKED, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools", "elements"),
    (kwargs(messages="x"), "chat_template_kwargs.messages", "cannot be set"),
    (kwargs(eos_token="x"), "chat_template_kwargs.eos_token", "cannot be set"),
    (kwargs(enable_thinking=1), "chat_template_kwargs.enable_thinking", "true or false"),
    (kwargs(a=[1]), "chat_template_kwargs.a", "a string, a number"),
    (kwargs(a="x" * 4097), "chat_template_kwargs.a", "at most 4096"),
    (kwargs(**{"a b": 1}), "chat_template_kwargs", "identifiers"),
    (kwargs(**{f"a{i}": 1 for i in range(33)}), "chat_template_kwargs", "33 entries"),
    ({"messages": ASKED, "chat_template_kwargs": "a"}, "chat_template_kwargs", "object"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "problem"), BAD, ids=[f"{param} {problem}"[:60] for _, param, problem in BAD])
def test_what_is_malformed_is_refused_with_its_path(body: dict[str, Any], param: str, problem: str) -> None:
    with pytest.raises(InvalidParamError) as caught:
        chat_prompt(body)
    assert param in caught.value.param
    assert str(caught.value).startswith(caught.value.param)
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 500


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(["text", "function", "now", "auto"])
)
WORDS = ["role", "content", "type", "text", "function", "name", "arguments", "parameters", "tool_calls", "mode", "tools", "id", "messages"]
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=2), inner, max_size=4)
)
FIELDS = ["messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "continue_final_message", "parallel_tool_calls"]


@settings(max_examples=200)
@given(st.data())
def test_anything_is_read_or_refused(data: st.DataObject) -> None:
    body = json.loads(json.dumps(BODIES[data.draw(st.sampled_from(sorted(BODIES)))]))
    for _ in range(data.draw(st.integers(1, 2))):  # put something else at some place
        place: Any = body
        while data.draw(st.booleans()) and isinstance(place, dict | list) and place:
            key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            if not isinstance(place[key], dict | list):
                break
            place = place[key]
        if isinstance(place, dict):
            place[data.draw(st.sampled_from([*place, *(FIELDS if place is body else WORDS)]))] = data.draw(ANYTHING)
        elif place:
            place[data.draw(st.integers(0, len(place) - 1))] = data.draw(ANYTHING)
    try:
        prompt = chat_prompt(body)
    except InvalidParamError as error:
        assert str(error).startswith(error.param)
        return
    for tokenizer in TOKENIZERS:
        with suppress(InvalidRequestError):  # of the template: roles that must alternate, ids that are too short
            prompt.token_ids(tokenizer)


TOKENIZERS = [tokenizer_of(template) for template in TEMPLATES.values()]


def test_json_is_measured() -> None:
    assert check_json({"a": [1, "bc", None, True, 1.5]}, "x") == 7 * 8 + 3


def test_the_library_takes_tools_and_continues() -> None:
    tokenizer = tokenizer_of(TEMPLATES["tagged_calls"])

    def text(messages: Any, **options: Any) -> str:
        return tokenizer.decode(render(tokenizer, messages, **options), skip_special_tokens=False)

    assert "get_weather" in text(ASKED, tools=[WEATHER])
    assert text(ASKED, tools=[]) == text(ASKED)
    called = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, CALLED[3]]
    assert '<tool_response>\n{"celsius": 3}' in text(called)
    assert text(called[:3], add_generation_prompt=False) in text(called)
    model = random_model(tiny_config(), tokenizer=tokenizer)
    tokens = render(tokenizer, ASKED, tools=[WEATHER])
    assert nv.LLM(model, num_pages=8).chat_tokens(ASKED, tools=[WEATHER]) == tokens
    assert asyncio.run(nv.AsyncLLM(model, num_pages=8).chat_tokens(ASKED, tools=[WEATHER])) == tokens
    for problem, messages, options in (
        ("tools=3 must be a list", ASKED, {"tools": 3}),
        (r"tools\[0\] is 'now'; it must be {'type'", ASKED, {"tools": ["now"]}),
        ("names that templates get otherwise", ASKED, {"variables": {"messages": 1}}),
        ("last message of the assistant", ASKED, {"continue_final_message": True}),
        ("last message of the assistant", called[:3], {"continue_final_message": True}),
        ("nothing is left to answer", called[:3], {}),
    ):
        with pytest.raises(InvalidRequestError, match=problem):
            text(messages, **options)
    with pytest.raises(InvalidRequestError, match="leaves the last message out"):
        render(tokenizer_of("{{ messages[0].content }}"), [*ASKED, {"role": "assistant", "content": "a"}], continue_final_message=True)
