"""One request and its answer, over ASGI: a body that is read within bounds, answers of JSON, and streams of events."""

import asyncio
import gc
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from dataclasses import dataclass
from itertools import islice
from secrets import randbits
from typing import Any

import msgspec

from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.settings import MOST_CONTAINERS, MOST_DEPTH, Limits

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Coroutine[Any, Any, None]]
JSON = b"application/json"
EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
RETRY = (("retry-after", "1"),)
LARGE = 1 << 16  # bytes of a body that is read without collecting garbage
MOST_ID = 128  # characters of a client's request id
SALTED = 1 << 56  # namespaces from here on are of salts, those below it of keys
_decode = msgspec.json.Decoder().decode


class ClientGoneError(Exception):
    """The client has closed the connection."""


@dataclass(slots=True, eq=False)
class Held:
    """How many bytes of bodies a front end holds that are not complete."""

    size: int = 0


class Exchange:
    """One request and its answer.

    Attributes:
        scope: The ASGI scope.
        id: The client's `X-Request-Id`, or one of ours. It is returned, and is no key of anything.
        namespace: Whose KV the request may share: 0 if there are no keys, else the place of its key, from 1; or a number of its salt.
        headers: Headers that every answer gets.
        status: The status of the answer; 0 before its beginning.
        deadline: What ends the function that answers, if its time is bounded.
    """

    __slots__ = ("_held", "_limits", "_receive", "_send", "deadline", "headers", "id", "namespace", "scope", "status")

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits, held: Held) -> None:
        self.scope, self._receive, self._send, self._limits, self._held = scope, receive, send, limits, held
        self.namespace = self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.deadline: asyncio.Timeout | None = None
        given = self.header(b"x-request-id")
        valid = given is not None and 0 < len(given) <= MOST_ID and given.isascii() and given.decode("ascii").isprintable()
        self.id = given.decode("ascii") if given is not None and valid else unique()

    def header(self, name: bytes) -> bytes | None:
        """The first header of a name in lower case, or None."""
        return next((value for key, value in self.scope["headers"] if key == name), None)

    @property
    def started(self) -> bool:
        """Whether the answer has begun."""
        return self.status != 0

    def salt(self, salt: str | None) -> None:
        """Share KV only with requests of the same key that have the same salt, if there is one. Others cannot guess the namespace."""
        if salt is not None:
            digest = hashlib.sha256(b"%d:%b" % (self.namespace, salt.encode())).digest()
            self.namespace = SALTED + int.from_bytes(digest[:7], "big")

    def take_deadline(self) -> float | None:
        """When the answer must be complete, in the event loop's time; None: at any time. From now on the caller sees to it."""
        deadline, self.deadline = self.deadline, None
        if deadline is None or deadline.expired():
            return None
        when = deadline.when()
        deadline.reschedule(None)
        return when

    async def body(self) -> bytes:
        """The whole body.

        Raises:
            ApiError: It is too long or comes too slowly.
            ClientGoneError: The client has gone.
        """
        limits, held = self._limits, self._held
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and int(length[:20]) > limits.body_bytes:
            raise too_long(limits)
        parts, size = [], 0
        try:
            async with asyncio.timeout(limits.body_seconds):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    more = len(message["body"])
                    if size + more > limits.body_bytes:
                        raise too_long(limits)
                    if held.size + more > limits.held_bytes:
                        raise ApiError(503, "too many large requests come in: try again later", type="server_error", headers=RETRY)
                    parts.append(message["body"])
                    size += more
                    held.size += more
                    if not message["more_body"]:
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            message = f"the body did not come within {limits.body_seconds:g} seconds"
            raise ApiError(408, message, headers=(("connection", "close"),)) from None
        finally:
            held.size -= size

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
        """Send the whole answer. It is complete, so no deadline cuts it off while the client reads."""
        self.take_deadline()
        self.status = status
        head = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), (b"x-request-id", self.id.encode())]
        head += [*self.headers, *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, error: ApiError) -> None:
        """Send an error."""
        await self.respond(error.status, error.body(), headers=tuple((k.encode(), v.encode()) for k, v in error.headers))

    async def disconnected(self) -> None:
        """Wait until the client has gone, or the answer is complete."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def events(self, streams: "set[EventStream]") -> "EventStream":
        """Begin a stream of server-sent events."""
        self.status = 200
        headers = [*EVENTS, (b"x-request-id", self.id.encode()), *self.headers]
        return EventStream(self._send, headers, streams, self._limits.ping_seconds)


class EventStream:
    """An answer in events. `write` returns at once: while the client does not read, `paused` is True and nothing may be written.

    Attributes:
        paused: Whether the client has not read what was written.
        resumed: Called when the client has read it.
    """

    __slots__ = ("_loop", "_ping_seconds", "_send", "_since", "_streams", "ended", "paused", "resumed")

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], streams: "set[EventStream]", ping_seconds: float) -> None:
        self._send, self._streams, self._ping_seconds = send, streams, ping_seconds
        self.paused = self.ended = False
        self.resumed: Callable[[], None] = _nothing
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
        """Called every second: keep a silent stream open."""
        if not self.paused and now - self._since > self._ping_seconds:
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


def unique() -> str:
    """An id that nothing else has. The random numbers of the process, which others may have seeded, are left alone."""
    return f"{randbits(128):032x}"


def _nothing() -> None:
    pass


def too_long(limits: Limits) -> ApiError:
    """The answer to a body that is too long."""
    return ApiError(413, f"a body may have {limits.body_bytes} bytes")


def json_object(body: bytes) -> dict[str, Any]:
    """A JSON object of bounded depth and of boundedly many parts.

    No garbage is collected meanwhile: over millions of lists, collections would take six times as long as reading them.

    Raises:
        ApiError: The body is something else.
    """
    if len(body) < LARGE or not gc.isenabled():
        return _json_object(body)
    gc.disable()
    try:
        return _json_object(body)
    finally:
        gc.enable()


def _json_object(body: bytes) -> dict[str, Any]:
    if not body.strip():
        raise ApiError(400, "the body is empty: it must be a JSON object")
    try:
        value = _decode(body)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(value).__name__}")
    if body.count(b"{") + body.count(b"[") <= MOST_DEPTH:
        return value
    left, count = list[tuple[Any, int]]([(value, 1)]), 0
    while left:
        one, depth = left.pop()
        if depth > MOST_DEPTH:
            raise ApiError(400, f"the body is nested more than {MOST_DEPTH} levels deep")
        count += 1
        inner = one.values() if isinstance(one, dict) else one
        left.extend(islice(((other, depth + 1) for other in inner if isinstance(other, dict | list)), MOST_CONTAINERS + 1))
        if count + len(left) > MOST_CONTAINERS:
            raise ApiError(400, f"the body has more than {MOST_CONTAINERS} lists and objects")
    return value
