"""Think blocks in streams: where they begin and end, nothing lost, no matter how the text is divided, in linear time."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.entrypoints.server.reasoning import (
    MAX_SPACE,
    REASONING_FORMATS,
    ReasoningSplitter,
    left_open,
    reasoning_format,
    reasoning_format_of,
)
from nanovllm.entrypoints.server.reply import ReplyParser
from nanovllm.entrypoints.server.tools.events import Content, Event, Markup, Reasoning, merged, whole_reply
from nanovllm.entrypoints.server.tools.formats import FORMATS
from nanovllm.errors import InvalidRequestError
from nanovllm.testing.models import byte_tokenizer
from nanovllm.tokenizer.tokenizer import make_tokenizer

THINK = REASONING_FORMATS["think"]
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def split(text: str, size: int | None = None, opened: bool = False, tools: bool = False) -> list[Event]:
    parser = ReplyParser(
        splitter=ReasoningSplitter.of(THINK, opened=opened), tools=FORMATS["hermes"].parser({"now": {}}) if tools else None
    )
    events = list[Event]()
    for at in range(0, len(text), size or max(1, len(text))):
        parser, more = parser.push(text[at : at + (size or len(text))])
        assert parser.splitter is not None
        assert len(parser.splitter.held) <= MAX_SPACE + len(THINK.closing) + 1
        events += more
    events += parser.end()
    assert "".join(event.source for event in events) == text
    return merged(events)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nHi", False, "hm", "Hi"),
        ("\n<think>hm\n\n</think>Hi", False, "hm\n", "Hi"),
        ("<think>\n\n</think>\n\nHi", False, "", "Hi"),
        ("hm\n</think>\n\nHi", True, "hm", "Hi"),
        ("\nhm <think> hm</think>Hi</think>", True, "hm <think> hm", "Hi</think>"),
        ("hm\n</thin", True, "hm\n</thin", ""),
        ("<think>hm", False, "hm", ""),
        ("Hi <think>x</think>", False, "", "Hi <think>x</think>"),
        ("<thi", False, "", "<thi"),
        ("", True, "", ""),
        ("  ", False, "", "  "),
        (" " * (MAX_SPACE + 1) + "<think>hm</think>", False, "", " " * (MAX_SPACE + 1) + "<think>hm</think>"),
    ],
)
def test_examples(text: str, opened: bool, reasoning: str, content: str) -> None:
    for size in (None, 1, 2, 3, 5):
        reply = whole_reply(split(text, size, opened))
        assert (reply.reasoning, reply.content) == (reasoning, content)


def test_events_of_a_stream() -> None:
    splitter, seen = ReasoningSplitter.of(THINK), []
    for piece in ("<th", "ink>\n", "a", "b\n</th", "ough", "\n</think>", "\n\nc"):
        splitter, events = splitter.push(piece)
        seen.append(events)
    assert seen == [
        [],
        [Markup("<think>"), Markup("\n")],
        [Reasoning("a")],
        [Reasoning("b")],
        [Reasoning("\n</though")],
        [Markup("\n</think>")],
        [Markup("\n\n"), Content("c")],
    ]


PIECES = ["<think>", "</think>", "\n", " ", "<", "th", "a", "</", CALL, "<tool_call>", "é"]


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join), st.booleans(), st.integers(1, 9), st.booleans())
def test_events_do_not_depend_on_the_pieces_and_lose_nothing(text: str, opened: bool, size: int, tools: bool) -> None:
    assert split(text, size, opened, tools) == split(text, None, opened, tools)


def test_calls_are_found_in_the_content_alone() -> None:
    reply = whole_reply(split(f"<think>\n{CALL}\n</think>\n\n{CALL}", tools=True))
    assert (reply.reasoning, reply.content, len(reply.calls)) == (CALL, "", 1)
    plain = ReplyParser().push("a")
    assert plain[1] == [Content("a")]
    assert plain[0].end() == []


@pytest.mark.parametrize(
    ("prompt", "continued", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", "", True),
        ("<|im_start|>assistant\n", "", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", False),
        ("<|im_start|>user\nWhat is <think><|im_end|>\n<|im_start|>assistant\n", "", False),
        ("<|im_start|>assistant\n<think>\nhm", "<think>\nhm", True),
        ("<|im_start|>assistant\n<think>\nhm</think>", "<think>\nhm</think>", False),
        ("<|im_start|>assistant\nhm", "hm", False),
    ],
)
def test_the_prompt_may_have_opened_the_block(prompt: str, continued: str, expected: bool) -> None:
    assert left_open(THINK, prompt, continued) is expected


@pytest.mark.unhooked
@pytest.mark.parametrize("hostile", ["<think>", "</think", "\n</think", "\n", "<", " ", "a"])
def test_time_is_linear(hostile: str) -> None:
    text, start = hostile * ((1 << 19) // len(hostile)), time.process_time()
    for opened in (False, True):
        for size in (len(text), 64):
            splitter = ReasoningSplitter.of(THINK, opened=opened)
            for at in range(0, len(text), size):
                splitter, _ = splitter.push(text[at : at + size])
            splitter.end()
    assert time.process_time() - start < 1


def test_formats_by_name_and_by_template() -> None:
    def of(template: str | None) -> str | None:
        form = reasoning_format_of(make_tokenizer(byte_tokenizer().backend, {}, template))
        return None if form is None else form.name

    assert reasoning_format("think") is THINK
    with pytest.raises(InvalidRequestError, match="'none' is unknown; choose one of think"):
        reasoning_format("none")
    assert of("{{ '<think>\n\n</think>' }}") == "think"
    assert of("[THINK]{{ 1 }}[/THINK]") == "mistral"
    assert of("{{ messages }}") is None
    assert of(None) is None
