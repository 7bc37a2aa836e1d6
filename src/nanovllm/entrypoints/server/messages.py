"""Chat requests: from OpenAI's fields, as decoded from JSON, to what chat templates get.

The fields are those of https://platform.openai.com/docs/api-reference/chat/create, with the extensions of vLLM that concern the prompt:
`chat_template_kwargs`, `add_generation_prompt`, `continue_final_message`, and reasoning on assistant messages.
"""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.entrypoints.server.chat_limits import MAX_CALLS, MAX_KWARG_CHARS, MAX_MESSAGES, MAX_NAME, MAX_PARTS, MAX_TEMPLATE_KWARGS
from nanovllm.entrypoints.server.fields import InvalidParamError, check_json, flag, listed, mapping, text
from nanovllm.entrypoints.server.tools.definitions import Tool, ToolChoice, read_tool_choice, read_tools
from nanovllm.tokenizer.messages import RESERVED, render
from nanovllm.tokenizer.tokenizer import Tokenizer

ROLES: Mapping[str, str] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool", "function": "tool"
}  # fmt: skip
TEXT_PARTS: Mapping[str, str] = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # where the text is
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """What a chat request says about its prompt.

    Attributes:
        messages: The messages for the template.
        tools: All tools of the request.
        tool_choice: Which of them the reply may call.
        parallel_tool_calls: Whether the reply may call several.
        enable_thinking: Whether the template may ask for a think block.
        variables: Further variables of the template.
        add_generation_prompt: Whether the prompt ends where a new message of the assistant begins.
        continue_final_message: Whether the reply continues the last message.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice
    parallel_tool_calls: bool = True
    enable_thinking: bool = True
    variables: Mapping[str, Any]
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def callable_tools(self) -> dict[str, Mapping[str, Any]]:
        """The schema of each tool that the reply may call, by name: what parsers take."""
        return {tool.name: tool.parameters for tool in self.tools if tool.name in self.tool_choice.names}

    @property
    def most_calls(self) -> int:
        """How many calls the reply may have."""
        return MAX_CALLS if self.parallel_tool_calls and not self.tool_choice.single else 1

    @property
    def continued(self) -> str:
        """The text that the reply continues."""
        return self.messages[-1]["content"] if self.continue_final_message else ""

    def token_ids(self, tokenizer: Tokenizer | None, *, most: int | None = None) -> list[int]:
        """The prompt, as `render` makes it. With `tool_choice: "none"` the template gets no tools.

        Raises:
            InvalidRequestError: The model has no chat template, the template refuses the messages, or they have more than `most` tokens.
        """
        tools = [tool.definition for tool in self.tools] if self.tool_choice.mode != "none" else None
        return render(
            tokenizer,
            self.messages,
            enable_thinking=self.enable_thinking,
            most=most,
            tools=tools,
            variables=self.variables,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )


def chat_prompt(body: Mapping[str, Any]) -> ChatPrompt:
    """Read the fields of a chat request that concern its prompt; others are ignored.

    Raises:
        InvalidParamError: A field is wrong. `param` is its path.
    """
    given = listed(body.get("messages"), "messages", MAX_MESSAGES, least=1)
    messages = tuple(_message(each, f"messages[{place}]") for place, each in enumerate(given))
    return prompt_of(messages, body)


def prompt_of(messages: tuple[dict[str, Any], ...], body: Mapping[str, Any]) -> ChatPrompt:
    """The prompt of messages that have been read, and of the other fields of a chat request.

    Args:
        messages: One or more messages.
        body: The fields `tools`, `tool_choice`, `parallel_tool_calls`, `reasoning_effort` and those of vLLM; others are ignored.

    Raises:
        InvalidParamError: A field is wrong. `param` is its path.
    """
    tools = read_tools(body.get("tools"))
    variables = _variables(body.get("chat_template_kwargs"))
    effort = body.get("reasoning_effort")
    if effort is not None:
        if effort not in EFFORTS:
            raise InvalidParamError("reasoning_effort", f"is {reprlib.repr(effort)}; it must be one of {', '.join(EFFORTS)}")
        variables = {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {}), **variables}
    continued = flag(body.get("continue_final_message"), "continue_final_message", False)
    generated = flag(body.get("add_generation_prompt"), "add_generation_prompt", not continued)
    if continued and generated:
        raise InvalidParamError("continue_final_message", "cannot be true together with add_generation_prompt")
    last = messages[-1]
    if continued and (last["role"] != "assistant" or not last["content"].strip() or "tool_calls" in last):
        raise InvalidParamError("continue_final_message", "needs a last message of the assistant that has text and no tool calls")
    if last["role"] == "assistant" and generated:
        raise InvalidParamError(
            f"messages[{len(messages) - 1}].role",
            "is the assistant's, so nothing is left to answer: set continue_final_message to go on with it",
        )
    thinking = flag(variables.pop("enable_thinking", None), "chat_template_kwargs.enable_thinking", True)
    return ChatPrompt(
        messages=messages,
        tools=tools,
        tool_choice=read_tool_choice(body.get("tool_choice"), tools),
        parallel_tool_calls=flag(body.get("parallel_tool_calls"), "parallel_tool_calls", True),
        enable_thinking=thinking,
        variables=variables,
        add_generation_prompt=generated,
        continue_final_message=continued,
    )


def _message(value: Any, param: str) -> dict[str, Any]:
    """A message for templates. A content that is null is "", which all templates can handle."""
    given = mapping(value, param)
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidParamError(f"{param}.role", f"is {reprlib.repr(role)}; it must be one of {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": ROLES[role]}
    calls = _calls(given, param) if role == "assistant" else []
    reasoning = None
    if role == "assistant":
        for key in ("reasoning_content", "reasoning"):
            if reasoning is None and given.get(key) is not None:
                reasoning = text(given[key], f"{param}.{key}")
    if given.get("content") is None and role != "assistant":
        raise InvalidParamError(f"{param}.content", "is missing")
    message["content"] = content_of(given.get("content"), f"{param}.content")
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    if given.get("name") is not None:
        message["name"] = text(given["name"], f"{param}.name", MAX_NAME)
    if role == "tool" and given.get("tool_call_id") is not None:
        message["tool_call_id"] = text(given["tool_call_id"], f"{param}.tool_call_id", MAX_NAME)
    return message


def content_of(value: Any, param: str) -> str:
    """The text of a content. The texts of several parts are divided by line breaks."""
    if value is None or isinstance(value, str):
        return text(value or "", param)
    if not isinstance(value, list | tuple):
        raise InvalidParamError(param, f"is {reprlib.repr(value)}; it must be a string or an array of parts")
    return "\n".join(_part(each, f"{param}[{place}]") for place, each in enumerate(listed(value, param, MAX_PARTS)))


def _part(value: Any, param: str) -> str:
    if isinstance(value, str):
        return text(value, param)
    part = mapping(value, param)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise InvalidParamError(f"{param}.type", f"is {reprlib.repr(kind)}; this server takes text alone, as {', '.join(TEXT_PARTS)}")
    return text(part.get(TEXT_PARTS[kind]), f"{param}.{TEXT_PARTS[kind]}")


def _calls(message: Mapping[str, Any], param: str) -> list[dict[str, Any]]:
    """The tool calls of a message for templates: their arguments are objects."""
    given = message.get("tool_calls")
    calls = (
        []
        if given is None
        else [_call(each, f"{param}.tool_calls[{i}]") for i, each in enumerate(listed(given, f"{param}.tool_calls", MAX_CALLS))]
    )
    if message.get("function_call") is not None:  # the form before tool calls
        calls.append({"type": "function", "function": function_of(message["function_call"], f"{param}.function_call")})
    return calls


def _call(value: Any, param: str) -> dict[str, Any]:
    given = mapping(value, param)
    if given.get("type", "function") != "function":
        raise InvalidParamError(f"{param}.type", f"is {reprlib.repr(given['type'])}; only 'function' is supported")
    call: dict[str, Any] = {} if given.get("id") is None else {"id": text(given["id"], f"{param}.id", MAX_NAME)}
    return {**call, "type": "function", "function": function_of(given.get("function"), f"{param}.function")}


def function_of(value: Any, param: str) -> dict[str, Any]:
    """The name of a call's function, and its arguments as an object."""
    given = mapping(value, param)
    arguments, path = given.get("arguments"), f"{param}.arguments"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(text(arguments, path) or "{}", parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            if isinstance(error, InvalidParamError):
                raise
            raise InvalidParamError(path, f"is {reprlib.repr(arguments)}, which is not JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        raise InvalidParamError(path, f"is {reprlib.repr(given.get('arguments'))}; it must be a string with a JSON object")
    check_json(arguments, path)
    return {"name": text(given.get("name"), f"{param}.name", MAX_NAME), "arguments": arguments}


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _variables(value: Any) -> dict[str, Any]:
    """The field `chat_template_kwargs`: names and plain values, which cannot stand for anything that the server sets."""
    param, variables = "chat_template_kwargs", dict[str, Any]()
    given = mapping({} if value is None else value, param)
    if len(given) > MAX_TEMPLATE_KWARGS:
        raise InvalidParamError(param, f"has {len(given)} entries; at most {MAX_TEMPLATE_KWARGS} are allowed")
    for name, each in given.items():
        if not isinstance(name, str) or len(name) > MAX_NAME or not (name.isascii() and name.isidentifier()):
            raise InvalidParamError(param, f"has the name {reprlib.repr(name)}; names must be identifiers")
        if name in RESERVED or name.endswith("_token"):
            raise InvalidParamError(f"{param}.{name}", "cannot be set by a request")
        if isinstance(each, str):
            text(each, f"{param}.{name}", MAX_KWARG_CHARS)
        elif each is not None and not isinstance(each, bool | int | float):
            raise InvalidParamError(f"{param}.{name}", f"is {reprlib.repr(each)}; it must be a string, a number, a boolean or null")
        check_json(each, f"{param}.{name}")
        variables[name] = each
    return variables
