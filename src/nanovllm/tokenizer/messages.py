"""Conversations as lists of messages, and the prompt that the model's own template makes of them."""

import reprlib
from collections.abc import Mapping
from typing import Any

from nanovllm.errors import InvalidRequestError
from nanovllm.tokenizer.tokenizer import Tokenizer, TooManyTokensError, check_text

ROLES = ("system", "user", "assistant", "tool")
# Names that templates get from us, from Jinja and from its environment.
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template", "conversation"}
    | {"self", "loop", "caller", "varargs", "kwargs", "raise_exception", "strftime_now"}
    | {"range", "dict", "namespace", "cycler", "joiner", "lipsum"}
)
CONTINUED = "<<the reply continues here>> "  # its space shows whether a template strips the message


def render(
    tokenizer: Tokenizer | None,
    messages: Any,
    *,
    enable_thinking: bool = True,
    most: int | None = None,
    tools: Any = None,
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> list[int]:
    """The token ids of a conversation, up to where the assistant's next reply begins.

    Args:
        tokenizer: The model's tokenizer.
        messages: A list of `{"role": "system" | "user" | "assistant" | "tool", "content": text}`. If a reply begins after the
            last, it is not the assistant's. An assistant's message with `tool_calls` may have no content. Other keys are passed to the
            template unchanged.
        enable_thinking: False asks the template for a reply without a think block, if it supports that.
        most: The model's limit in tokens: a much longer conversation is refused after its beginning. None: any length is encoded.
        tools: Definitions of tools, `{"type": "function", "function": {"name": ..., "description": ..., "parameters": schema}}`.
        variables: Further variables of the template.
        add_generation_prompt: Whether the prompt ends where a new reply begins.
        continue_final_message: Whether it ends with the last message instead, which is the assistant's and which the reply continues.

    Raises:
        InvalidRequestError: A message is malformed (the error names it), the conversation has more than `most` tokens, the model has no
            tokenizer or chat template, or the template has no place for what it was given.
    """
    check_messages(messages, continued=continue_final_message, answered=add_generation_prompt)
    if tokenizer is None:
        raise InvalidRequestError("this model has no tokenizer, so it cannot chat: give token ids to generate")
    if not isinstance(enable_thinking, bool):
        raise InvalidRequestError(f"enable_thinking={enable_thinking!r} must be True or False")
    if variables and not RESERVED.isdisjoint(variables):
        raise InvalidRequestError(f"variables={reprlib.repr(variables)} has names that templates get otherwise")
    given = {**(variables or {}), "tools": check_tools(tools), "enable_thinking": enable_thinking}
    if continue_final_message:
        text = _continued(tokenizer, list(messages), given)
    else:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **given)
    try:
        return tokenizer.encode(text, add_special_tokens=False, most=most)
    except TooManyTokensError:
        raise InvalidRequestError(f"the conversation has more than {most} tokens, the model's limit: shorten it") from None


def _continued(tokenizer: Tokenizer, messages: list[Any], variables: Mapping[str, Any]) -> str:
    """The prompt up to the end of the last message, which a mark shows. White space at the end is gone if the template strips it."""
    marked = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + CONTINUED}]
    text = tokenizer.apply_chat_template(marked, add_generation_prompt=False, **variables)
    end = text.rfind(CONTINUED.strip())
    if end < 0:
        raise InvalidRequestError("the chat template leaves the last message out, so it cannot be continued")
    return text[:end] if text.startswith(CONTINUED, end) else text[:end].rstrip()


def check_tools(tools: Any) -> list[Any] | None:
    """The definitions of tools for a template, None if there are none. Raises `InvalidRequestError` if they are malformed."""
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise InvalidRequestError(f"tools={reprlib.repr(tools)} must be a list of definitions, or None")
    for place, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            expected = "{'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
            raise InvalidRequestError(f"tools[{place}] is {reprlib.repr(tool)}; it must be {expected}")
    return list(tools) or None


def check_messages(messages: Any, *, continued: bool = False, answered: bool = True) -> None:
    """Raise `InvalidRequestError` naming the first malformed message. `answered`: a reply begins after the last one."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequestError(f"messages={reprlib.repr(messages)} must be a list of at least one {{'role': ..., 'content': ...}}")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"messages[{place}] is {reprlib.repr(message)}; it must be a mapping with a role and its content")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise InvalidRequestError(f"messages[{place}]['role'] is {reprlib.repr(role)}; it must be one of {', '.join(map(repr, ROLES))}")
        if content is None and role == "assistant" and message.get("tool_calls"):
            continue
        if not isinstance(content, str):
            raise InvalidRequestError(f"messages[{place}]['content'] is {reprlib.repr(content)}; it must be a string")
        try:
            check_text(content)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"messages[{place}]['content']: {error}") from None
    last = messages[-1]
    if continued and (last["role"] != "assistant" or not last.get("content")):
        raise InvalidRequestError("continue_final_message needs a last message of the assistant that has text")
    if last["role"] == "assistant" and answered and not continued:
        raise InvalidRequestError("the last message is the assistant's, so nothing is left to answer: end with the user's message")
