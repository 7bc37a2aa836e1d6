"""`POST /v1/chat/completions`, OpenAI's interface for conversations."""

import time
from collections.abc import Iterable
from json.encoder import encode_basestring_ascii as quoted  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

import msgspec
import numpy as np

from nanovllm.entrypoints.server.api.chat_parts import call_id, message_of, num_tokens, prompt_ids, reply_parser
from nanovllm.entrypoints.server.api.chunk_reuse import Reuse, reuse_of
from nanovllm.entrypoints.server.api.completions import (
    asks_usage,
    keeps_stop,
    num_choices,
    places_of,
    require_rows,
    seeded,
    summed,
    text_of,
)
from nanovllm.entrypoints.server.api.logprobs import TokenForms, listed, num_top, require_listable, stop_ids
from nanovllm.entrypoints.server.api.prompts import INT32, kept_tokens, room, usage
from nanovllm.entrypoints.server.api.replies import StreamedReply, StreamedRow, whole, with_stops
from nanovllm.entrypoints.server.app import Server, own_model
from nanovllm.entrypoints.server.constraints import chat_form, forced, form_of
from nanovllm.entrypoints.server.errors import ApiError, api_error
from nanovllm.entrypoints.server.exchange import Exchange, unique
from nanovllm.entrypoints.server.messages import ChatPrompt, chat_prompt
from nanovllm.entrypoints.server.reply import ReplyParser
from nanovllm.entrypoints.server.request_fields import Sampled, read, sampling
from nanovllm.entrypoints.server.row_logprobs import RowLogprobs
from nanovllm.entrypoints.server.tools.events import ArgumentsDelta, CallBegins, CallEnds, Content, Event, Reasoning, whole_reply
from nanovllm.entrypoints.server.wire import Ended
from nanovllm.errors import InvalidRequestError


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


async def chat_completions(server: Server, exchange: Exchange) -> None:
    """Answer a request."""
    body = await exchange.json()
    asked = read(body, ChatRequest)
    exchange.salt(asked.cache_salt)
    top = num_top(asked.top_logprobs or 0, "top_logprobs")
    if top and not asked.logprobs:
        raise ApiError(400, "top_logprobs is only allowed with logprobs: true", param="top_logprobs")
    model, n = own_model(server, asked.model), num_choices(asked.n)
    require_rows(server, n, "n")
    try:
        form, prompt = form_of(body), chat_prompt(body)
    except InvalidRequestError as error:
        raise api_error(error, "messages") from None
    limit = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
    wanted = asked.max_tokens if limit == "max_tokens" else asked.max_completion_tokens
    ids = await prompt_ids(server, prompt, kept=kept_tokens(server, asked, wanted))
    reuse = await reuse_of(server, exchange, asked, n)
    length = reuse.num_tokens + len(ids) // INT32.itemsize
    most = room(server, length, wanted, "messages", limit)
    parser = reply_parser(server.formats, server.tokenizer, prompt, ids)
    more, logprobs = await forced(server, chat_form(server.formats, server.tokenizer, form, prompt, parser)), None
    if asked.logprobs:
        require_listable(n * most, top, limit)
        more["logprobs"], ends_with = top, stop_ids(server, asked)
        logprobs = [RowLogprobs(places_of(server, asked), ends_with) for _ in range(n)]
    options = sampling(asked, server.generation, most, limit=limit, **more)
    params = [seeded(options, i) for i in range(n)]
    rows = [reuse.parts(ids) for _ in range(n)]
    frames = ChatFrames(server, model, ids, length, asked, prompt, [parser] * n, reuse)
    if asked.stream:
        texts = [text_of(server, asked)] * n
        told, keeps = bool(asked.return_token_ids), keeps_stop(asked)
        how: Any = {"tells_ids": told, "keeps_stop": keeps, "logprobs": logprobs, "interval": asked.stream_interval}
        reply = StreamedReply(server, exchange, frames, texts, at_once=True, **how)
        await reply.run(rows, params, asked.priority or 0, space=reuse.space, keep=reuse.keep)
        return
    ends = await whole(server, exchange, rows, params, asked.priority or 0, space=reuse.space, keep=reuse.keep)
    if keeps_stop(asked):
        ends = with_stops(text_of(server, asked), ends)
    choices = [frames.choice(i, end) for i, end in enumerate(ends)]
    if logprobs is not None:
        for choice, one in zip(choices, await listed(frames.forms.chat, logprobs, ends, top), strict=True):
            choice["logprobs"] = one
    answer = {"id": frames.ident, "object": "chat.completion", "created": frames.created, "model": model, "choices": choices}
    if asked.return_token_ids:
        answer["prompt_token_ids"] = np.frombuffer(ids, INT32).tolist()
    counted = {**summed([length], ends), "completion_tokens_details": frames.details()}
    await exchange.respond(200, msgspec.json.encode({**answer, "usage": counted, **reuse.told(ends)}))


class ChatFrames:
    """The choices of a chat completion: as events of a stream, and whole.

    Attributes:
        ident: The id of the answer.
        created: Its time.
        forms: Its log-probabilities as JSON.
        thoughts: The text of each row's think block, if its tokens are counted.
    """

    def __init__(
        self,
        server: Server,
        model: str,
        ids: bytes,
        length: int,
        asked: ChatRequest,
        prompt: ChatPrompt,
        parsers: list[ReplyParser],
        reuse: Reuse,
    ) -> None:
        self.ident, self.created = f"chatcmpl-{unique()}", int(time.time())
        self.forms = TokenForms(server.tokenizer)
        self.thoughts = [list[str]() for _ in parsers]
        self._server, self._ids, self._parsers, self._prompt = server, np.frombuffer(ids, INT32), parsers, prompt
        self._length, self._reuse, self._tells_ids = length, reuse, bool(asked.return_token_ids)
        self._called = [False] * len(parsers)
        self._shows_reasoning = asked.include_reasoning is not False
        self._usage, self._continuous = asks_usage(asked)
        self._before = f'data: {{"id":"{self.ident}","object":"chat.completion.chunk","created":{self.created},"model":{quoted(model)},'
        self._after = ',"usage":null}\n\n' if self._usage else "}\n\n"

    def head(self, rows: int) -> bytes:
        """The role of each choice."""
        before = f'{self._before}"prompt_token_ids":{self._ids.tolist()},' if self._tells_ids else self._before
        frames = [self._frame(i, '"role":"assistant","content":""', "null", self._counted(0)) for i in range(rows)]
        return "".join([before, frames[0][len(self._before) :], *frames[1:]]).encode()

    def piece(self, row: StreamedRow, text: str) -> bytes:
        """A piece of one row's text."""
        self._parsers[row.index], events = self._parsers[row.index].push(text)
        return self._frames(row, events, self._counted(row.num_tokens)).encode() if events else b""

    def last(self, row: StreamedRow, text: str, ended: Ended) -> bytes:
        """The end of one row."""
        parser, events = self._parsers[row.index].push(text)
        after = self._counted(ended.num_tokens)
        frames = self._frames(row, [*events, *parser.end()], after, ended)
        after, logprobs = self._reuse.event(row.index, ended) + after, "null" if row.logprobs is None else self._listed(row, ended)
        return (frames + self._frame(row.index, "", quoted(self._reason(row.index, ended)), after, row.told_ids(), logprobs)).encode()

    def tail(self, rows: list[StreamedRow]) -> bytes:
        """The usage, if it was asked for."""
        if not self._usage:
            return b""
        counted = summed([self._length], [row.ended for row in rows if row.ended is not None])
        counted["completion_tokens_details"] = self.details()
        return f'{self._before}"choices":[],"usage":{msgspec.json.encode(counted).decode()}}}\n\n'.encode()

    def choice(self, index: int, ended: Ended) -> dict[str, Any]:
        """One whole choice."""
        parser, events = self._parsers[index].push(ended.text)
        reply = whole_reply([*events, *parser.end()])
        message = message_of(reply, self._server.formats, shows_reasoning=self._shows_reasoning)
        if reply.reasoning:
            self.thoughts[index].append(reply.reasoning)
        if reply.calls:
            self._called[index] = True
        choice = {"index": index, "message": message, "logprobs": None, "finish_reason": self._reason(index, ended)}
        return {**choice, "token_ids": np.frombuffer(ended.token_ids, INT32).tolist()} if self._tells_ids else choice

    def details(self) -> dict[str, int]:
        """How many tokens the texts of the think blocks have."""
        return {"reasoning_tokens": sum([num_tokens(self._server, "".join(parts)) for parts in self.thoughts if parts])}

    def _frames(self, row: StreamedRow, events: Iterable[Event], after: str, ended: Ended | None = None) -> str:
        frames = ""
        for event in events:
            if delta := self._delta(row, event):
                logprobs = "null" if frames or row.logprobs is None else self._listed(row, ended)
                frames += self._frame(row.index, delta, "null", after, row.told_ids() if not frames else "", logprobs)
        return frames

    def _listed(self, row: StreamedRow, ended: Ended | None) -> str:
        """The log-probabilities that no event has told of the tokens whose text the row has given out; of all, if it has ended."""
        assert row.logprobs is not None
        entries = row.logprobs.take(row.text.num_shown) if ended is None else row.logprobs.take_all()
        return self.forms.chat(entries) if entries else "null"

    def _frame(self, index: int, delta: str, reason: str, after: str, more: str = "", logprobs: str = "null") -> str:
        choice = f'{{"index":{index},"delta":{{{delta}}},"logprobs":{logprobs},"finish_reason":{reason}{more}}}'
        return f'{self._before}"choices":[{choice}]{after}'

    def _delta(self, row: StreamedRow, event: Event) -> str:
        """The fields of one event's delta; "" for none."""
        match event:
            case Content():
                return f'"content":{quoted(event.source)}'
            case Reasoning():
                if self._usage:
                    self.thoughts[row.index].append(event.source)
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

    def _counted(self, count: int) -> str:
        """The end of an event after `count` tokens of its row."""
        if not self._continuous:
            return self._after
        return f',"usage":{msgspec.json.encode(usage(self._length, count, 0)).decode()}}}\n\n'

    def _reason(self, index: int, ended: Ended) -> str:
        """OpenAI's word for the end. A reply whose tool was named by the request ends with "stop"."""
        called = self._called[index] and ended.finish_reason == "stop" and not self._prompt.tool_choice.single
        return "tool_calls" if called else ended.finish_reason
