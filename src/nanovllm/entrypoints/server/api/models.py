"""`/v1/models`, `/health` and `/version`."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import Any

import msgspec

from nanovllm.entrypoints.server.app import Server, own_model, require_engine
from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.exchange import Exchange


def _card(server: Server) -> dict[str, Any]:
    name = server.settings.model_name
    card = {"id": name, "object": "model", "created": server.created, "owned_by": "nanovllm", "root": name, "parent": None}
    return card if server.engine.hello is None else {**card, "max_model_len": server.engine.hello.max_model_len}


async def list_models(server: Server, exchange: Exchange) -> None:
    """`GET /v1/models`."""
    await exchange.respond(200, msgspec.json.encode({"object": "list", "data": [_card(server)]}))


async def get_model(server: Server, exchange: Exchange) -> None:
    """`GET /v1/models/{id}`."""
    own_model(server, exchange.scope["path_params"]["name"])
    await exchange.respond(200, msgspec.json.encode(_card(server)))


async def health(server: Server, exchange: Exchange) -> None:
    """`GET /health`: 200 while requests are taken."""
    if server.draining:
        raise ApiError(503, "the server is shutting down", type="server_error", code="shutting_down")
    require_engine(server)
    await exchange.respond(200, b'{"status":"ok"}')


async def version(server: Server, exchange: Exchange) -> None:
    """`GET /version`."""
    await exchange.respond(200, msgspec.json.encode({"version": package_version()}))


def package_version() -> str:
    """The package's version; "0" in a source tree that is not installed."""
    try:
        return installed("nanovllm")
    except PackageNotFoundError:
        return "0"
