"""`POST /v1/chat/completions`, OpenAI's interface for conversations."""

import time
import uuid
from collections.abc import Iterable
from json.encoder import encode_basestring_ascii as quoted  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

import msgspec

from nanovllm.entrypoints.server.api.chat_parts import call_id, num_tokens, prompt_ids, reply_parser
from nanovllm.entrypoints.server.api.completions import num_choices, seeded, stops_of, summed
from nanovllm.entrypoints.server.api.constraint import constraint_of
from nanovllm.entrypoints.server.api.prompts import INT32, room, usage
from nanovllm.entrypoints.server.api.replies import StreamedReply, StreamedRow, whole
from nanovllm.entrypoints.server.app import Server, own_model
from nanovllm.entrypoints.server.errors import api_error
from nanovllm.entrypoints.server.exchange import Exchange
from nanovllm.entrypoints.server.messages import ChatPrompt, chat_prompt
from nanovllm.entrypoints.server.reply import ReplyParser
from nanovllm.entrypoints.server.request_fields import Sampled, read, sampling
from nanovllm.entrypoints.server.tools.events import ArgumentsDelta, CallBegins, CallEnds, Content, Event, Reasoning, whole_reply
from nanovllm.entrypoints.server.wire import Ended
from nanovllm.errors import InvalidRequestError
from nanovllm.tokenizer.stream import TextStream


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
    constraint_of(asked.response_format, "response_format")
    try:
        prompt = chat_prompt(body)
    except InvalidRequestError as error:
        raise api_error(error, "messages") from None
    ids = await prompt_ids(server, prompt)
    length = len(ids) // INT32.itemsize
    most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    options = sampling(asked, server.generation, room(server, length, most, "messages"))
    params = [seeded(options, i) for i in range(n)]
    rows = [[ids] for _ in range(n)]
    parser = reply_parser(server, prompt, ids)
    frames = ChatFrames(server, model, length, asked, prompt, [parser] * n)
    if asked.stream:
        stops = stops_of(asked)
        texts = [TextStream.of(server.tokenizer, stops) for _ in rows]
        await StreamedReply(server, exchange, frames, texts).run(rows, params, asked.priority or 0)
        return
    ends = await whole(server, exchange, rows, params, asked.priority or 0)
    choices = [frames.choice(i, end) for i, end in enumerate(ends)]
    answer = {"id": frames.ident, "object": "chat.completion", "created": frames.created, "model": model, "choices": choices}
    details = {"reasoning_tokens": sum(frames.reasoning_tokens)}
    await exchange.respond(200, msgspec.json.encode({**answer, "usage": {**summed([length], ends), "completion_tokens_details": details}}))


class ChatFrames:
    """The choices of a chat completion: as events of a stream, and whole.

    Attributes:
        ident: The id of the answer.
        created: Its time.
        reasoning_tokens: The tokens of each row's think block.
    """

    def __init__(self, server: Server, model: str, length: int, asked: ChatRequest, prompt: ChatPrompt, parsers: list[ReplyParser]) -> None:
        self.ident, self.created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self.reasoning_tokens = [0] * len(parsers)
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
        return (frames + self._frame(row.index, "", quoted(self._reason(row.index, ended)), after)).encode()

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
            {"id": call_id(self._server.formats), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not reply.content else reply.content, "refusal": None}
        if reply.reasoning:
            self.reasoning_tokens[index] = num_tokens(self._server, reply.reasoning)
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
                ident = call_id(self._server.formats)
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
