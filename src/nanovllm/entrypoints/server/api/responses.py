"""`POST /v1/responses`, OpenAI's newer interface for conversations. Nothing is kept: each request brings all of its conversation."""

import asyncio
from dataclasses import replace
from typing import Any, Literal

import msgspec

from nanovllm.entrypoints.server.api.chat_parts import prompt_ids, reply_parser
from nanovllm.entrypoints.server.api.chunk_reuse import reuse_of
from nanovllm.entrypoints.server.api.completions import keeps_stop, places_of, text_of
from nanovllm.entrypoints.server.api.logprobs import MANY, num_top, require_listable, stop_ids
from nanovllm.entrypoints.server.api.prompts import INT32, kept_tokens, room
from nanovllm.entrypoints.server.api.replies import StreamedReply, whole, with_stops
from nanovllm.entrypoints.server.api.response_frames import ResponseFrames
from nanovllm.entrypoints.server.app import Server, own_model, require_engine
from nanovllm.entrypoints.server.constraints import Form, chat_form, forced, form_of
from nanovllm.entrypoints.server.errors import ApiError, api_error, unsupported
from nanovllm.entrypoints.server.exchange import Exchange
from nanovllm.entrypoints.server.input_items import input_messages
from nanovllm.entrypoints.server.messages import EFFORTS, ChatPrompt, prompt_of
from nanovllm.entrypoints.server.request_fields import DEFAULTS, NOTHING, Sampled, read, sampling
from nanovllm.entrypoints.server.row_logprobs import RowLogprobs
from nanovllm.errors import InvalidRequestError

MOST_METADATA, MOST_KEY, MOST_VALUE = 16, 64, 512  # OpenAI's: pairs, and characters of each
NAMED_OTHERWISE = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
STATEFUL = ("previous_response_id", "conversation", "prompt", "context_management")
LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


class ReasoningOptions(msgspec.Struct):
    """How much the model may think. No summaries are made."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(msgspec.Struct):
    """The form of the text."""

    format: Any = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(Sampled, kw_only=True):
    """The body of `/v1/responses`. `input_messages` and `prompt_of` check the fields whose type is Any."""

    input: Any
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[Included] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    chat_template_kwargs: Any = None


async def responses(server: Server, exchange: Exchange) -> None:
    """Answer a request."""
    body = await exchange.json()
    asked, prompt, form = _read(body)
    exchange.salt(asked.cache_salt)
    model = own_model(server, asked.model)
    reuse = await reuse_of(server, exchange, asked, 1)
    ids = await _prompt_ids(server, asked, prompt, reuse.num_tokens)
    length = reuse.num_tokens + len(ids) // INT32.itemsize
    most = room(server, length, asked.max_output_tokens, "input", "max_output_tokens")
    parser = reply_parser(server.formats, server.tokenizer, prompt, ids)
    form = chat_form(server.formats, server.tokenizer, form, prompt, parser)
    more, logprobs, top = await forced(server, form), None, asked.top_logprobs or 0
    if LOGPROBS in (asked.include or ()):
        require_listable(most, top, "max_output_tokens")
        more["logprobs"], logprobs = top, RowLogprobs(places_of(server, asked), stop_ids(server, asked))
    options = sampling(asked, server.generation, most, limit="max_output_tokens", **more)
    frames = ResponseFrames(server, _echo(asked, prompt, body, model, options), length, parser, reuse, logprobs)
    priority = asked.priority or 0
    if asked.stream:
        texts = [text_of(server, asked)]
        rows = None if logprobs is None else [logprobs]
        form_of_stream: Any = {"done": b"", "failed": frames.failed, "at_once": True, "keeps_stop": keeps_stop(asked)}
        reply = StreamedReply(server, exchange, frames, texts, logprobs=rows, interval=asked.stream_interval, **form_of_stream)
        await reply.run([reuse.parts(ids)], [options], priority, space=reuse.space, keep=reuse.keep)
        return
    ends = await whole(server, exchange, [reuse.parts(ids)], [options], priority, space=reuse.space, keep=reuse.keep)
    (ended,) = with_stops(text_of(server, asked), ends) if keeps_stop(asked) else ends
    many = logprobs is not None and ended.num_tokens * (1 + top) > MANY
    await exchange.respond(200, msgspec.json.encode(await asyncio.to_thread(frames.whole, ended) if many else frames.whole(ended)))


async def count_input_tokens(server: Server, exchange: Exchange) -> None:
    """`POST /v1/responses/input_tokens`: the number of tokens of the prompt that the same request to `/v1/responses` would have."""
    asked, prompt, _ = _read(await exchange.json())
    own_model(server, asked.model)
    reused = (await reuse_of(server, exchange, asked, 1)).num_tokens
    length = reused + len(await _prompt_ids(server, asked, prompt, reused)) // INT32.itemsize
    await exchange.respond(200, msgspec.json.encode({"object": "response.input_tokens", "input_tokens": length}))


async def _prompt_ids(server: Server, asked: ResponsesRequest, prompt: ChatPrompt, reused: int) -> bytes:
    """The token ids of a conversation. With `truncation: "auto"` it loses its oldest turns, as few as make room for the reply.

    What is left begins with the system's messages and then one of the user's. Whole turns go, so that every result keeps its call.

    Raises:
        ApiError: As `prompt_ids`.
    """
    kept = kept_tokens(server, asked, asked.max_output_tokens)
    if asked.truncation != "auto":
        return await prompt_ids(server, prompt, "input", kept)
    most = require_engine(server).max_model_len - reused - (asked.max_output_tokens or 1)
    messages, turns = prompt.messages, [place for place, one in enumerate(prompt.messages) if one["role"] == "user"]
    head = next((place for place, one in enumerate(messages) if one["role"] != "system"), 0)
    starts, found = sorted({head, *turns}), None
    low, high, place = 0, len(starts) - 1, 0
    while low <= high:
        left = replace(prompt, messages=(*messages[:head], *messages[starts[place] :]))
        try:
            ids = await prompt_ids(server, left, "input", kept)
            fits = len(ids) // INT32.itemsize <= most
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            ids, fits = None, False
        low, high, found = (low, place - 1, ids) if fits else (place + 1, high, found)
        place = (low + high) // 2
    return await prompt_ids(server, prompt, "input", kept) if found is None else found


def _read(body: dict[str, Any]) -> tuple[ResponsesRequest, ChatPrompt, Form | None]:
    """The fields of a request, its conversation, and the form that it asks for.

    Raises:
        ApiError: A field is wrong, or asks for something that this server does not have.
    """
    for name, value in body.items():
        if name in NAMED_OTHERWISE and value is not None:
            message = f"{name} is a field of chat completions: use {NAMED_OTHERWISE[name]}"
            raise ApiError(400, message, param=name, code="unknown_parameter")
        if name in STATEFUL and value not in NOTHING:
            message = f"{name} is not supported, because this server keeps no responses: send all items of the conversation in input"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    asked = read(body, ResponsesRequest)
    for name, refused in (
        ("background", asked.background),
        ("n", asked.n not in (None, 1)),
        ("return_token_ids", asked.return_token_ids),
    ):
        if refused:
            raise unsupported(name, f"{name}={body[name]!r}")
    num_top(asked.top_logprobs or 0, "top_logprobs")
    for key, value in _bounded(asked.metadata).items():
        if len(key) > MOST_KEY or len(value) > MOST_VALUE:
            raise ApiError(400, f"metadata has keys of at most {MOST_KEY} characters and values of {MOST_VALUE}", param="metadata")
    effort = None if asked.reasoning is None else asked.reasoning.effort
    if effort not in (None, *EFFORTS):
        raise ApiError(400, f"reasoning.effort is {effort[:100]!r}; it must be one of {', '.join(EFFORTS)}", param="reasoning.effort")
    fields = {name: body.get(name) for name in ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")}
    try:
        prompt = prompt_of(input_messages(asked.input, asked.instructions), {**fields, "reasoning_effort": effort})
        form = form_of({**body, "response_format": None if asked.text is None else asked.text.format}, "text.format")
        return asked, prompt, form
    except InvalidRequestError as error:
        raise api_error(error, "input") from None


def _bounded(metadata: dict[str, str] | None) -> dict[str, str]:
    found = metadata or {}
    if len(found) > MOST_METADATA:
        raise ApiError(400, f"metadata has {len(found)} pairs; it may have {MOST_METADATA}", param="metadata")
    return found


def _echo(asked: ResponsesRequest, prompt: ChatPrompt, body: dict[str, Any], model: str, options: dict[str, Any]) -> dict[str, Any]:
    """The fields of an answer that tell what was asked for, with the values that hold."""
    given = [tool.get("function", tool) for tool in body.get("tools") or ()]
    tools = [
        {
            "type": "function",
            "name": tool.name,
            "description": one.get("description"),
            "parameters": tool.parameters,
            "strict": one.get("strict") is True,
        }
        for tool, one in zip(prompt.tools, given, strict=True)
    ]
    return {
        "model": model,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": prompt.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": None if asked.reasoning is None else asked.reasoning.effort, "summary": None},
        "store": False,
        "temperature": options.get("temperature", DEFAULTS["temperature"]),
        "text": {"format": {"type": "text"} if asked.text is None or asked.text.format is None else asked.text.format},
        "tool_choice": _choice(prompt, asked.tool_choice),
        "tools": tools,
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": options.get("top_p", DEFAULTS["top_p"]),
        "truncation": asked.truncation or "disabled",
    }


def _choice(prompt: ChatPrompt, value: Any) -> Any:
    choice = prompt.tool_choice
    if value is None or isinstance(value, str):
        return value or "auto"
    tools = [{"type": "function", "name": name} for name in choice.names]
    return tools[0] if value["type"] == "function" else {"type": "allowed_tools", "mode": choice.mode, "tools": tools}
