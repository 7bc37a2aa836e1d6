"""`GET /v1/memory`: the pages of KV memory by owner, as a map and as the tree of shared prefixes."""

import msgspec

from nanovllm.entrypoints.server.api.chunk_reuse import namespace
from nanovllm.entrypoints.server.app import Server, require_engine
from nanovllm.entrypoints.server.exchange import Exchange


async def memory(server: Server, exchange: Exchange) -> None:
    """Answer with what the client's key may see: its own chunks and requests by name, and the pages of all others as counts."""
    require_engine(server)
    asked = {"space": namespace(server, exchange), "namespace": exchange.namespace, "everything": not server.settings.api_keys}
    await exchange.respond(200, msgspec.json.encode(await server.engine.ask("memory", **asked)))
