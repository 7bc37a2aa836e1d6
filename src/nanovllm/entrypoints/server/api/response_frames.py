"""The answers of `/v1/responses`: items and events. The whole answer is made of the same events as the stream.

The order of the events is that of https://platform.openai.com/docs/api-reference/responses-streaming, which OpenAI's client checks: an
item is added before its parts, a part before its deltas, and each is done before the next begins.
"""

import time
import uuid
from collections.abc import Iterable
from json.encoder import encode_basestring_ascii as quoted  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

import msgspec

from nanovllm.entrypoints.server.api.chat_parts import call_id, num_tokens
from nanovllm.entrypoints.server.api.chunk_reuse import Reuse
from nanovllm.entrypoints.server.api.logprobs import TokenForms
from nanovllm.entrypoints.server.api.replies import StreamedRow
from nanovllm.entrypoints.server.app import Server
from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.reply import ReplyParser
from nanovllm.entrypoints.server.row_logprobs import RowLogprobs
from nanovllm.entrypoints.server.tools.events import ArgumentsDelta, CallBegins, CallEnds, Content, Event, Reasoning
from nanovllm.entrypoints.server.wire import Ended

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
DELTAS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}


class OpenItem:
    """The item that the reply is in.

    Attributes:
        value: The item, without its text.
        pieces: Its text or arguments so far.
        logprobs: The log-probabilities of its tokens so far, as JSON.
        before: The beginning of the data of its deltas.
    """

    __slots__ = ("before", "logprobs", "pieces", "value")

    def __init__(self, value: dict[str, Any], place: int) -> None:
        self.value, self.pieces, self.logprobs = value, list[str](), list[str]()
        kind = f"response.{DELTAS[value['type']]}.delta"
        inner = "" if value["type"] == "function_call" else '"content_index":0,'
        self.before = f'event: {kind}\ndata: {{"type":"{kind}","item_id":"{value["id"]}","output_index":{place},{inner}'


class ResponseFrames:
    """One response: as the events of a stream, and whole.

    Args:
        server: Its tokenizer counts.
        echo: The fields of the answer that repeat the request.
        length: The tokens of the prompt.
        parser: Divides the reply.
        reuse: What the request says of chunks.
        logprobs: The log-probabilities of the reply's tokens, if they are told. An item lists those whose text begins in its own.
    """

    def __init__(
        self, server: Server, echo: dict[str, Any], length: int, parser: ReplyParser, reuse: Reuse, logprobs: RowLogprobs | None
    ) -> None:
        self._server, self._length, self._parser, self._reuse = server, length, parser, reuse
        self._base = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()), **echo, "background": False}
        self._output: list[dict[str, Any]] = []
        self._open: OpenItem | None = None
        self._logprobs, self._forms = logprobs, TokenForms(server.tokenizer)
        self._read = 0  # characters of the reply that events have told
        self._sequence = 0
        self._headed = False
        value = self._response("in_progress")  # before the first item, though the head is asked for after it
        self._head = "".join([self._event(f"response.{name}", {"response": value}) for name in ("created", "in_progress")])

    def head(self, rows: int = 1) -> bytes:
        """The response, in progress."""
        self._headed = True
        return self._head.encode()

    def piece(self, row: StreamedRow, text: str) -> bytes:
        """A piece of the reply."""
        self._parser, events = self._parser.push(text)
        return self._frames(events).encode()

    def last(self, row: StreamedRow, text: str, ended: Ended) -> bytes:
        """The end of the reply."""
        frames = self._ending(text, ended)
        value = self._ended(ended)
        return (frames + self._event(f"response.{value['status']}", {"response": value})).encode()

    def tail(self, rows: list[StreamedRow]) -> bytes:
        """Nothing: the usage is part of the response."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""
        head = b"" if self._headed else self.head()
        if self._open is not None:
            self._output.append(self._closed(self._open, "incomplete"))
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        value = self._response("failed", error={"code": code, "message": error.message})
        return head + self._event("response.failed", {"response": value}).encode()

    def whole(self, ended: Ended) -> dict[str, Any]:
        """The whole response."""
        if self._logprobs is not None:
            self._logprobs.end(ended)
        self._ending(ended.text, ended)
        return self._ended(ended)

    def _ending(self, text: str, ended: Ended) -> str:
        self._parser, events = self._parser.push(text)
        frames = self._frames([*events, *self._parser.end()])
        if not self._output and self._open is None:  # clients look for a message
            frames += self._begin("message")
        return frames + self._close("incomplete" if ended.finish_reason == "length" else "completed")

    def _ended(self, ended: Ended) -> dict[str, Any]:
        thoughts = [part["text"] for item in self._output if item["type"] == "reasoning" for part in item["content"]]
        details = {"cached_tokens": ended.num_cached, "cache_write_tokens": 0}
        usage = {
            "input_tokens": self._length,
            "input_tokens_details": details,
            "output_tokens": ended.num_tokens,
            "output_tokens_details": {"reasoning_tokens": sum([num_tokens(self._server, text) for text in thoughts])},
            "total_tokens": self._length + ended.num_tokens,
        }
        more = {"usage": usage, **self._reuse.told([ended])}
        if ended.finish_reason == "length":
            return self._response("incomplete", incomplete_details={"reason": "max_output_tokens"}, **more)
        return self._response("completed", completed_at=int(time.time()), **more)

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        absent = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return {**self._base, "status": status, "output": self._output, **absent, **more}

    def _frames(self, events: Iterable[Event]) -> str:
        return "".join([self._frame(event) for event in events])

    def _frame(self, event: Event) -> str:
        self._read += len(event.source)
        listed = [] if self._logprobs is None else self._logprobs.take(self._read)
        match event:
            case Content():
                return self._text("message", event.source, self._forms.each(listed))
            case Reasoning():
                return self._text("reasoning", event.source)
            case CallBegins():
                return self._close() + self._begin("function_call", call_id=call_id(self._server.formats), name=event.name, arguments="")
            case ArgumentsDelta():
                return self._delta(event.text) if event.text else ""
            case CallEnds():
                return self._close("completed" if event.complete else "incomplete")
        return ""

    def _text(self, kind: str, text: str, logprobs: list[str] | None = None) -> str:
        if self._open is not None and self._open.value["type"] == kind:
            return self._delta(text, logprobs)
        return self._close() + self._begin(kind) + self._delta(text, logprobs)

    def _delta(self, text: str, logprobs: list[str] | None = None) -> str:
        """More of the open item, with the log-probabilities of its tokens if it is a message."""
        assert self._open is not None
        self._open.pieces.append(text)
        self._open.logprobs += logprobs or ()
        listed = "" if logprobs is None else f'"logprobs":[{",".join(logprobs)}],'
        return f'{self._open.before}{listed}"delta":{quoted(text)},"sequence_number":{self._next()}}}\n\n'

    def _begin(self, kind: str, **fields: Any) -> str:
        """Begin an item, and its part if it has one."""
        if kind != "function_call":
            fields = {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        place = len(self._output)
        item = {"id": f"{PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        self._open = OpenItem(item, place)
        added = self._event("response.output_item.added", {"output_index": place, "item": item})
        if kind == "function_call":
            return added
        part = {"item_id": item["id"], "output_index": place, "content_index": 0, "part": _part(kind, "")}
        return added + self._event("response.content_part.added", part)

    def _close(self, status: str = "completed") -> str:
        """End the item, if there is one."""
        if self._open is None:
            return ""
        item = self._closed(self._open, status)
        kind, where = item["type"], {"item_id": item["id"], "output_index": len(self._output)}
        self._open = None
        self._output.append(item)
        name = f"response.{DELTAS[kind]}.done"
        if kind == "function_call":
            done = self._event(name, {**where, "name": item["name"], "arguments": item["arguments"]})
        else:
            (part,), where = item["content"], {**where, "content_index": 0}
            done = self._event(name, {**where, "text": part["text"], **({"logprobs": part["logprobs"]} if kind == "message" else {})})
            done += self._event("response.content_part.done", {**where, "part": part})
        return done + self._event("response.output_item.done", {"output_index": where["output_index"], "item": item})

    def _closed(self, opened: OpenItem, status: str) -> dict[str, Any]:
        text, kind = "".join(opened.pieces), opened.value["type"]
        listed = [msgspec.Raw(one) for one in opened.logprobs]
        own = {"arguments": text} if kind == "function_call" else {"content": [_part(kind, text, listed)]}
        return {**opened.value, "status": status, **own}

    def _event(self, kind: str, fields: dict[str, Any]) -> str:
        data = msgspec.json.encode({"type": kind, **fields, "sequence_number": self._next()}).decode()
        return f"event: {kind}\ndata: {data}\n\n"

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence - 1


def _part(kind: str, text: str, logprobs: Iterable[msgspec.Raw] = ()) -> dict[str, Any]:
    """The part of an item that has its text."""
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}
    return {"type": "reasoning_text", "text": text}
