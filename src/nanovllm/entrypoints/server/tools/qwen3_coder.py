"""The format of Qwen3-Coder and Qwen3.5: `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`.

A value has a line break before and after it, which is not part of it. Described in the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.entrypoints.server.chat_limits import MAX_HELD, MAX_NAME
from nanovllm.entrypoints.server.tools.hermes import CLOSING, OPENING
from nanovllm.entrypoints.server.tools.reading import Reading, Rope, joined
from nanovllm.tokenizer.stream import held_back

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"}
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # as the template's `| string` writes them in the prompt


@dataclass(slots=True, eq=False, repr=False)
class Qwen3CoderReading(Reading):
    """Reads the format. The outer tags may be missing, as these models sometimes leave them out.

    Attributes:
        tool: The tool of the call.
        keys: The parameters so far.
        types: The JSON types that the schema allows for the value that is being read; a string alone streams, others are converted whole.
        begun: Whether the line break before the value was read.
        value: The value so far, if it does not stream.
    """

    markers = (OPENING, FUNCTION)
    tool: str = ""
    keys: frozenset[str] = frozenset()
    types: frozenset[str] = frozenset()
    begun: bool = False
    value: Rope = None

    def marked(self, marker: str) -> None:
        """A function comes, or its name."""
        self.phase = type(self).naming if marker == FUNCTION else type(self).opening

    def opening(self) -> bool:
        """White space, then a function."""
        if not self.skip_space():
            return self.more()
        match self.literal(FUNCTION):
            case None:
                return False
            case "":
                return self.refuse()
        self.phase = type(self).naming
        return True

    def naming(self) -> bool:
        """The function's name."""
        name = self.name()
        if name is None:
            return False
        if not self.takes(name):
            return self.refuse()
        self.begin_call(name)
        self.tool, self.keys, self.phase = name, frozenset(), type(self).listing
        return True

    def listing(self) -> bool:
        """White space, then a parameter or the end of the function."""
        if not self.skip_space():
            return self.more()
        match self.literal(PARAMETER, FUNCTION_END):
            case None:
                return False
            case "":
                return self.refuse()
            case found if found == PARAMETER:
                self.phase = type(self).keying
            case _:
                self.argue("}" if self.keys else "{}", self.release())
                self.end_call(complete=True)
                self.phase = type(self).closing
        return True

    def keying(self) -> bool:
        """The parameter's name."""
        key = self.name()
        if key is None:
            return False
        if not key or key in self.keys:
            return self.refuse()
        self.argue(("{" if not self.keys else ", ") + json.dumps(key, ensure_ascii=False) + ": ", self.release())
        self.types = types_of(self.tools[self.tool], key)
        if self.types == {"string"}:
            self.argue('"', "")
        self.keys, self.begun, self.value, self.phase = self.keys | {key}, False, None, type(self).valuing
        return True

    def valuing(self) -> bool:
        """The parameter's value, and the tag after it."""
        if not self.begun:
            self.begun = True
            self.take("", self.text[self.at] == "\n")
        if self.found.get(PARAMETER_END, -1) < self.at:
            found = self.text.find(PARAMETER_END, self.at)
            self.found[PARAMETER_END] = len(self.text) if found < 0 else found
        end = self.found[PARAMETER_END]
        if end == len(self.text):
            last = self.text[max(self.at, end - len(PARAMETER_END) - 1) :]
            end -= held_back(last, ("\n" + PARAMETER_END, PARAMETER_END))
            broken = None
        else:
            broken = end > self.at and self.text[end - 1] == "\n"
            end -= broken
        room = end if self.types == {"string"} else MAX_HELD - self.num_held
        self.take(self.text[self.at : min(end, self.at + room)], False)
        if self.num_held >= MAX_HELD or broken is None:
            return self.more()
        self.take("", broken)
        self.at += len(PARAMETER_END)
        self.hold(PARAMETER_END)
        self.argue('"' if self.types == {"string"} else _as_json(joined(self.value), self.types), self.release())
        self.phase = type(self).listing
        return True

    def closing(self) -> bool:
        """White space, and the outer closing tag if there is one."""
        return self.end_with(CLOSING)

    def take(self, text: str, line_break: bool) -> None:
        """Read a part of the value, and a line break that is not part of it."""
        self.at += len(text) + line_break
        source = text + "\n" * line_break
        if self.types == {"string"}:
            self.argue(json.dumps(text, ensure_ascii=False)[1:-1], source)
        else:
            self.hold(source)
            self.value = (self.value, text) if text else self.value

    def name(self) -> str | None:
        """Hold a name and the bracket after it. Returns "" if it is too long, None if the bracket is not there yet."""
        piece = self.text[self.at : self.at + MAX_NAME + 1]
        end = min((at for at in map(piece.find, ">\n<") if at >= 0), default=len(piece))
        if end == len(piece) <= MAX_NAME:
            return None
        if end == len(piece) or piece[end] != ">":
            return ""
        self.at += end + 1
        self.hold(piece[: end + 1])
        return piece[:end]


def types_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that a schema names for a property, also in `anyOf` and `oneOf`; string alone if it names none."""
    properties = schema.get("properties")
    given = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(given, Mapping):
        return frozenset({"string"})
    found = set[str]()
    for each in (given, *_list(given.get("anyOf")), *_list(given.get("oneOf"))):
        if isinstance(each, Mapping):
            found.update(kind for kind in _list(each.get("type")) if isinstance(kind, str))
            found.update(JSON_TYPES[type(value)] for value in _list(each.get("enum")) if type(value) in JSON_TYPES)
    return frozenset(found or {"string"})


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _as_json(text: str, types: frozenset[str]) -> str:
    """A value that is not only a string as JSON: as it was written if that is JSON of an allowed type, else as a string."""
    written = PYTHON_WORDS.get(text.strip(), text.strip())
    try:
        kind = JSON_TYPES[type(json.loads(written, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = kind in types or (kind == "integer" and "number" in types) or "string" not in types
    return written if fits else json.dumps(text, ensure_ascii=False)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")
