"""`GET /metrics`: the figures of the engine and of all front ends, as Prometheus reads them."""

from typing import Any

from nanovllm.entrypoints.server.app import Server, require_engine
from nanovllm.entrypoints.server.exchange import Exchange
from nanovllm.entrypoints.server.metrics_text import CONTENT_TYPE, exposition


async def metrics(server: Server, exchange: Exchange) -> None:
    """Answer with all metrics. Front ends tell the engine what they have answered, so every one of them gives the same answer."""
    require_engine(server)
    figures: dict[str, Any] = await server.engine.ask("measured", http=server.answers.take())
    settings = server.settings
    text = exposition(figures, names=settings.metrics_names, model_name=settings.model_name)
    await exchange.respond(200, text, kind=CONTENT_TYPE)
