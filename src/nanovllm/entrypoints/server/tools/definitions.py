"""The tools of a request, and which of them the reply may or must call."""

import reprlib
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nanovllm.entrypoints.server.chat_limits import MAX_NAME, MAX_TOOLS, MAX_TOOLS_CHARS
from nanovllm.entrypoints.server.fields import InvalidParamError, check_json, listed, mapping, text

LETTERS = frozenset(string.ascii_letters + string.digits + "_-.")
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the reply may call.

    Attributes:
        name: Its name.
        parameters: The JSON schema of its arguments.
        definition: What chat templates get: `{"type": "function", "function": {...}}`.
    """

    name: str
    parameters: Mapping[str, Any]
    definition: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which tools the reply may call.

    Attributes:
        mode: "none": none of them. "auto": as the model likes. "required": at least one, by a grammar.
        names: The tools that it may call.
        single: Whether exactly one call is required.
    """

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] = ()
    single: bool = False


def read_tools(value: Any, param: str = "tools") -> tuple[Tool, ...]:
    """The field `tools`, as chat completions have it or, without the inner `function`, as responses have it.

    Raises:
        InvalidParamError: A tool is malformed or not a function, there are too many, or two have the same name.
    """
    if value is None:
        return ()
    tools = tuple(_tool(each, f"{param}[{place}]") for place, each in enumerate(listed(value, param, MAX_TOOLS)))
    for place, tool in enumerate(tools):
        if tool.name in {earlier.name for earlier in tools[:place]}:
            inner = ".function" if "function" in value[place] else ""
            raise InvalidParamError(f"{param}[{place}]{inner}.name", f"is {tool.name!r} once more; names must differ")
    total = check_json([tool.definition for tool in tools], param)
    if total > MAX_TOOLS_CHARS:
        raise InvalidParamError(param, f"has {total} characters; at most {MAX_TOOLS_CHARS} are allowed")
    return tools


def _tool(value: Any, param: str) -> Tool:
    given = mapping(value, param)
    if given.get("type") != "function":
        raise InvalidParamError(f"{param}.type", f"is {reprlib.repr(given.get('type'))}; only 'function' is supported")
    nested = "function" in given
    function, param = (mapping(given["function"], f"{param}.function"), f"{param}.function") if nested else (given, param)
    name = text(function.get("name"), f"{param}.name", MAX_NAME)
    if not name or not LETTERS.issuperset(name):
        raise InvalidParamError(f"{param}.name", f"is {name!r}; it must be letters, digits, underscores, dashes and dots")
    if function.get("description") is not None:
        text(function["description"], f"{param}.description")
    parameters = function.get("parameters")
    if parameters is not None:
        mapping(parameters, f"{param}.parameters")
    inner = {key: each for key, each in function.items() if key != "strict" and (nested or key != "type")}
    return Tool(name=name, parameters=parameters or NO_ARGUMENTS, definition={"type": "function", "function": inner})


def read_tool_choice(value: Any, tools: tuple[Tool, ...], param: str = "tool_choice") -> ToolChoice:
    """The field `tool_choice`: a mode, a tool, or `allowed_tools`. Null is "auto" if there are tools.

    Raises:
        InvalidParamError: It is malformed, names a tool that is not among the tools, or requires one where there are none.
    """
    names = tuple(tool.name for tool in tools)
    match value:
        case None | "auto" | "none":
            return ToolChoice(mode="auto", names=names) if names and value != "none" else ToolChoice(mode="none")
        case "required":
            pass
        case {"type": "function"}:
            names = (_chosen(value, names, param),)
        case {"type": "allowed_tools"}:
            inner, path = (value["allowed_tools"], f"{param}.allowed_tools") if "allowed_tools" in value else (value, param)
            inner = mapping(inner, path)
            mode = inner.get("mode")
            if mode not in ("auto", "required"):
                raise InvalidParamError(f"{path}.mode", f"is {reprlib.repr(mode)}; it must be 'auto' or 'required'")
            chosen = listed(inner.get("tools"), f"{path}.tools", MAX_TOOLS, least=1)
            allowed = {_chosen(each, names, f"{path}.tools[{place}]") for place, each in enumerate(chosen)}
            return ToolChoice(mode=mode, names=tuple(name for name in names if name in allowed))
        case _:
            raise InvalidParamError(
                param,
                f"is {reprlib.repr(value)}; it must be 'none', 'auto', 'required', or an object of type 'function' or 'allowed_tools'",
            )
    if not names:
        raise InvalidParamError(param, "requires a call, but there are no tools")
    return ToolChoice(mode="required", names=names, single=value != "required")


def _chosen(value: Any, names: tuple[str, ...], param: str) -> str:
    given = mapping(value, param)
    if given.get("type") != "function":
        raise InvalidParamError(f"{param}.type", f"is {reprlib.repr(given.get('type'))}; only 'function' is supported")
    inner, param = (given["function"], f"{param}.function") if "function" in given else (given, param)
    name = text(mapping(inner, param).get("name"), f"{param}.name")
    if name not in names:
        raise InvalidParamError(f"{param}.name", f"is {reprlib.repr(name)}, which is not among the tools")
    return name
