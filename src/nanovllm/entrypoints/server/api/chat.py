"""`POST /v1/chat/completions`, OpenAI's interface for conversations."""

import asyncio
import secrets
import string
import time
import uuid
from collections.abc import Iterable
from json.encoder import encode_basestring_ascii as quoted  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

import msgspec
import numpy as np

from nanovllm.entrypoints.server.api.chunk_reuse import Reuse, reuse_of
from nanovllm.entrypoints.server.api.completions import num_choices, seeded, stops_of, summed
from nanovllm.entrypoints.server.api.prompts import INT32, room, usage
from nanovllm.entrypoints.server.api.replies import StreamedReply, StreamedRow, whole
from nanovllm.entrypoints.server.app import Server, own_model, require_engine
from nanovllm.entrypoints.server.errors import ApiError, api_error
from nanovllm.entrypoints.server.exchange import Exchange
from nanovllm.entrypoints.server.messages import ChatPrompt, chat_prompt
from nanovllm.entrypoints.server.reasoning import ReasoningSplitter, left_open
from nanovllm.entrypoints.server.reply import ReplyParser
from nanovllm.entrypoints.server.request_fields import Sampled, read, sampling
from nanovllm.entrypoints.server.tools.events import ArgumentsDelta, CallBegins, CallEnds, Content, Event, Reasoning, whole_reply
from nanovllm.entrypoints.server.wire import Ended
from nanovllm.errors import InvalidRequestError
from nanovllm.tokenizer.stream import TextStream

LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 24
PROMPT_END = 16  # tokens of a prompt in which an opened think block is looked for


class ChatRequest(Sampled, kw_only=True):
    """The body of `/v1/chat/completions`. `chat_prompt` checks the fields whose type is Any."""

    messages: Any
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    reasoning_effort: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    include_reasoning: bool | None = True
    logprobs: bool | None = False
    top_logprobs: int | None = None
    response_format: Any = None


async def chat_completions(server: Server, exchange: Exchange) -> None:
    """Answer a request."""
    body = await exchange.json()
    asked = read(body, ChatRequest)
    model, n = own_model(server, asked.model), num_choices(asked.n)
    try:
        prompt = chat_prompt(body)
    except InvalidRequestError as error:
        raise api_error(error, "messages") from None
    ids = await prompt_ids(server, prompt)
    reuse = await reuse_of(server, exchange, asked, n)
    length = reuse.num_tokens + len(ids) // INT32.itemsize
    most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    options = sampling(asked, server.generation, room(server, length, most, "messages"))
    params = [seeded(options, i) for i in range(n)]
    rows = [reuse.parts(ids) for _ in range(n)]
    parser = reply_parser(server, prompt, ids)
    frames = ChatFrames(server, model, length, asked, prompt, [parser] * n)
    frames.reuse = reuse
    if asked.stream:
        stops = stops_of(asked)
        texts = [TextStream.of(server.tokenizer, stops) for _ in rows]
        await StreamedReply(server, exchange, frames, texts).run(rows, params, asked.priority or 0, space=reuse.space, keep=reuse.keep)
        return
    ends = await whole(server, exchange, rows, params, asked.priority or 0, space=reuse.space, keep=reuse.keep)
    choices = [frames.choice(i, end) for i, end in enumerate(ends)]
    answer = {"id": frames.ident, "object": "chat.completion", "created": frames.created, "model": model, "choices": choices}
    details = {"reasoning_tokens": sum(frames.reasoning_tokens)}
    counted = {**summed([length], ends), "completion_tokens_details": details}
    await exchange.respond(200, msgspec.json.encode({**answer, "usage": counted, **reuse.told(ends)}))


async def prompt_ids(server: Server, prompt: ChatPrompt) -> bytes:
    """The token ids of a conversation, made in a thread, because a template may take long.

    Raises:
        ApiError: The template refuses the messages, or they are too long.
    """
    try:
        ids = await asyncio.to_thread(prompt.token_ids, server.tokenizer, most=require_engine(server).max_model_len)
    except InvalidRequestError as error:
        code = "context_length_exceeded" if "tokens, the model's limit" in str(error) else None
        raise ApiError(400, str(error), param="messages", code=code) from None
    return np.asarray(ids, INT32).tobytes()


def reply_parser(server: Server, prompt: ChatPrompt, ids: bytes) -> ReplyParser:
    """What divides the replies to a prompt into reasoning, content and tool calls."""
    formats, splitter, tools = server.formats, None, None
    if formats.reasoning is not None and server.tokenizer is not None:
        end = server.tokenizer.decode(np.frombuffer(ids, INT32)[-PROMPT_END:], skip_special_tokens=False)
        splitter = ReasoningSplitter.of(formats.reasoning, opened=left_open(formats.reasoning, end, prompt.continued))
    if formats.tools is not None and prompt.callable_tools:
        tools = formats.tools.parser(prompt.callable_tools, most=prompt.most_calls)
    return ReplyParser(splitter=splitter, tools=tools)


class ChatFrames:
    """The choices of a chat completion: as events of a stream, and whole.

    Attributes:
        ident: The id of the answer.
        created: Its time.
        reasoning_tokens: The tokens of each row's think block.
        reuse: What the request says of chunks.
    """

    def __init__(self, server: Server, model: str, length: int, asked: ChatRequest, prompt: ChatPrompt, parsers: list[ReplyParser]) -> None:
        self.ident, self.created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self.reasoning_tokens = [0] * len(parsers)
        self.reuse = Reuse()
        self._server, self._length, self._parsers, self._prompt = server, length, parsers, prompt
        self._called = [False] * len(parsers)
        self._shows_reasoning = asked.include_reasoning is not False
        options = asked.stream_options
        self._usage = options is not None and options.include_usage
        self._continuous = options is not None and options.continuous_usage_stats
        self._before = f'data: {{"id":"{self.ident}","object":"chat.completion.chunk","created":{self.created},"model":{quoted(model)},'
        self._after = ',"usage":null}\n\n' if self._usage else "}\n\n"

    def head(self, rows: int) -> bytes:
        """The role of each choice."""
        return "".join([self._frame(i, '"role":"assistant","content":""', "null", self._after) for i in range(rows)]).encode()

    def piece(self, row: StreamedRow, text: str) -> bytes:
        """A piece of one row's text."""
        parser, events = self._parsers[row.index].push(text)
        self._parsers[row.index] = parser
        return self._frames(row, events, self._counted(row, None)).encode()

    def last(self, row: StreamedRow, text: str, ended: Ended) -> bytes:
        """The end of one row."""
        parser, events = self._parsers[row.index].push(text)
        after = self._counted(row, ended)
        frames = self._frames(row, [*events, *parser.end()], after)
        return (frames + self._frame(row.index, "", quoted(self._reason(row.index, ended)), self.reuse.event(ended) + after)).encode()

    def tail(self, rows: list[StreamedRow]) -> bytes:
        """The usage, if it was asked for."""
        if not self._usage:
            return b""
        counted = summed([self._length], [row.ended for row in rows if row.ended is not None])
        counted["completion_tokens_details"] = {"reasoning_tokens": sum(self.reasoning_tokens)}
        return f'{self._before}"choices":[],"usage":{msgspec.json.encode(counted).decode()}}}\n\n'.encode()

    def choice(self, index: int, ended: Ended) -> dict[str, Any]:
        """One whole choice."""
        parser, events = self._parsers[index].push(ended.text)
        reply = whole_reply([*events, *parser.end()])
        calls = [
            {"id": self._call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not reply.content else reply.content, "refusal": None}
        if reply.reasoning:
            tokenizer = self._server.tokenizer
            self.reasoning_tokens[index] = 0 if tokenizer is None else len(tokenizer.encode(reply.reasoning, add_special_tokens=False))
            if self._shows_reasoning:
                message |= {"reasoning_content": reply.reasoning, "reasoning": reply.reasoning}
        if calls:
            message["tool_calls"] = calls
            self._called[index] = True
        return {"index": index, "message": message, "logprobs": None, "finish_reason": self._reason(index, ended)}

    def _frames(self, row: StreamedRow, events: Iterable[Event], after: str) -> str:
        return "".join([self._frame(row.index, delta, "null", after) for event in events if (delta := self._delta(row, event))])

    def _frame(self, index: int, delta: str, reason: str, after: str) -> str:
        return f'{self._before}"choices":[{{"index":{index},"delta":{{{delta}}},"logprobs":null,"finish_reason":{reason}}}]{after}'

    def _delta(self, row: StreamedRow, event: Event) -> str:
        """The fields of one event's delta; "" for none."""
        match event:
            case Content():
                return f'"content":{quoted(event.source)}'
            case Reasoning():
                self.reasoning_tokens[row.index] = row.num_tokens
                text = quoted(event.source)
                return f'"reasoning_content":{text},"reasoning":{text}' if self._shows_reasoning else ""
            case CallBegins():
                ident = self._call_id()
                function = f'{{"name":{quoted(event.name)},"arguments":""}}'
                return f'"tool_calls":[{{"index":{event.index},"id":"{ident}","type":"function","function":{function}}}]'
            case ArgumentsDelta():
                text = quoted(event.text)
                return f'"tool_calls":[{{"index":{event.index},"function":{{"arguments":{text}}}}}]' if event.text else ""
            case CallEnds():
                self._called[row.index] |= event.complete
        return ""

    def _counted(self, row: StreamedRow, ended: Ended | None) -> str:
        if not self._continuous:
            return self._after
        count = row.num_tokens if ended is None else ended.num_tokens
        return f',"usage":{msgspec.json.encode(usage(self._length, count, 0)).decode()}}}\n\n'

    def _reason(self, index: int, ended: Ended) -> str:
        """OpenAI's word for the end. A reply whose tool was named by the request ends with "stop"."""
        called = self._called[index] and ended.finish_reason == "stop" and not self._prompt.tool_choice.single
        return "tool_calls" if called else ended.finish_reason

    def _call_id(self) -> str:
        form = self._server.formats.tools
        length = None if form is None else form.id_length
        ident = "".join(secrets.choice(LETTERS) for _ in range(length or ID_LENGTH))
        return ident if length else f"call_{ident}"
