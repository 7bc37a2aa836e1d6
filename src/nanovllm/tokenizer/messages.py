"""Conversations as lists of messages, and the prompt that the model's own template makes of them."""

import reprlib
from collections.abc import Mapping
from typing import Any

from nanovllm.errors import InvalidRequestError
from nanovllm.tokenizer.tokenizer import Tokenizer, TooManyTokensError, check_text

ROLES = ("system", "user", "assistant")


def render(tokenizer: Tokenizer | None, messages: Any, *, enable_thinking: bool = True, most: int | None = None) -> list[int]:
    """The token ids of a conversation, up to where the assistant's next reply begins.

    Args:
        tokenizer: The model's tokenizer.
        messages: A list of `{"role": "system" | "user" | "assistant", "content": text}`, of which the last is the user's. Other keys are
            passed to the template unchanged.
        enable_thinking: False asks the template for a reply without a think block, if it supports that.
        most: The model's limit in tokens: a much longer conversation is refused after its beginning. None: any length is encoded.

    Raises:
        InvalidRequestError: A message is malformed (the error names it), the conversation has more than `most` tokens, or the model has no
            tokenizer or chat template.
    """
    check_messages(messages)
    if tokenizer is None:
        raise InvalidRequestError("this model has no tokenizer, so it cannot chat: give token ids to generate")
    if not isinstance(enable_thinking, bool):
        raise InvalidRequestError(f"enable_thinking={enable_thinking!r} must be True or False")
    text = tokenizer.apply_chat_template(messages, enable_thinking=enable_thinking)
    try:
        return tokenizer.encode(text, add_special_tokens=False, most=most)
    except TooManyTokensError:
        raise InvalidRequestError(f"the conversation has more than {most} tokens, the model's limit: shorten it") from None


def check_messages(messages: Any) -> None:
    """Raise `InvalidRequestError` naming the first malformed message."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequestError(f"messages={reprlib.repr(messages)} must be a list of at least one {{'role': ..., 'content': ...}}")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"messages[{place}] is {reprlib.repr(message)}; it must be a mapping with a role and its content")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise InvalidRequestError(f"messages[{place}]['role'] is {reprlib.repr(role)}; it must be one of {', '.join(map(repr, ROLES))}")
        if not isinstance(content, str):
            raise InvalidRequestError(f"messages[{place}]['content'] is {reprlib.repr(content)}; it must be a string")
        try:
            check_text(content)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"messages[{place}]['content']: {error}") from None
    if messages[-1]["role"] == "assistant":
        raise InvalidRequestError("the last message is the assistant's, so nothing is left to answer: end with the user's message")
