"""Who waits for the rows of one HTTP request: for their ends only, or for every step's tokens."""

import asyncio
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any, Protocol, runtime_checkable

import msgspec

from nanovllm.entrypoints.server.app import Server
from nanovllm.entrypoints.server.engine_client import error_of
from nanovllm.entrypoints.server.errors import ApiError, api_error, too_late
from nanovllm.entrypoints.server.exchange import ClientGoneError, EventStream, Exchange
from nanovllm.entrypoints.server.row_logprobs import RowLogprobs
from nanovllm.entrypoints.server.wire import Ended, Keep, Scored
from nanovllm.errors import ChunkExistsError, ChunkLimitError, NanoVLLMError
from nanovllm.tokenizer.stream import TextStream

DONE = b"data: [DONE]\n\n"
NOTHING = Ended(0, "length", "", 0, b"", 0)  # the end of a reply of no tokens


class Row:
    """A row whose end alone matters."""

    __slots__ = ("ended", "rows")

    def __init__(self, rows: "Rows") -> None:
        self.rows = rows
        self.ended: Ended | None = None

    def accepted(self) -> None:
        """Nothing is to be done."""

    def push(self, token_ids: list[int]) -> None:
        """Nothing is to be done."""

    def scored(self, scored: Scored) -> None:
        """Nothing is to be done."""

    def end(self, ended: Ended) -> None:
        """The row has ended."""
        self.ended = ended
        self.rows.left -= 1
        if ended.error is not None:
            self.rows.fail(failure(ended, self.rows.field))
        elif not self.rows.left and not self.rows.future.done():
            self.rows.future.set_result(None)

    def fail(self, error: NanoVLLMError) -> None:
        """The row was refused, or the engine is lost."""
        self.rows.fail(refusal(error, self.rows.field))


class Rows:
    """The rows of one request whose answer is sent whole."""

    def __init__(self, count: int, field: str) -> None:
        self.left, self.field = count, field
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.rows = [Row(self) for _ in range(count)]

    def fail(self, error: ApiError) -> None:
        """End with an error, unless there is one already."""
        if not self.future.done():
            self.future.set_exception(error)


async def whole(
    server: Server,
    exchange: Exchange,
    prompts: Seq[Seq[bytes | str]],
    params: list[dict[str, Any]],
    priority: int,
    *,
    space: str = "",
    keep: Keep | None = None,
    field: str = "keep",
) -> list[Ended]:
    """Run rows to their ends. The arguments are those of `EngineClient.submit`, but for `field`, which gives the name of the chunk `keep`.

    Raises:
        ApiError: A row failed.
        ClientGoneError: The client has gone; the rows are cancelled.
    """
    rows = Rows(len(prompts), field)
    more: Any = {"priority": priority, "space": space, "keep": keep, "namespace": exchange.namespace}
    ids = server.engine.submit(prompts, params, [*rows.rows], streamed=False, **more)
    gone = asyncio.ensure_future(exchange.disconnected())
    try:
        await asyncio.wait((rows.future, gone), return_when=asyncio.FIRST_COMPLETED)
        if not rows.future.done():
            raise ClientGoneError
        rows.future.result()
        return [row.ended for row in rows.rows if row.ended is not None]
    finally:
        gone.cancel()
        rows.future.cancel()
        server.engine.cancel(ids)


@runtime_checkable
class Frames(Protocol):
    """The events of one kind of stream, as bytes."""

    def head(self, rows: int) -> bytes:
        """What comes before the first piece of text."""
        ...

    def piece(self, row: "StreamedRow", text: str) -> bytes:
        """A piece of one row's text."""
        ...

    def last(self, row: "StreamedRow", text: str, ended: Ended) -> bytes:
        """The end of one row."""
        ...

    def tail(self, rows: "list[StreamedRow]") -> bytes:
        """What comes after all rows."""
        ...


class StreamedRow:
    """A row whose tokens are sent as they come.

    Attributes:
        untold: The token ids that no event has told, if events tell them, else None.
        logprobs: The log-probabilities that no event has told, if events tell them, else None.
    """

    __slots__ = ("ended", "finished", "index", "logprobs", "num_tokens", "reply", "text", "unread", "untold")

    def __init__(self, reply: "StreamedReply", index: int, text: TextStream, *, tells_ids: bool) -> None:
        self.reply, self.index, self.text = reply, index, text
        self.unread: list[int] = []  # also the tokens of the last step, once the row has ended
        self.untold: list[int] | None = [] if tells_ids else None
        self.logprobs: RowLogprobs | None = None
        self.num_tokens = 0
        self.ended: Ended | None = None
        self.finished = False

    def accepted(self) -> None:
        """The engine has queued the row: the answer begins."""
        self.reply.begin()

    def push(self, token_ids: list[int]) -> None:
        """A step gave tokens."""
        self.num_tokens += len(token_ids)
        if self.untold is not None:
            self.untold += token_ids
        self.unread += token_ids
        if not self.reply.blocked and (len(self.unread) >= self.reply.interval or self.num_tokens == len(self.unread)):
            self._write()

    def scored(self, scored: Scored) -> None:
        """Nothing is to be done."""

    def _write(self) -> None:
        """Write what is unread."""
        token_ids, self.unread = self.unread, []
        self.text, piece = self.text.push(token_ids)
        if piece and (data := self.reply.frames.piece(self, piece)):
            self.reply.write(data)

    def end(self, ended: Ended) -> None:
        """The row has ended."""
        last = array("i", ended.token_ids)
        self.unread += last
        if self.untold is not None:
            self.untold += last
        if self.reply.keeps_stop:
            ended = _with_stop(ended, self.text, self.unread)
        if self.logprobs is not None:
            self.logprobs.end(ended)
        self.ended = ended
        if not self.reply.blocked:
            self.finish()

    def finish(self) -> None:
        """Write what is left."""
        assert self.ended is not None
        self.finished = True
        if self.ended.error is not None:
            self.reply.cut_off(failure(self.ended))
        else:
            self.reply.row_ended(self.reply.frames.last(self, self.text.end(self.ended.text), self.ended))

    def told_ids(self) -> str:
        """The field `token_ids` of an event, with the tokens since the last one; "" if events do not tell them."""
        if self.untold is None:
            return ""
        token_ids, self.untold = self.untold, []
        return f',"token_ids":{token_ids}'

    def catch_up(self) -> None:
        """Write what has come while the client did not read."""
        if self.ended is not None:
            if not self.finished:
                self.finish()
        elif self.unread:
            self._write()

    def fail(self, error: NanoVLLMError) -> None:
        """The row was refused, or the engine is lost."""
        self.reply.cut_off(refusal(error))


class ScoredRow(StreamedRow):
    """A streamed row that tells log-probabilities."""

    __slots__ = ("_logprobs",)

    def __init__(self, reply: "StreamedReply", index: int, text: TextStream, logprobs: RowLogprobs, *, tells_ids: bool) -> None:
        super().__init__(reply, index, text, tells_ids=tells_ids)
        self.logprobs = self._logprobs = logprobs

    def push(self, token_ids: list[int]) -> None:
        """A step gave tokens."""
        self._logprobs.push(token_ids)
        super().push(token_ids)

    def scored(self, scored: Scored) -> None:
        """The log-probabilities of tokens that come next."""
        self._logprobs.add(scored)


class StreamedReply:
    """The rows of one request whose answer is a stream of events.

    Attributes:
        frames: Makes the events.
        rows: The rows.
        started: A future for the beginning of the answer, or the error that keeps it from beginning.
        keeps_stop: Whether the stop string that ends a row stays in its text.
        interval: How many tokens an event has.

    Args:
        tells_ids: Whether events tell token ids.
        interval: How many tokens an event has, but for the first and the last one. None: as the operator chose.
        logprobs: Those of each row, if events tell them.
        done: What ends the stream.
        failed: Makes the end of a stream that failed.
        at_once: Whether what comes before the first piece of text is sent when the engine has queued the request, or with that piece.
    """

    def __init__(
        self,
        server: Server,
        exchange: Exchange,
        frames: Frames,
        texts: list[TextStream],
        *,
        tells_ids: bool = False,
        interval: int | None = None,
        logprobs: Seq[RowLogprobs] | None = None,
        done: bytes = DONE,
        failed: Callable[[ApiError], bytes] | None = None,
        at_once: bool = False,
        keeps_stop: bool = False,
    ) -> None:
        self.frames, self.keeps_stop = frames, keeps_stop
        self.interval = server.settings.stream_interval if interval is None else interval
        self._done, self._failed, self._at_once = done, failed or error_event, at_once
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server, self._exchange = server, exchange
        self._events: EventStream | None = None
        self.rows: list[StreamedRow]
        if logprobs is None:
            self.rows = [StreamedRow(self, index, text, tells_ids=tells_ids) for index, text in enumerate(texts)]
        else:
            each = enumerate(zip(texts, logprobs, strict=True))
            self.rows = [ScoredRow(self, index, text, row, tells_ids=tells_ids) for index, (text, row) in each]
        self._headed = False
        self._cut: ApiError | None = None
        self._ids: list[int] = []

    @property
    def blocked(self) -> bool:
        """Whether nothing may be written now."""
        return self._events is None or self._events.paused or self._events.ended

    async def run(
        self,
        prompts: Seq[Seq[bytes | str]],
        params: list[dict[str, Any]],
        priority: int,
        *,
        space: str = "",
        keep: Keep | None = None,
    ) -> None:
        """Send the answer. The arguments are those of `EngineClient.submit`.

        Raises:
            ApiError: The engine refuses the request, and no answer has begun.
        """
        engine = self._server.engine
        more: Any = {"priority": priority, "space": space, "keep": keep, "namespace": self._exchange.namespace}
        self._ids = engine.submit(prompts, params, [*self.rows], streamed=True, **more)
        when, loop = self._exchange.take_deadline(), asyncio.get_running_loop()
        timer = None if when is None else loop.call_at(when, self._late)
        try:
            await self.started
            await self._exchange.disconnected()
        finally:
            if timer is not None:
                timer.cancel()
            engine.cancel(self._ids)
            if self._events is not None:
                self._events.forget()

    async def run_known(self, ends: list[Ended]) -> None:
        """Send the answer to a request whose replies are known, so that the engine need not run it."""
        self.begin()
        try:
            for row, ended in zip(self.rows, ends, strict=True):
                row.end(ended)
            await self._exchange.disconnected()
        finally:
            if self._events is not None:
                self._events.forget()

    def begin(self) -> None:
        """Begin the answer, once."""
        if self._events is None and not self.started.done():
            self._events = self._exchange.events(self._server.streams)
            self._events.resumed = self._resumed
            self.started.set_result(None)
            if self._at_once:
                self.write(b"")

    def write(self, data: bytes) -> None:
        """Send events."""
        assert self._events is not None
        self._events.write(self._with_head(data))

    def _with_head(self, data: bytes) -> bytes:
        """Events, the first time after what comes before them."""
        if self._headed:
            return data
        self._headed = True
        return self.frames.head(len(self.rows)) + data

    def row_ended(self, data: bytes) -> None:
        """Send the last events of a row and, after the last row, the end of the answer."""
        assert self._events is not None
        if not all(row.finished for row in self.rows):
            self.write(data)
            return
        self._events.end(self._with_head(data) + self.frames.tail(self.rows) + self._done)

    def cut_off(self, error: ApiError) -> None:
        """End with an error: as the answer itself or, after its beginning, as an event."""
        if not self.started.done():
            self.started.set_exception(error)
            return
        self._server.engine.cancel(self._ids)
        if self._events is None or self._events.ended:
            return
        if self._events.paused:
            self._cut = error
            return
        self._events.end(self._failed(error))

    def _late(self) -> None:
        """End what still runs, because the request has taken as long as it may. What has ended may still be read."""
        if any(row.ended is None for row in self.rows):
            self.cut_off(too_late(self._server.settings.request_timeout))

    def _resumed(self) -> None:
        if self._cut is not None:
            self.cut_off(self._cut)
            return
        for row in self.rows:
            if self.blocked:
                return
            row.catch_up()


def with_stops(text: TextStream, ends: list[Ended]) -> list[Ended]:
    """The ends of whole replies, whose texts are `text` before their first tokens, with the stop strings that ended them."""
    return [_with_stop(ended, text, array("i", ended.token_ids)) for ended in ends]


def _with_stop(ended: Ended, text: TextStream, token_ids: Iterable[int]) -> Ended:
    """An end whose text has the stop string that follows it, if one does. `token_ids`: the tokens that `text` has not read."""
    if text.detokenizer is None or ended.finish_reason != "stop":
        return ended
    detokenizer, piece = text.detokenizer.push(token_ids)
    after = (text.held + piece + detokenizer.rest())[len(ended.text) - text.num_shown :]
    found = [stop for stop in text.stops if after.startswith(stop)]
    return msgspec.structs.replace(ended, text=ended.text + min(found, key=len, default=""))


def error_event(error: ApiError) -> bytes:
    """The end of a stream that failed, as OpenAI's clients expect it for completions."""
    return b"data: " + error.body() + b"\n\n" + DONE


def failure(ended: Ended, field: str = "keep") -> ApiError:
    """The error of a row that failed. `field` is as in `refusal`."""
    assert ended.error is not None
    return refusal(error_of(*ended.error), field)


def refusal(error: NanoVLLMError, field: str = "keep") -> ApiError:
    """The answer for an error of the engine. One about the chunk that a request should become names the `field` of the chunk's name."""
    return api_error(error, field if isinstance(error, ChunkExistsError | ChunkLimitError) else None)
