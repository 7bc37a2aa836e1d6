"""Grammars that force tool calls, in the model's own format: text in llguidance's dialect of Lark.

The dialect is described in https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. `%json` is a JSON schema in place of a rule.
`<[7]>` is the token 7: a marker that is a token of its own can be sampled in no other way.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanovllm.entrypoints.server.chat_limits import MAX_CALLS
from nanovllm.entrypoints.server.reasoning import ReasoningFormat
from nanovllm.entrypoints.server.tools import hermes, llama3, mistral, qwen3_coder
from nanovllm.entrypoints.server.tools.definitions import Tool, ToolChoice
from nanovllm.sampling.compiled_grammar import WHITESPACE
from nanovllm.sampling.grammar import Grammar
from nanovllm.tokenizer.tokenizer import Tokenizer

TEXT = "/(?s:.*)/"
SPACE = "/[ \\n]{0,8}/"
LINES = "/\\n{0,2}/"  # after a think block: white space that is none of the answer's


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules that are collected while a grammar is written, and the tokens of its markers."""

    tokenizer: Tokenizer
    lines: list[str] = field(default_factory=list)

    def add(self, name: str, body: str, options: str = "") -> str:
        """Add a rule. Returns its name."""
        self.lines.append(f"{name}{options}: {body}")
        return name

    def marker(self, text: str) -> str:
        """A marker as its token if it has one, else as text."""
        token = self.tokenizer.backend.token_to_id(text)
        return quoted(text) if token is None else f"<[{token}]>"

    def up_to(self, name: str, text: str) -> str:
        """Any text up to and with a marker."""
        end = self.marker(text)
        return f"{TEXT} {end}" if end[0] == "<" else self.add(name, TEXT, f"[suffix={end}]")

    def text(self) -> str:
        """The grammar."""
        return "".join(f"{line}\n" for line in reversed(self.lines))


def quoted(text: str) -> str:
    """A text as a literal."""
    return json.dumps(text, ensure_ascii=False)


def call_grammar(
    name: str,
    tools: Sequence[Tool],
    choice: ToolChoice,
    tokenizer: Tokenizer,
    *,
    most: int = MAX_CALLS,
    reasoning: ReasoningFormat | None = None,
    opened: bool = False,
) -> str | None:
    """The grammar of a reply that must call tools, or None if `choice` forces nothing.

    Args:
        name: The name of the tool format.
        tools: The tools of the request.
        choice: Which of them may be called.
        tokenizer: The model's tokenizer, for markers that are tokens.
        most: How many calls are allowed.
        reasoning: The model's think block, which may come first; None: there is none.
        opened: Whether the prompt has opened the block, so that it must come first.
    """
    if choice.mode != "required":
        return None
    rules = Rules(tokenizer)
    chosen = [tool for tool in tools if tool.name in choice.names]
    calls = _WRITERS[name](rules, chosen, most)
    if reasoning is not None:
        calls = f"{_block(rules, reasoning, opened=opened)} {SPACE} {calls}"
    rules.add("start", calls)
    return rules.text()


def thoughtful(grammar: Grammar, tokenizer: Tokenizer, reasoning: ReasoningFormat, *, opened: bool) -> str | None:
    """A grammar with the model's think block before it, or None for one that is written in Lark itself.

    Args:
        grammar: What the rest of the reply is.
        tokenizer: The model's tokenizer, for marks that are tokens.
        reasoning: The form of the block.
        opened: Whether the prompt has opened the block. If not, the reply may begin with one.
    """
    rules = Rules(tokenizer)
    match grammar.form:
        case "json_schema":
            schema = json.loads(grammar.source)
            schema = schema if isinstance(schema, dict) else {} if schema else {"enum": []}
            answer = _schema(rules, "answer", schema)
        case "regex":
            pattern = grammar.source.replace("/", "\\/").replace("\n", "\\n")
            answer = rules.add("answer", f"/{pattern}/")
        case "choice":
            answer = rules.add("answer", " | ".join(map(quoted, json.loads(grammar.source))))
        case _:
            return None
    rules.add("start", f"{_block(rules, reasoning, opened=opened)} {LINES} {answer}")
    return rules.text()


def _block(rules: Rules, reasoning: ReasoningFormat, *, opened: bool) -> str:
    """A think block: the rest of one that the prompt has opened, or one that may come."""
    inside = rules.up_to("thoughts", reasoning.closing)
    return f"({inside})" if opened else f"({rules.marker(reasoning.opening)} {inside})?"


def _one_of(rules: Rules, tools: Sequence[Tool], write: Callable[[int, Tool], str]) -> str:
    """A rule for a call to one of the tools, each written by `write` of its place and the tool."""
    return rules.add("call", " | ".join(rules.add(f"call_{place}", write(place, tool)) for place, tool in enumerate(tools)))


def _repeated(call: str, most: int, between: str = "") -> str:
    """One to `most` calls."""
    return f"{call} ({between}{call}){{0,{most - 1}}}" if most > 1 else call


def _schema(rules: Rules, name: str, schema: Mapping[str, Any]) -> str:
    """A rule for JSON of a schema. White space is bounded, so that no model writes it for ever."""
    space = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
    return rules.add(name, f"%json {json.dumps({**schema, 'x-guidance': space}, ensure_ascii=False)}")


def _arguments(rules: Rules, place: int, tool: Tool) -> str:
    """A rule for a tool's arguments, an object whatever the schema says."""
    return _schema(rules, f"arguments_{place}", {**tool.parameters, "type": "object"})


def _json_call(rules: Rules, place: int, tool: Tool, key: str) -> str:
    begin = quoted('{"name": "' + tool.name + '", "' + key + '": ')
    return f'{begin} {_arguments(rules, place, tool)} "}}"'


def _hermes(rules: Rules, tools: Sequence[Tool], most: int) -> str:
    opening, closing = rules.marker(hermes.OPENING), rules.marker(hermes.CLOSING)
    call = _one_of(rules, tools, lambda place, tool: f'{opening} "\\n" {_json_call(rules, place, tool, "arguments")} "\\n" {closing}')
    return _repeated(call, most, '"\\n" ')


def _llama3(rules: Rules, tools: Sequence[Tool], most: int) -> str:
    call = _one_of(rules, tools, lambda place, tool: _json_call(rules, place, tool, "parameters"))
    return rules.marker(llama3.TAG) + "? " + _repeated(call, most, '"; " ')


def _mistral(rules: Rules, tools: Sequence[Tool], most: int) -> str:
    marker, args = rules.marker(mistral.MARKER), rules.marker(mistral.ARGS)
    if args[0] == "<":  # the newer format: its tokenizers have the marker
        call = _one_of(rules, tools, lambda place, tool: f"{marker} {quoted(tool.name)} {args} {_arguments(rules, place, tool)}")
        return _repeated(call, most)
    call = _one_of(rules, tools, lambda place, tool: _json_call(rules, place, tool, "arguments"))
    return marker + ' "[" ' + _repeated(call, most, '", " ') + ' "]"'


def _qwen3_coder(rules: Rules, tools: Sequence[Tool], most: int) -> str:
    def write(place: int, tool: Tool) -> str:
        properties = tool.parameters.get("properties")
        required = tool.parameters.get("required")
        required = required if isinstance(required, list) else []
        definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
        parts = [opening, quoted(f"\n{qwen3_coder.FUNCTION}{tool.name}>\n")]
        for index, (key, schema) in enumerate(properties.items() if isinstance(properties, Mapping) else ()):
            begin, end = quoted(f"{qwen3_coder.PARAMETER}{key}>\n"), f"\n{qwen3_coder.PARAMETER_END}\n"
            rule, values = f"value_{place}_{index}", schema.get("enum") if isinstance(schema, Mapping) else None
            if qwen3_coder.types_of(tool.parameters, key) != {"string"}:
                value = f"{_schema(rules, rule, {**definitions, **schema})} {quoted(end)}"
            elif isinstance(values, list) and values:
                value = f"({' | '.join(quoted(f'{each}{end}') for each in values)})"
            else:
                value = rules.add(rule, TEXT, f"[suffix={quoted(end)}]")
            parts.append(f"({begin} {value})" + ("" if key in required else "?"))
        return " ".join([*parts, quoted(f"{qwen3_coder.FUNCTION_END}\n"), closing])

    opening, closing = rules.marker(hermes.OPENING), rules.marker(hermes.CLOSING)
    return _repeated(_one_of(rules, tools, write), most, '"\\n" ')


_WRITERS: Mapping[str, Callable[[Rules, Sequence[Tool], int], str]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "qwen3_coder": _qwen3_coder,
}
