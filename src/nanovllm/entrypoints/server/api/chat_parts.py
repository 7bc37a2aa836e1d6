"""What chat completions and responses have in common: the prompt's tokens, the parser of the replies, and ids of calls."""

import asyncio
import secrets
import string
from typing import Any

import numpy as np

from nanovllm.entrypoints.server.api.prompts import INT32, last_tokens, longest
from nanovllm.entrypoints.server.app import Server
from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.messages import ChatPrompt
from nanovllm.entrypoints.server.reasoning import ReasoningSplitter, left_open
from nanovllm.entrypoints.server.reply import ReplyParser
from nanovllm.entrypoints.server.serving_tokenizer import ReplyFormats
from nanovllm.entrypoints.server.tools.events import Reply
from nanovllm.errors import InvalidRequestError
from nanovllm.tokenizer.tokenizer import Tokenizer

LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 24
PROMPT_END = 16  # tokens of a prompt in which an opened think block is looked for


async def prompt_ids(server: Server, prompt: ChatPrompt, param: str = "messages", kept: int | None = None) -> bytes:
    """The token ids of a conversation, made in a thread, because a template may take long.

    Args:
        server: Its tokenizer and its engine are asked.
        prompt: The conversation.
        param: The field of the request that errors name.
        kept: As in `last_tokens`.

    Raises:
        ApiError: The template refuses the messages, or they are too long.
    """
    try:
        ids = await asyncio.to_thread(prompt.token_ids, server.tokenizer, most=longest(server, kept))
    except InvalidRequestError as error:
        code = "context_length_exceeded" if "tokens, the model's limit" in str(error) else None
        raise ApiError(400, str(error), param=param, code=code) from None
    return last_tokens(np.asarray(ids, INT32).tobytes(), kept)


def reply_parser(formats: ReplyFormats, tokenizer: Tokenizer | None, prompt: ChatPrompt, ids: bytes) -> ReplyParser:
    """What divides the replies to a prompt into reasoning, content and tool calls."""
    splitter, tools = None, None
    if formats.reasoning is not None and tokenizer is not None:
        end = tokenizer.decode(np.frombuffer(ids, INT32)[-PROMPT_END:], skip_special_tokens=False)
        splitter = ReasoningSplitter.of(formats.reasoning, opened=left_open(formats.reasoning, end, prompt.continued))
    if formats.tools is not None and prompt.callable_tools:
        tools = formats.tools.parser(prompt.callable_tools, most=prompt.most_calls)
    return ReplyParser(splitter=splitter, tools=tools)


def message_of(reply: Reply, formats: ReplyFormats, *, shows_reasoning: bool = True) -> dict[str, Any]:
    """A whole reply as the assistant's message, as OpenAI has it, with the think block in a field of its own."""
    calls = [
        {"id": call_id(formats), "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in reply.calls
    ]
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not reply.content else reply.content, "refusal": None}
    if reply.reasoning and shows_reasoning:
        message |= {"reasoning_content": reply.reasoning, "reasoning": reply.reasoning}
    return {**message, "tool_calls": calls} if calls else message


def num_tokens(server: Server, text: str) -> int:
    """The tokens of a text by itself; 0 without a tokenizer."""
    return 0 if server.tokenizer is None else len(server.tokenizer.encode(text, add_special_tokens=False))


def call_id(formats: ReplyFormats) -> str:
    """A new id for a tool call. Templates of some models demand a length."""
    length = None if formats.tools is None else formats.tools.id_length
    ident = "".join(secrets.choice(LETTERS) for _ in range(length or ID_LENGTH))
    return ident if length else f"call_{ident}"
