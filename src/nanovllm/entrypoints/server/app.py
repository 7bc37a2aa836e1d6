"""The application: which function answers which path, and errors as OpenAI's clients know them."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.routing import Match, Route, Router

from nanovllm.entrypoints.server.admission import admit, cors_headers, preflight
from nanovllm.entrypoints.server.answer_counts import AnswerCounts
from nanovllm.entrypoints.server.engine_client import EngineClient
from nanovllm.entrypoints.server.errors import ApiError, api_error, too_late
from nanovllm.entrypoints.server.exchange import RETRY, ClientGoneError, EventStream, Exchange, Held, Receive, Scope, Send
from nanovllm.entrypoints.server.serving_tokenizer import ReplyFormats
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.errors import NanoVLLMError
from nanovllm.sampling.params import SamplingParams
from nanovllm.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("nanovllm.server")
access = logging.getLogger("nanovllm.access")


@dataclass(slots=True, eq=False)
class Server:
    """What the functions behind the paths share, in one process with one event loop.

    Attributes:
        settings: The operator's choices.
        engine: The connection to the engine.
        tokenizer: The model's tokenizer, or None.
        generation: The model's own sampling options.
        formats: How replies are read.
        draining: Whether the server ends, and takes no more requests.
        streams: The open streams of events.
        created: When the server started, in Unix time.
        answers: What was answered since the engine was told.
    """

    settings: Settings
    engine: EngineClient
    tokenizer: Tokenizer | None
    generation: SamplingParams
    formats: ReplyFormats = field(default_factory=ReplyFormats)
    draining: bool = False
    streams: set[EventStream] = field(default_factory=set)
    created: int = field(default_factory=lambda: int(time.time()))
    answers: AnswerCounts = field(default_factory=AnswerCounts)
    num_running: int = 0  # requests that are being answered


Handler = Callable[[Server, Exchange], Awaitable[None]]


class Endpoint:
    """One function behind one path, as an ASGI application."""

    def __init__(self, server: Server, handler: Handler, methods: tuple[str, ...]) -> None:
        self.server, self.handler, self.methods = server, handler, methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        exchange: Exchange = scope["exchange"]
        if scope["method"] not in self.methods and not (scope["method"] == "HEAD" and "GET" in self.methods):
            allowed = ", ".join(self.methods)
            raise ApiError(405, f"{scope['method']} is not allowed here: use {allowed}", headers=(("allow", allowed),))
        await self.handler(self.server, exchange)


class App:
    """The ASGI application."""

    def __init__(self, server: Server, routes: Iterable[tuple[str, tuple[str, ...], Handler]]) -> None:
        self.server, self._held = server, Held()
        self.router = Router([Route(path, Endpoint(server, handler, methods)) for path, methods, handler in routes])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whatever happens."""
        if scope["type"] != "http":
            return
        settings, began = self.server.settings, time.perf_counter()
        exchange = Exchange(scope, receive, send, settings.limits, self._held)
        exchange.headers += cors_headers(exchange, settings)
        scope["exchange"] = exchange
        self.server.num_running += 1
        began = time.perf_counter()
        try:
            if (allowed := preflight(exchange)) is not None:
                await exchange.respond(200, b"", kind=b"text/plain", headers=tuple(allowed))
                return
            admit(exchange, settings, draining=self.server.draining)
            await self._within_time(exchange, receive, send)
        except ClientGoneError:
            pass
        except ApiError as error:
            await self._fail(exchange, error)
        except NanoVLLMError as error:
            await self._fail(exchange, api_error(error))
        except Exception:
            log.exception("an error of the server itself, in request %r", exchange.id)
            await self._fail(exchange, ApiError(500, "an error of the server itself", type="server_error", code="internal_error"))
        finally:
            self.server.num_running -= 1
            seconds = time.perf_counter() - began
            self.server.answers.add(scope.get("route_path"), scope["method"], exchange.status, seconds)
            if settings.access_log:
                client, path, answered = (scope["client"] or "-")[0], scope["path"][:200], exchange.status or "gone"
                access.info("%s %s %r %s %.0f ms %r", client, scope["method"], path, answered, seconds * 1e3, exchange.id)

    async def _fail(self, exchange: Exchange, error: ApiError) -> None:
        if not exchange.started:
            await exchange.fail(error)

    async def _within_time(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        """Answer a request, or end it when it has taken as long as it may."""
        seconds = self.server.settings.request_timeout
        async with asyncio.timeout(seconds) as deadline:
            exchange.deadline = deadline
            try:
                await self._route(exchange.scope, receive, send)
            except asyncio.CancelledError:
                if deadline.expired():
                    raise too_late(seconds) from None
                raise
            finally:
                exchange.deadline = None

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        for route in self.router.routes:
            match, child = route.matches(scope)
            if match == Match.FULL:
                scope.update(child)
                scope["route_path"] = route.path  # pyright: ignore[reportAttributeAccessIssue]
                await route.handle(scope, receive, send)
                return
        raise ApiError(404, f"there is nothing at {scope['path'][:200]!r}", code="not_found")


def own_model(server: Server, name: str | None) -> str:
    """The model's name.

    Raises:
        ApiError: The request names another model.
    """
    settings = server.settings
    if name in (None, "", settings.model_name) or settings.any_model_name:
        return settings.model_name
    raise ApiError(
        404, f"the model {name[:200]!r} is not here; this server has {settings.model_name!r}", param="model", code="model_not_found"
    )


def require_engine(server: Server) -> Any:
    """What the engine said of itself.

    Raises:
        ApiError: It is not there.
    """
    if (hello := server.engine.hello) is None:
        raise ApiError(503, "the engine is starting or has failed", type="unavailable_error", code="engine_unavailable", headers=RETRY)
    return hello
