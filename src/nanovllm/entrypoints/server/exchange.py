"""One request and its answer, over ASGI: a body that is read within bounds, answers of JSON, and streams of events."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from typing import Any

import msgspec

from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.settings import BODY_SECONDS, MOST_BODY_BYTES, MOST_DEPTH, PING_SECONDS, STALL_SECONDS

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Coroutine[Any, Any, None]]
JSON = b"application/json"
EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
MOST_ID = 128  # characters of a client's request id
_decode = msgspec.json.Decoder().decode


class ClientGoneError(Exception):
    """The client has closed the connection."""


class Exchange:
    """One request and its answer.

    Attributes:
        scope: The ASGI scope.
        id: The client's `X-Request-Id`, or one of ours. It is returned, and is no key of anything.
        started: Whether the answer has begun.
        status: Its status, or 0.
    """

    __slots__ = ("_receive", "_send", "id", "scope", "started", "status")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.started, self.status = False, 0
        given = self.header(b"x-request-id")
        valid = given is not None and 0 < len(given) <= MOST_ID and given.isascii() and given.decode("ascii").isprintable()
        self.id = given.decode("ascii") if given is not None and valid else uuid.uuid4().hex

    def header(self, name: bytes) -> bytes | None:
        """The first header of a name in lower case, or None."""
        return next((value for key, value in self.scope["headers"] if key == name), None)

    async def body(self) -> bytes:
        """The whole body.

        Raises:
            ApiError: It is too long or comes too slowly.
            ClientGoneError: The client has gone.
        """
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and int(length[:20]) > MOST_BODY_BYTES:
            raise too_long()
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    parts.append(message["body"])
                    size += len(message["body"])
                    if size > MOST_BODY_BYTES:
                        raise too_long()
                    if not message["more_body"]:
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_SECONDS:.0f} seconds", headers=(("connection", "close"),)) from None

    async def json(self) -> dict[str, Any]:
        """The body, which must be a JSON object.

        Raises:
            ApiError: It is something else, or nested too deeply.
            ClientGoneError: The client has gone.
        """
        kind = (self.header(b"content-type") or b"").partition(b";")[0].strip().lower()
        if kind != JSON:  # a page of another site can send other types without being asked
            raise ApiError(415, f"the content type must be application/json, not {kind[:100].decode('latin-1')!r}")
        return json_object(await self.body())

    async def respond(self, status: int, body: bytes, *, kind: bytes = JSON, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """Send the whole answer."""
        self.started, self.status = True, status
        head = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), (b"x-request-id", self.id.encode()), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, error: ApiError) -> None:
        """Send an error."""
        await self.respond(error.status, error.body(), headers=tuple((k.encode(), v.encode()) for k, v in error.headers))

    async def disconnected(self) -> None:
        """Wait until the client has gone, or the answer is complete."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def abort(self) -> None:
        """Close the connection without waiting for the client."""
        if (abort := self.scope.get("abort")) is not None:
            abort()

    def events(self, streams: "set[EventStream]") -> "EventStream":
        """Begin a stream of server-sent events."""
        self.started, self.status = True, 200
        return EventStream(self._send, [*EVENTS, (b"x-request-id", self.id.encode())], streams)


class EventStream:
    """An answer in events. `write` returns at once: while the client does not read, `paused` is True and nothing may be written.

    Attributes:
        paused: Whether the client has not read what was written.
        resumed: Called when the client has read it.
        dropped: Called when the client has not read for too long. The answer is then cut off.
    """

    __slots__ = ("_loop", "_send", "_since", "_streams", "dropped", "ended", "paused", "resumed")

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], streams: "set[EventStream]") -> None:
        self._send, self._streams = send, streams
        self.paused = self.ended = False
        self.resumed: Callable[[], None] = _nothing
        self.dropped: Callable[[], None] = _nothing
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        streams.add(self)
        self._drive({"type": "http.response.start", "status": 200, "headers": headers})

    def write(self, data: bytes) -> None:
        """Send events. The stream must be neither paused nor ended."""
        self._drive({"type": "http.response.body", "body": data, "more_body": True})

    def end(self, data: bytes = b"") -> None:
        """Send the last events, and end the answer."""
        self.forget()
        self._drive({"type": "http.response.body", "body": data, "more_body": False})

    def forget(self) -> None:
        """Write nothing more, because the client has gone."""
        self.ended = True
        self._streams.discard(self)

    def tick(self, now: float) -> None:
        """Called every few seconds: keep a silent stream open, and drop a client that does not read."""
        if self.paused:
            if now - self._since > STALL_SECONDS:
                self.forget()
                self.dropped()
        elif now - self._since > PING_SECONDS:
            self.write(b": ping\n\n")

    def _drive(self, message: dict[str, Any]) -> None:
        """Run `send` up to its end. Usually it does not wait, so that no task is needed; if it waits, a task runs the rest."""
        self._since = self._loop.time()
        sending = self._send(message)
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return
        self.paused = True
        self._loop.create_task(self._rest(sending, waits_for))  # the loop keeps it through the future that it waits for

    async def _rest(self, sending: Coroutine[Any, Any, None], waits_for: Any) -> None:
        await _Rest(sending, waits_for)
        self.paused = False
        if not self.ended:
            self.resumed()


class _Rest:
    """What is left of a coroutine that was run up to its first wait."""

    __slots__ = ("_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._coroutine, self._waits_for = coroutine, waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        yield self._waits_for
        yield from self._coroutine.__await__()


def _nothing() -> None:
    pass


def too_long() -> ApiError:
    """The answer to a body that is too long."""
    return ApiError(413, f"a body may have {MOST_BODY_BYTES} bytes", headers=(("connection", "close"),))


def json_object(body: bytes) -> dict[str, Any]:
    """A JSON object of bounded depth.

    Raises:
        ApiError: The body is something else.
    """
    try:
        value = _decode(body)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(value).__name__}")
    left: list[tuple[Any, int]] = [(value, 1)]
    while left:
        one, depth = left.pop()
        if depth > MOST_DEPTH:
            raise ApiError(400, f"the body is nested more than {MOST_DEPTH} levels deep")
        inner = one.values() if isinstance(one, dict) else one
        left += [(other, depth + 1) for other in inner if isinstance(other, dict | list)]
    return value
