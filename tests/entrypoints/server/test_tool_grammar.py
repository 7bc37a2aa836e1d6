"""Grammars that force calls: llguidance compiles them, they accept the models' own formats alone, and parsers read what passes."""

import json
import random
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken

from nanovllm.entrypoints.server.messages import chat_prompt
from nanovllm.entrypoints.server.reasoning import REASONING_FORMATS
from nanovllm.entrypoints.server.reply import ReplyParser
from nanovllm.entrypoints.server.tools.definitions import read_tool_choice, read_tools
from nanovllm.entrypoints.server.tools.events import whole_reply
from nanovllm.entrypoints.server.tools.formats import FORMATS
from nanovllm.entrypoints.server.tools.grammar import call_grammar
from nanovllm.sampling.compiled_grammar import compile_for
from nanovllm.sampling.grammar import Grammar
from nanovllm.testing.models import byte_tokenizer
from nanovllm.tokenizer.tokenizer import Tokenizer, make_tokenizer

llguidance = pytest.importorskip("llguidance")

CITY = {"type": "string"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": CITY, "days": {"$ref": "#/$defs/days", "type": "integer"}, "unit": {"enum": ["C", "F"]}},
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"days": {"type": "integer", "minimum": 1}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {tool.name: tool.parameters for tool in read_tools(TOOLS)}
MARKERS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]


def tokenizer_with(markers: list[str], special: bool) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(byte_tokenizer().backend.to_str())
    tokens = [AddedToken(marker, special=special) for marker in markers]
    backend.add_special_tokens(tokens) if special else backend.add_tokens(tokens)
    return make_tokenizer(backend, {}, None)


PLAIN, ADDED, SPECIAL = byte_tokenizer(), tokenizer_with(MARKERS[:2], False), tokenizer_with(MARKERS, True)
LLG = {
    id(each): llguidance.LLTokenizer(each.backend.to_str(), eos_token=each.backend.token_to_id("<|im_end|>"))
    for each in (PLAIN, ADDED, SPECIAL)
}


def matcher(tokenizer: Tokenizer, grammar: str) -> Any:
    made = llguidance.LLMatcher(LLG[id(tokenizer)], llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not made.is_error(), (made.get_error(), grammar)
    return made


def accepts(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether a grammar accepts a whole reply."""
    made, ids = matcher(tokenizer, grammar), tokenizer.encode(text, add_special_tokens=False)
    return made.try_consume_tokens(ids) == len(ids) and made.is_accepting()


def longest_space(made: Any, tokenizer: Tokenizer, most: int = 400) -> int:
    """The most white space in a row that a model writes which writes it whenever it may. The reply must end within `most` tokens."""
    longest = run = 0
    for _ in range(most):
        if made.is_stopped():
            return longest
        allowed = np.unpackbits(np.frombuffer(made.compute_bitmask(), np.uint8), bitorder="little")
        ids = np.flatnonzero(allowed).tolist()
        space = [one for one in ids if tokenizer.decode([one]).isspace()]
        token = (space or ids)[0]
        run = run + 1 if space else 0
        longest = max(longest, run)
        assert made.consume_token(token)
    raise AssertionError(f"the reply has not ended after {most} tokens, with {longest} of white space in a row")


@pytest.mark.parametrize("name", [*FORMATS])
def test_forced_calls_cannot_be_white_space_for_ever(name: str):
    properties = {"unit": {"enum": ["C", "F"]}, "now": {"type": "boolean"}}
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    hostile = {**parameters, "x-guidance": {"whitespace_pattern": r"[ ]*"}}
    for given in (parameters, hostile):
        tools = read_tools([{"type": "function", "function": {"name": "set", "parameters": given}}])
        grammar = call_grammar(name, tools, read_tool_choice("required", tools), SPECIAL, most=1)
        assert grammar is not None
        assert longest_space(matcher(SPECIAL, grammar), SPECIAL) <= 22  # a line break and 20 spaces


def grammar_of(name: str, tokenizer: Tokenizer, choice: object = "required", **options: Any) -> str:
    tools = read_tools(TOOLS)
    made = call_grammar(name, tools, read_tool_choice(choice, tools), tokenizer, **options)
    assert made is not None
    return made


NOW = '{"name": "now", "parameters": {}}'
PARIS, NOTHING = '{"city": "Paris"}', '{"city": 3}'
XML = "<tool_call>\n<function=get_weather>\n<parameter=city>\n%s\n</parameter>\n%s</function>\n</tool_call>"
ACCEPTED: dict[tuple[str, str], tuple[list[str], list[str]]] = {
    ("hermes", "plain added special"): (
        [
            f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>',
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        ],
        [f'<tool_call>\n{{"name": "get_weather", "arguments": {NOTHING}}}\n</tool_call>', "now", ""],
    ),
    ("llama3", "plain special"): (
        [f'{{"name": "get_weather", "parameters": {PARIS}}}', f"<|python_tag|>{NOW}; {NOW}"],
        ['{"name": "then", "parameters": {}}', "Yes"],
    ),
    ("mistral", "special"): (
        [f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]now[ARGS]{{}}"],
        [f"[TOOL_CALLS]get_weather[ARGS]{NOTHING}", '[TOOL_CALLS][{"name": "now", "arguments": {}}]'],
    ),
    ("mistral", "plain"): (
        [f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]'],
        ["[TOOL_CALLS][]", "[TOOL_CALLS]now[ARGS]{}"],
    ),
    ("qwen3_coder", "plain added special"): (
        [
            XML % ("Paris\n</p", ""),
            XML % ("", "<parameter=days>\n3\n</parameter>\n<parameter=unit>\nF\n</parameter>\n"),
            "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        ],
        [
            XML % ("Paris", "<parameter=days>\n0\n</parameter>\n"),
            XML % ("Paris", '<parameter=unit>\n"F"\n</parameter>\n'),
            "<tool_call>\n<function=get_weather>\n</function>\n</tool_call>",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED, ids="-".join)
def test_a_grammar_accepts_the_format_alone(case: tuple[str, str]) -> None:
    name, kinds = case
    for kind in kinds.split():
        tokenizer = {"plain": PLAIN, "added": ADDED, "special": SPECIAL}[kind]
        grammar = grammar_of(name, tokenizer)
        good, bad = ACCEPTED[case]
        for text in good:
            assert accepts(tokenizer, grammar, text), (text, grammar)
            parser, events = ReplyParser(tools=FORMATS[name].parser(SCHEMAS)).push(text)
            reply = whole_reply([*events, *parser.end()])
            assert (reply.content, len(reply.calls)) == ("", text.count("now") + text.count("get_weather"))
        assert not [text for text in bad if accepts(tokenizer, grammar, text)]
        chosen = grammar_of(name, tokenizer, {"type": "function", "name": "now"}, most=1)
        assert not accepts(tokenizer, chosen, good[0])


@pytest.mark.parametrize("tokenizer", [PLAIN, ADDED, SPECIAL], ids=["plain", "added", "special"])
def test_a_think_block_comes_first(tokenizer: Tokenizer) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for form in (REASONING_FORMATS["think"], REASONING_FORMATS["mistral"]):  # with tokens of its own, and without
        may = grammar_of("hermes", tokenizer, reasoning=form)
        must = grammar_of("hermes", tokenizer, reasoning=form, opened=True)
        thought = f"I {{think}}.\n{form.closing}\n\n{call}"
        assert accepts(tokenizer, may, call)
        assert accepts(tokenizer, may, form.opening + thought)
        assert not accepts(tokenizer, may, thought)
        assert accepts(tokenizer, must, thought)
        assert not accepts(tokenizer, must, call)


def test_a_choice_that_forces_nothing_has_no_grammar() -> None:
    tools = read_tools(TOOLS)
    assert call_grammar("hermes", tools, read_tool_choice("auto", tools), PLAIN) is None
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
    assert chat_prompt(body).most_calls > 1
    assert chat_prompt({**body, "tool_choice": {"type": "function", "name": "now"}}).most_calls == 1
    assert chat_prompt({**body, "parallel_tool_calls": False}).most_calls == 1


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("seed", [0, 1])
def test_what_a_grammar_lets_through_is_read_as_calls(name: str, seed: int) -> None:
    """Random tokens under the grammar's mask, with what ends values put in now and then: the parser finds calls alone, and they fit."""
    import llguidance.numpy as masks

    tokenizer, rng = SPECIAL.showing(MARKERS), random.Random(seed)
    made = matcher(SPECIAL, grammar_of(name, SPECIAL, most=2))
    mask, ids = masks.allocate_token_bitmask(1, LLG[id(SPECIAL)].vocab_size), []
    likely = set(tokenizer.encode('"}>\n</paremtunciol', add_special_tokens=False))
    ends = tokenizer.encode("\n</parameter>\n", add_special_tokens=False)
    for count in range(3000):
        if count % 16 == 15:
            ids += ends[: made.try_consume_tokens(ends)]
        masks.fill_next_token_bitmask(made, mask, 0)
        allowed = [i for i in range(SPECIAL.max_token_id + 1) if mask[0, i // 32] >> (i % 32) & 1]
        if not allowed or made.is_stopped():
            break
        token = rng.choice([i for i in allowed if i in likely] or allowed if count % 4 else allowed)
        if token == SPECIAL.backend.token_to_id("<|im_end|>"):
            break
        assert made.consume_token(token)
        ids.append(token)
    parser, events = FORMATS[name].parser(SCHEMAS).push(tokenizer.decode(ids))
    reply = whole_reply([*events, *parser.end()])
    for call in reply.calls:
        assert call.name != "get_weather" or isinstance(json.loads(call.arguments)["city"], str)
    assert made.is_accepting()
    assert reply.content == ""
    assert reply.calls


def test_json_of_a_schema_cannot_be_white_space_for_ever():
    schema = {"type": "object", "properties": {"now": {"type": "boolean"}}, "required": ["now"], "additionalProperties": False}
    of_model = PLAIN.backend.get_vocab_size(), (PLAIN.backend.token_to_id("<|im_end|>") or 0,)
    assert longest_space(compile_for(PLAIN, Grammar.json_schema(schema), *of_model).matcher.deep_copy(), PLAIN) <= 22
    begin, spaces = (PLAIN.encode(text, add_special_tokens=False) for text in ('{"a":1,', " " * 100))
    made = compile_for(PLAIN, Grammar.json_object(), *of_model).matcher.deep_copy()
    assert made.try_consume_tokens(begin) == len(begin) and made.try_consume_tokens(spaces) <= 22
