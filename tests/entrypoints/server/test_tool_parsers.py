"""Tool calls in streams: the models' documented forms, nothing lost, no matter how the text is divided, in linear time."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.entrypoints.server.chat_limits import MAX_CALLS, MAX_HELD, MAX_LEAD, MAX_NAME
from nanovllm.entrypoints.server.tools.events import ArgumentsDelta, Call, CallBegins, CallEnds, Content, Event, merged, whole_reply
from nanovllm.entrypoints.server.tools.formats import FORMATS, tool_format
from nanovllm.errors import InvalidRequestError

TOOLS = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
    "now": {},
    "edit": {
        "properties": {
            "text": {"type": "string"},
            "at": {"type": ["integer", "null"]},
            "on": {"type": "boolean"},
            "items": {"type": "array"},
            "either": {"anyOf": [{"type": "string"}, {"type": "object"}]},
        }
    },
}


def read(name: str, text: str, size: int | None = None, most: int = MAX_CALLS) -> list[Event]:
    """The merged events of a reply in pieces of `size` characters. Their sources are the reply, and complete arguments are objects."""
    parser, events = FORMATS[name].parser(TOOLS, most=most), list[Event]()
    for at in range(0, len(text), size or max(1, len(text))):
        before = parser
        parser, more = parser.push(text[at : at + (size or len(text))])
        assert len(text) > 10_000 or before.push(text[at : at + (size or len(text))])[1] == more
        events += more
    events += parser.end()
    assert "".join(event.source for event in events) == text
    for call in whole_reply(events).calls:
        assert isinstance(json.loads(call.arguments), dict)
    return merged(events)


def calls(name: str, text: str) -> tuple[str, list[tuple[str, object]]]:
    reply = whole_reply(read(name, text))
    return reply.content, [(call.name, json.loads(call.arguments)) for call in reply.calls]


PARIS = '{"city": "Paris"}'
CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
LLAMA = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
XML = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
ONE = ("get_weather", {"city": "Paris"})
EXAMPLES = {  # (format, reply): (content, calls)
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>"): ("", [ONE]),
    ("hermes", f"I look.\n\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\n"): ("I look.\n\n", [ONE, ONE]),
    ("hermes", f"\n\n<tool_call>\n{CALL}\n</tool_call>"): ("", [ONE]),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>'): ("", [ONE]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>'): ("", [("now", {})]),
    ("hermes", f"<tool_call>\n{CALL}\n<tool_call>\n{CALL}\n</tool_call>"): ("", [ONE, ONE]),
    ("hermes", f"<tool_call>\n{CALL}"): ("", [ONE]),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call> and"): (" and", [ONE]),
    ("llama3", LLAMA): ("", [ONE]),
    ("llama3", f"<|python_tag|>{LLAMA}; {LLAMA}"): ("", [ONE, ONE]),
    ("llama3", f"Yes. <|python_tag|>{LLAMA}"): ("Yes. ", [ONE]),
    ("llama3", '{"type": "function", "name": "now", "parameters": {}}'): ("", [("now", {})]),
    ("llama3", f"Such as {LLAMA}"): (f"Such as {LLAMA}", []),
    ("llama3", f"{LLAMA}; and"): ("; and", [ONE]),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]"): ("", [ONE, ONE]),
    ("mistral", f'[TOOL_CALLS][{CALL[:-1]}, "id": "D681PevKs"}}]'): ("", [ONE]),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]now[ARGS]{{}}"): ("", [ONE, ("now", {})]),
    ("mistral", f"I look.[TOOL_CALLS]get_weather[CALL_ID]D681PevKs[ARGS]{PARIS}"): ("I look.", [ONE]),
    ("mistral", f"[TOOL_CALLS]get_weather{PARIS}"): ("", [ONE]),
    ("qwen3_coder", XML): ("", [ONE]),
    ("qwen3_coder", f"I look.\n{XML}\n{XML}"): ("I look.\n", [ONE, ONE]),
    ("qwen3_coder", XML.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")): ("", [ONE]),
    ("qwen3_coder", "<tool_call><function=now></function></tool_call>"): ("", [("now", {})]),
    (
        "qwen3_coder",
        "<function=edit>\n<parameter=text>\n\nif a < b:\n  'é\"\\'\n\n</parameter>\n<parameter=at>\n12\n</parameter>\n<parameter=on>\nTrue"
        '\n</parameter><parameter=items>\n[1, {"a": null}]\n</parameter>\n<parameter=either>\n3\n</parameter>\n</function>',
    ): ("", [("edit", {"text": "\nif a < b:\n  'é\"\\'\n", "at": 12, "on": True, "items": [1, {"a": None}], "either": "3"})]),
    (
        "qwen3_coder",
        "<function=edit><parameter=at>None</parameter><parameter=items>[NaN</parameter><parameter=other>\n1\n</parameter>"
        '<parameter=either>{"a":1}</parameter></function>',
    ): ("", [("edit", {"at": None, "items": "[NaN", "other": "1", "either": {"a": 1}})]),
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example[0]}: {example[1][:40]!r}")
def test_documented_forms(example: tuple[str, str]) -> None:
    name, text = example
    assert calls(name, text) == EXAMPLES[example]
    assert all(read(name, text, size) == read(name, text) for size in (1, 2, 3, 7))


BROKEN = {
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": []}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}, "arguments": {}, "name": "now"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}, "name": "unknown"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}, "name": 3}'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 01}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "'),
    ("hermes", '<tool_call>{"name": "now", "arg'),
    ("hermes", "<tool_call>now()</tool_call>"),
    ("hermes", "a <tool_call and </tool_call> and <tool_"),
    ("hermes", '<tool_call>{"' + "n" * 1000 + '": 1}'),
    ("llama3", '{"answer": 4}'),
    ("llama3", "<|python_tag|>print(1)"),
    ("llama3", "{}"),
    ("llama3", " "),
    ("mistral", "[TOOL_CALLS] now"),
    ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]now[ARGS] [1]"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS]" + "n" * (MAX_NAME + 1) + "[ARGS]{}"),
    ("qwen3_coder", "<tool_call><function=unknown></function></tool_call>"),
    ("qwen3_coder", "<function=edit><parameter=text>a</parameter><parameter=text>b</parameter></function>"),
    ("qwen3_coder", "<function=edit><parameter=text>a"),
    ("qwen3_coder", "<function=edit><parameter=items>[1]</para"),
    ("qwen3_coder", "<function=edit>text</function>"),
    ("qwen3_coder", "<function=" + "n" * (MAX_NAME + 1) + "></function>"),
}


@pytest.mark.parametrize("example", sorted(BROKEN), ids=lambda example: f"{example[0]}: {example[1][:40]!r}")
def test_what_is_not_a_call_is_content(example: tuple[str, str]) -> None:
    name, text = example
    assert calls(name, text) == (text, [])
    assert all(read(name, text, size) == read(name, text) for size in (1, 2, 3, 7))


def test_a_call_after_a_broken_one_is_found() -> None:
    assert calls("hermes", f'<tool_call>{{"name": "now\n<tool_call>{CALL}</tool_call>') == ('<tool_call>{"name": "now\n', [ONE])
    assert calls("hermes", f'<tool_call>{{"name": "now", "arguments": {{x<tool_call>{CALL}') == (
        '<tool_call>{"name": "now", "arguments": {x',
        [ONE],
    )


def test_arguments_are_given_out_as_they_come() -> None:
    parser = FORMATS["hermes"].parser(TOOLS)
    seen = []
    for piece in ("Yes <to", "ol_call>", '{"name": "get_wea', 'ther", "arguments": ', '{"ci', 'ty": "Par', 'is"}', "}\n</tool", "_call>"):
        parser, events = parser.push(piece)
        seen.append(events)
    head = '<tool_call>{"name": "get_weather", "arguments": '
    assert seen == [
        [Content("Yes ")],
        [],
        [],
        [],
        [CallBegins(0, "get_weather", head), ArgumentsDelta(0, '{"ci', '{"ci')],
        [ArgumentsDelta(0, 'ty": "Par', 'ty": "Par')],
        [ArgumentsDelta(0, 'is"}', 'is"}'), CallEnds(0, True)],
        *seen[-2:],
    ]
    assert parser.end() == []


@given(st.text(st.sampled_from("ab<t\n [{"), max_size=60), st.sampled_from(sorted(FORMATS)))
def test_content_waits_only_while_it_may_be_a_marker(text: str, name: str) -> None:
    parser, shown = FORMATS[name].parser(TOOLS), 0
    for char in text:
        parser, events = parser.push(char)
        shown += sum(len(event.source) for event in events)
        reading = parser.reading
        assert len(reading.rest) <= max(map(len, reading.markers))


def test_further_calls_than_the_request_allows_are_content() -> None:
    text = f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    reply = whole_reply(read("hermes", text, most=1))
    assert len(reply.calls) == 1
    assert reply.content == text[len(text) // 2 :]
    assert len(whole_reply(read("llama3", ";".join([LLAMA] * 3), most=2)).calls) == 2


PIECES = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<function=", "</function>", "<parameter=",
    "</parameter>", "now", "edit", "text", "items", "at", ">", "\n", "{", "}", "[", "]", '"', "\\", ":", ",", ";", " ", "<", "é", "1",
    "[1]", '{"name": "now", ', '"name": ', '"arguments": ', '"parameters": ', '"id": 1', '{"a": [1, {"b": "c"}]}', CALL, LLAMA, XML,
]  # fmt: skip


@given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=16).map("".join), st.data())
def test_events_do_not_depend_on_the_pieces_and_lose_nothing(name: str, text: str, data: st.DataObject) -> None:
    expected, parser, events, left = read(name, text), FORMATS[name].parser(TOOLS), list[Event](), text
    while left:
        size = data.draw(st.integers(1, 9))
        parser, more = parser.push(left[:size])
        events, left = events + more, left[size:]
    assert merged(events + parser.end()) == expected
    begun = [event.index for event in expected if isinstance(event, CallBegins)]
    assert begun == list(range(len(begun))) == [event.index for event in expected if isinstance(event, CallEnds)]


ARGUMENTS = st.dictionaries(st.text(max_size=4), st.text(max_size=6) | st.integers() | st.lists(st.booleans(), max_size=2), max_size=3)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), ARGUMENTS), min_size=1, max_size=3), st.booleans(), st.integers(1, 5))
def test_calls_come_back(given_calls: list[tuple[str, dict[str, object]]], swap: bool, size: int) -> None:
    def written(key: str) -> list[str]:
        both = [{"name": name, key: arguments} for name, arguments in given_calls]
        return [json.dumps(dict(reversed(call.items())) if swap else call) for call in both]

    texts = {
        "hermes": "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written("arguments")),
        "llama3": "; ".join(written("parameters")),
        "mistral": f"[TOOL_CALLS] [{', '.join(written('arguments'))}]",
    }
    for name, text in texts.items():
        reply = whole_reply(read(name, text, size))
        assert reply.content == ""
        assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == given_calls


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda text: "</parameter>" not in text), st.integers(1, 5))
def test_text_in_tags_comes_back(value: str, size: int) -> None:
    text = f"<tool_call>\n<function=edit>\n<parameter=text>\n{value}\n</parameter>\n</function>\n</tool_call>"
    (call,) = whole_reply(read("qwen3_coder", text, size)).calls
    assert json.loads(call.arguments) == {"text": value}


@pytest.mark.parametrize("size", [None, 1000])
@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": "%s"}, "name": "now"}</tool_call>'),
        ("qwen3_coder", '<function=edit><parameter=items>["%s"]</parameter></function><function=now></function>'),
        ("hermes", "<tool_call>%s<tool_call>"),
    ],
)
def test_what_is_held_is_bounded(name: str, text: str, more: int, size: int | None) -> None:
    text = text % ((" " if "now" not in text else "x") * (MAX_HELD + more))
    assert read(name, text, size) == read(name, text, 777)
    assert len(whole_reply(read(name, text)).calls) == ("function" in text)


def test_white_space_between_calls_is_not_content_unless_it_is_long() -> None:
    for space, content in ((" " * MAX_LEAD, ""), (" " * (MAX_LEAD + 1), " " * (MAX_LEAD + 1))):
        reply = whole_reply(read("hermes", f"<tool_call>{CALL}</tool_call>{space}<tool_call>{CALL}</tool_call>"))
        assert (reply.content, reply.calls) == (content, (Call(name="get_weather", arguments=PARIS),) * 2)


HOSTILE = {
    "hermes": ["<tool_call>", '<tool_call>{"name":', '<tool_call>{"arguments":{"a":"', f"<tool_call>{CALL}", "<tool_call", '"\\', " ", "{"],
    "llama3": ["<|python_tag|>{", f"{LLAMA};", '"\\', "{", " "],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][", "[TOOL_CALLS]now[ARGS]", f"[TOOL_CALLS]now[ARGS]{PARIS}", f"{CALL},", '"\\', "["],
    "qwen3_coder": [
        "<function=edit>", "<function=edit><parameter=text>", "<function=edit><parameter=items>", "<parameter=items>[1]</parameter>",
        "\n</parameter", XML, "<tool_call>", "<", "\n",
    ],
}  # fmt: skip
BEGUN = {
    "hermes": '<tool_call>{"name":"now","arguments":{"a":"',
    "llama3": '{"name":"now","parameters":{"a":"',
    "mistral": f"[TOOL_CALLS][{CALL},",
    "qwen3_coder": "<function=edit><parameter=items>",
}


def seconds(name: str, text: str, size: int) -> float:
    parser, start = FORMATS[name].parser(TOOLS), time.thread_time()
    for at in range(0, len(text), size):
        parser, _ = parser.push(text[at : at + size])
    parser.end()
    return time.thread_time() - start


@pytest.mark.unhooked
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_time_is_linear(name: str) -> None:
    for hostile in HOSTILE[name]:
        for begin, size in (("", 1 << 17), (BEGUN[name], 1 << 17), (BEGUN[name], 64)):  # characters of a piece
            text = begin + hostile * ((1 << 17) // len(hostile))
            assert seconds(name, text, size) < 10, (begin, hostile)  # a quadratic reader takes longer by far
    assert seconds(name, BEGUN[name] + '"\\' * (1 << 12), 1) < 5


def test_formats_by_name() -> None:
    assert tool_format("hermes").name == "hermes"
    with pytest.raises(InvalidRequestError, match="'pythonic' is unknown; choose one of hermes"):
        tool_format("pythonic")
