"""The input of `/v1/responses`: a text or items, from which the messages of a chat are made.

The fields are those of https://platform.openai.com/docs/api-reference/responses/create. Reasoning, the assistant's text and its calls come
as items of their own. For the model's template they are one message.
"""

import reprlib
from collections.abc import Mapping
from typing import Any

from nanovllm.entrypoints.server.chat_limits import MAX_CALLS, MAX_MESSAGES, MAX_NAME, MAX_PARTS
from nanovllm.entrypoints.server.fields import InvalidParamError, listed, mapping, text
from nanovllm.entrypoints.server.messages import ROLES, content_of, function_of

MESSAGE_ROLES = ("user", "assistant", "system", "developer")
KINDS = ("message", "function_call", "function_call_output", "reasoning")


def input_messages(value: Any, instructions: str | None, param: str = "input") -> tuple[dict[str, Any], ...]:
    """The messages for templates.

    Args:
        value: The field `input`.
        instructions: The text of a system message before all others, or None.
        param: The field's path.

    Raises:
        InvalidParamError: An item is malformed or of a kind that this server does not have.
    """
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": text(instructions, "instructions")}]
    if isinstance(value, str):
        return (*messages, {"role": "user", "content": text(value, param)})
    if not isinstance(value, list | tuple):
        raise InvalidParamError(param, f"is {reprlib.repr(value)}; it must be a string or an array of items")
    items = listed(value, param, MAX_MESSAGES, least=1)
    for place, item in enumerate(items):
        _add(messages, mapping(item, path := f"{param}[{place}]"), path)
    if not messages:
        raise InvalidParamError(param, "has no item with a text")
    if messages[-1]["role"] == "assistant":
        problem = "is the assistant's, so nothing is left to answer: end with a message of the user or the output of a call"
        raise InvalidParamError(f"{param}[{len(items) - 1}]", problem)
    return tuple(messages)


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], param: str) -> None:
    """Add one item to the messages: as a new one, or to the assistant's that is the last."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in MESSAGE_ROLES:
            raise InvalidParamError(f"{param}.role", f"is {reprlib.repr(role)}; it must be one of {', '.join(MESSAGE_ROLES)}")
        if item.get("content") is None:
            raise InvalidParamError(f"{param}.content", "is missing")
        content = content_of(item["content"], f"{param}.content")
        if role == "assistant" and last is not None and not last["content"]:
            last["content"] = content
        else:
            messages.append({"role": ROLES[role], "content": content})
    elif kind == "reasoning":
        if reasoning := _reasoning(item, param):
            messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning})
    elif kind == "function_call":
        call = {"id": _call_id(item, param), "type": "function", "function": function_of(item, param)}
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
        calls = last.setdefault("tool_calls", [])
        if len(calls) == MAX_CALLS:
            raise InvalidParamError(param, f"is a call after {MAX_CALLS} others of the same message; there may not be more")
        calls.append(call)
    elif kind == "function_call_output":
        if item.get("output") is None:
            raise InvalidParamError(f"{param}.output", "is missing")
        output = content_of(item["output"], f"{param}.output")
        messages.append({"role": "tool", "content": output, "tool_call_id": _call_id(item, param)})
    elif kind == "item_reference":
        raise InvalidParamError(f"{param}.type", "is 'item_reference', but this server keeps no items: send the item itself")
    else:
        raise InvalidParamError(f"{param}.type", f"is {reprlib.repr(kind)}; this server takes {', '.join(KINDS)}")


def _call_id(item: Mapping[str, Any], param: str) -> str:
    return text(item.get("call_id"), f"{param}.call_id", MAX_NAME)


def _reasoning(item: Mapping[str, Any], param: str) -> str:
    """The text of a reasoning item: its content or, without one, its summary. Encrypted content is left out."""
    for name in ("content", "summary"):
        if item.get(name):
            parts = [mapping(part, f"{param}.{name}[{i}]") for i, part in enumerate(listed(item[name], f"{param}.{name}", MAX_PARTS))]
            return "\n".join([text(part.get("text"), f"{param}.{name}[{i}].text") for i, part in enumerate(parts)])
    return ""
