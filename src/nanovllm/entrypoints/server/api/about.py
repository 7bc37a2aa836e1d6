"""`/openapi.json` and `/docs`: the server describes itself."""

from collections.abc import Callable
from typing import Any

import msgspec

from nanovllm.entrypoints.server.api.models import package_version
from nanovllm.entrypoints.server.app import Handler, Server
from nanovllm.entrypoints.server.exchange import Exchange
from nanovllm.entrypoints.server.openapi.document import document
from nanovllm.entrypoints.server.openapi.page import POLICY, page

Routes = tuple[tuple[str, tuple[str, ...], Handler], ...]
HTML = b"text/html; charset=utf-8"


class About:
    """The functions of both paths.

    Args:
        routes: Gives all routes, when somebody asks: these paths are among them.
    """

    def __init__(self, routes: Callable[[], Routes]) -> None:
        self._routes = routes

    def _document(self, server: Server) -> dict[str, Any]:
        return document(self._routes(), server.settings.model_name, package_version())

    async def openapi(self, server: Server, exchange: Exchange) -> None:
        """`GET /openapi.json`."""
        await exchange.respond(200, msgspec.json.encode(self._document(server)))

    async def docs(self, server: Server, exchange: Exchange) -> None:
        """`GET /docs`."""
        host = (exchange.header(b"host") or b"").decode("latin-1")
        text = page(self._document(server), f"http://{host}")
        await exchange.respond(200, text.encode(), kind=HTML, headers=(POLICY,))
