"""The application: who may call, which function answers which path, and errors as OpenAI's clients know them."""

import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.routing import Match, Route, Router

from nanovllm.entrypoints.server.answer_counts import AnswerCounts
from nanovllm.entrypoints.server.engine_client import EngineClient
from nanovllm.entrypoints.server.errors import ApiError, api_error
from nanovllm.entrypoints.server.exchange import ClientGoneError, EventStream, Exchange, Receive, Scope, Send
from nanovllm.entrypoints.server.serving_tokenizer import ReplyFormats
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.errors import NanoVLLMError
from nanovllm.sampling.params import SamplingParams
from nanovllm.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("nanovllm.server")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
OPEN = frozenset({"/health", "/ping"})  # paths that need no key


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
        if scope["method"] not in self.methods:
            allowed = ", ".join(self.methods)
            raise ApiError(405, f"{scope['method']} is not allowed here: use {allowed}", headers=(("allow", allowed),))
        await self.handler(self.server, exchange)


class App:
    """The ASGI application."""

    def __init__(self, server: Server, routes: Iterable[tuple[str, tuple[str, ...], Handler]]) -> None:
        self.server = server
        self.router = Router([Route(path, Endpoint(server, handler, methods)) for path, methods, handler in routes])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whatever happens."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        scope["exchange"] = exchange
        self.server.num_running += 1
        began = time.perf_counter()
        try:
            self._admit(exchange)
            await self._route(scope, receive, send)
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
            self.server.answers.add(scope.get("route_path"), scope["method"], exchange.status, time.perf_counter() - began)

    async def _fail(self, exchange: Exchange, error: ApiError) -> None:
        if not exchange.started:
            await exchange.fail(error)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        for route in self.router.routes:
            match, child = route.matches(scope)
            if match == Match.FULL:
                scope.update(child)
                scope["route_path"] = route.path  # pyright: ignore[reportAttributeAccessIssue]
                await route.handle(scope, receive, send)
                return
        raise ApiError(404, f"there is nothing at {scope['path'][:200]!r}", code="not_found")

    def _admit(self, exchange: Exchange) -> None:
        """Refuse those who may not call.

        Raises:
            ApiError: With the reason.
        """
        settings, path = self.server.settings, exchange.scope["path"]
        host = (exchange.header(b"host") or b"").decode("latin-1")
        if not host_allowed(host, settings):  # another site's name that resolves to this address (DNS rebinding)
            raise ApiError(403, f"the host {host[:100]!r} is not served here: see --allowed-host", code="host_not_allowed")
        if self.server.draining and path not in OPEN:
            headers = (("connection", "close"), ("retry-after", "1"))
            raise ApiError(503, "the server is shutting down", type="server_error", code="shutting_down", headers=headers)
        if settings.api_keys and path not in OPEN and not key_accepted(exchange, settings.api_keys):
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")


def host_allowed(host: str, settings: Settings) -> bool:
    """Whether a Host header names this server."""
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    name = name.lower().rstrip(".")
    return name in LOOPBACK or "*" in settings.allowed_hosts or name in settings.allowed_hosts or name == settings.host.lower()


def given_digest(exchange: Exchange) -> bytes:
    """The digest of the key that a request brings."""
    given = exchange.header(b"authorization") or b""
    scheme, _, key = given.partition(b" ")
    if scheme.lower() != b"bearer":
        key = exchange.header(b"x-api-key") or b""
    return hashlib.sha256(key.strip()).digest()


def key_accepted(exchange: Exchange, digests: tuple[bytes, ...]) -> bool:
    """Whether a request brings one of the keys. The time that this takes tells nothing of them."""
    digest = given_digest(exchange)
    return any([hmac.compare_digest(digest, other) for other in digests])  # noqa: C419 - all are compared


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
        headers = (("retry-after", "1"),)
        raise ApiError(503, "the engine is starting or has failed", type="unavailable_error", code="engine_unavailable", headers=headers)
    return hello
