"""Prompts of requests as token ids, and how long their replies may become."""

import asyncio
from typing import Any

import numpy as np

from nanovllm.entrypoints.async_llm import SHORT
from nanovllm.entrypoints.server.app import Server, require_engine
from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.request_fields import Sampled
from nanovllm.errors import InvalidRequestError
from nanovllm.tokenizer.tokenizer import TooManyTokensError

INT32 = np.dtype("<i4")
TRUNCATED = 16  # a prompt that is cut may have so many times the tokens of the context


async def encoded(
    server: Server, text: str, param: str, *, add_special_tokens: bool = True, of_many: bool = False, kept: int | None = None
) -> bytes:
    """The token ids of a text, as int32 in bytes.

    Args:
        server: The server.
        text: The text.
        param: Its place in the request.
        add_special_tokens: Whether the model's special tokens are added.
        of_many: Whether it is one of many texts, which would together stop the event loop.
        kept: As in `last_tokens`.

    Raises:
        ApiError: The text is too long or not valid, or the model has no tokenizer.
    """
    if server.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer: give token ids", param=param)
    most = longest(server, kept)
    encode = server.tokenizer.encode
    try:
        if len(text) <= SHORT and not of_many:
            ids = encode(text, add_special_tokens, most)
        else:
            ids = await asyncio.to_thread(encode, text, add_special_tokens, most)
    except TooManyTokensError:
        raise too_long(f"the text has more than {most} tokens", most, param) from None
    except InvalidRequestError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from None
    return last_tokens(np.asarray(ids, INT32).tobytes(), kept)


def kept_tokens(server: Server, asked: Sampled, max_tokens: int | None) -> int | None:
    """How many tokens of a prompt `truncate_prompt_tokens` keeps. -1: as many as leave room for `max_tokens`. None: it keeps all.

    Raises:
        ApiError: The number is out of bounds, or chunks come before the prompt.
    """
    count, most = asked.truncate_prompt_tokens, require_engine(server).max_model_len
    if count is None:
        return None
    if asked.chunks:
        raise ApiError(400, "truncate_prompt_tokens is not possible together with chunks", param="truncate_prompt_tokens")
    if count == -1:
        return max(1, most - (max_tokens or 1))
    if not 1 <= count <= most:
        raise ApiError(400, f"truncate_prompt_tokens={count}: must be -1 or in [1, {most}]", param="truncate_prompt_tokens")
    return count


def last_tokens(ids: bytes, kept: int | None) -> bytes:
    """The last `kept` of token ids, or all."""
    return ids if kept is None else ids[-kept * INT32.itemsize :]


def longest(server: Server, kept: int | None) -> int:
    """The most tokens that a prompt may have before it is cut to `kept` tokens."""
    return require_engine(server).max_model_len * (1 if kept is None else TRUNCATED)


def checked(server: Server, ids: list[int], param: str) -> bytes:
    """Token ids of a request, as int32 in bytes.

    Raises:
        ApiError: There are none, or one is outside the vocabulary.
    """
    hello = require_engine(server)
    if not ids:
        raise ApiError(400, f"{param} is empty", param=param)
    if not 0 <= min(ids) <= max(ids) < hello.vocab_size:
        wrong = next(i for i in ids if not 0 <= i < hello.vocab_size)
        shown = wrong if abs(wrong) < 1 << 64 else "a number of many digits"
        raise ApiError(400, f"{param} has the token id {shown}; the vocabulary has the ids 0 to {hello.vocab_size - 1}", param=param)
    return np.asarray(ids, INT32).tobytes()


def room(server: Server, num_prompt: int, asked: int | None, param: str, limit: str = "max_tokens", least: int = 1) -> int:
    """The most tokens of a reply: those that were asked for by the field `limit`, at least `least`, else what is left of the context.

    Raises:
        ApiError: The prompt, or the prompt and its reply, are too long for the engine.
    """
    most = require_engine(server).max_model_len
    if num_prompt == 0:
        raise ApiError(400, f"{param} is empty", param=param)
    if num_prompt >= most + (asked == least == 0):
        raise too_long(f"the prompt has {num_prompt} tokens", most, param)
    if asked is None:
        return most - num_prompt
    if asked < least:
        raise ApiError(400, f"{limit}={asked}: must be at least {least}", param=limit)
    if num_prompt + asked > most:
        raise too_long(f"the prompt has {num_prompt} tokens, and {asked} were asked for", most, param)
    return asked


def too_long(what: str, most: int, param: str) -> ApiError:
    """The answer to a request that can never fit."""
    return ApiError(400, f"this server's maximum context length is {most} tokens: {what}", param=param, code="context_length_exceeded")


def usage(num_prompt: int, num_reply: int, num_cached: int) -> dict[str, Any]:
    """The `usage` of an answer."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_reply,
        "total_tokens": num_prompt + num_reply,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
