"""`/v1/chunks` and `/v1/saved_chunks`: prompts whose KV stays in memory under a name, and what can be done with them.

POST   /v1/chunks                 {name, text | messages | token_ids, after?, replace?}
GET    /v1/chunks
GET    /v1/chunks/{name}
DELETE /v1/chunks/{name}
POST   /v1/chunks/compose         {names, name, recompute?, replace?}
POST   /v1/chunks/{name}/fork     {to, replace?}
POST   /v1/chunks/{name}/truncate {tokens, to?, replace?}
POST   /v1/chunks/{name}/drop     {spans, mode?, to?, replace?}
POST   /v1/chunks/{name}/save     {}
POST   /v1/chunks/{name}/load     {replace?}
DELETE /v1/chunks/{name}/save
GET    /v1/saved_chunks
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import numpy as np

from nanovllm.entrypoints.server.api.chunk_reuse import namespace, valid, valid_names
from nanovllm.entrypoints.server.api.prompts import INT32, checked, encoded, room, too_long, usage
from nanovllm.entrypoints.server.api.replies import whole
from nanovllm.entrypoints.server.app import Server, require_engine
from nanovllm.entrypoints.server.errors import ApiError, api_error
from nanovllm.entrypoints.server.exchange import Exchange
from nanovllm.entrypoints.server.fields import InvalidParamError
from nanovllm.entrypoints.server.messages import chat_prompt
from nanovllm.entrypoints.server.request_fields import S, convert, require_far
from nanovllm.entrypoints.server.wire import Keep
from nanovllm.errors import ChunkExistsError, ChunkLimitError, InvalidRequestError, UnknownChunkError
from nanovllm.tokenizer.tokenizer import TooManyTokensError

MOST_SPANS = 64
ONE_TOKEN = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True}  # what a request samples that only makes a chunk


class CreateRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/chunks`: one of `text`, `messages` and `token_ids`."""

    name: str
    text: str | None = None
    messages: list[Any] | None = None
    token_ids: list[int] | None = None
    after: str | None = None
    replace: bool | None = None
    tools: Any = None
    chat_template_kwargs: Any = None


class ComposeRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/chunks/compose`."""

    name: str
    names: list[str]
    recompute: int | float | Literal["all"] = 0
    replace: bool | None = None


class ForkRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/chunks/{name}/fork`."""

    to: str
    replace: bool | None = None


class TruncateRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/chunks/{name}/truncate`. Without `to` the chunk itself is replaced."""

    tokens: int
    to: str | None = None
    replace: bool | None = None


class DropRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/chunks/{name}/drop`. Without `to` the chunk itself is replaced."""

    spans: list[tuple[int, int]]
    mode: Literal["recompute", "shift", "gap"] = "recompute"
    to: str | None = None
    replace: bool | None = None


class LoadRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/chunks/{name}/load`."""

    replace: bool | None = None


async def _read(exchange: Exchange, kind: type[S]) -> S:
    """The fields of a request.

    Raises:
        ApiError: A field is wrong, or unknown and similar to a known one.
    """
    values = await exchange.json()
    for name in values.keys() - {*kind.__struct_fields__}:
        require_far(name, kind.__struct_fields__)
    return convert(values, kind)


async def all_chunks(server: Server, exchange: Exchange) -> None:
    """`GET` and `POST /v1/chunks`."""
    if exchange.scope["method"] == "GET":
        await _send(exchange, await server.engine.ask("chunks", space=namespace(server, exchange)))
        return
    asked = await _read(exchange, CreateRequest)
    given, token_ids = await _tokens(server, asked)
    after = [] if asked.after is None else [valid(asked.after, "after")]
    await _make(server, exchange, valid(asked.name), after, token_ids, replaced=bool(asked.replace), given=given)


async def one_chunk(server: Server, exchange: Exchange) -> None:
    """`GET` and `DELETE /v1/chunks/{name}`, and `POST /v1/chunks/compose`."""
    name, space = valid(exchange.scope["path_params"]["name"]), namespace(server, exchange)
    match exchange.scope["method"]:
        case "GET":
            await _send(exchange, await server.engine.ask("chunk", space=space, name=name))
        case "DELETE":
            await server.engine.ask("delete_chunk", space=space, name=name)
            await _send(exchange, {"object": "chunk.deleted", "name": name, "deleted": True})
        case _ if name == "compose":
            await _compose(server, exchange)
        case _:
            raise ApiError(405, "POST is not allowed here: use GET or DELETE", headers=(("allow", "GET, DELETE"),))


async def _compose(server: Server, exchange: Exchange) -> None:
    asked = await _read(exchange, ComposeRequest)
    name, names, space = valid(asked.name), valid_names(asked.names, "names"), namespace(server, exchange)
    with naming("names", "name"):
        token_ids = await server.engine.ask("chunk_token_ids", space=space, names=names)
        if asked.recompute == "all":  # the same as a prefill of all tokens
            await _make(server, exchange, name, [], token_ids, replaced=bool(asked.replace), given="names")
            return
        room(server, len(token_ids) // INT32.itemsize, 1, "names")
        made = await server.engine.ask(
            "compose_chunks", space=space, names=names, to=name, recompute=asked.recompute, replaced=bool(asked.replace),
            namespace=exchange.namespace,
        )  # fmt: skip
    await _send(exchange, made)


async def fork(server: Server, exchange: Exchange) -> None:
    """`POST /v1/chunks/{name}/fork`: a second name for the same KV."""
    asked = await _read(exchange, ForkRequest)
    await _ask(server, exchange, "fork_chunk", to=valid(asked.to, "to"), replaced=bool(asked.replace))


async def truncate(server: Server, exchange: Exchange) -> None:
    """`POST /v1/chunks/{name}/truncate`: the first tokens of a chunk."""
    asked = await _read(exchange, TruncateRequest)
    if abs(asked.tokens) > 1 << 62:
        raise ApiError(400, "tokens is out of range", param="tokens")
    await _ask(server, exchange, "truncate_chunk", tokens=asked.tokens, **_target(exchange, asked.to, replaced=bool(asked.replace)))


async def drop(server: Server, exchange: Exchange) -> None:
    """`POST /v1/chunks/{name}/drop`: a chunk without spans of its tokens."""
    asked = await _read(exchange, DropRequest)
    name, space = valid(exchange.scope["path_params"]["name"]), namespace(server, exchange)
    target = _target(exchange, asked.to, replaced=bool(asked.replace))
    token_ids = np.frombuffer(await server.engine.ask("chunk_token_ids", space=space, names=[name]), INT32)
    stay = np.ones(len(token_ids), bool)
    if not 1 <= len(asked.spans) <= MOST_SPANS:
        raise ApiError(400, f"spans has {len(asked.spans)} spans: it must have 1 to {MOST_SPANS}", param="spans")
    for place, (start, stop) in enumerate(asked.spans):
        if not 0 <= start < stop <= len(token_ids):
            problem = f"spans[{place}] is {[start, stop]}: it must begin before it ends, inside of the chunk's {len(token_ids)} tokens"
            raise ApiError(400, problem, param=f"spans[{place}]")
        stay[start:stop] = False
    if not stay.any():
        raise ApiError(400, "spans select the whole chunk: delete it instead", param="spans")
    if asked.mode == "recompute":  # what stays before the first span is found in the prefix index
        own = token_ids[stay].tobytes()
        await _make(server, exchange, target["to"], [], own, replaced=target["replaced"], given="spans", field="to")
        return
    edges = np.flatnonzero(np.diff(stay, prepend=True, append=True)).reshape(-1, 2).tolist()
    await _ask(server, exchange, "drop_spans", spans=edges, mode=asked.mode, namespace=exchange.namespace, **target)


async def save(server: Server, exchange: Exchange) -> None:
    """`POST` and `DELETE /v1/chunks/{name}/save`: the chunk's file."""
    if exchange.scope["method"] == "DELETE":
        name = valid(exchange.scope["path_params"]["name"])
        await server.engine.ask("delete_saved", space=namespace(server, exchange), name=name)
        await _send(exchange, {"object": "chunk.file.deleted", "name": name, "deleted": True})
        return
    await exchange.json()
    await _ask(server, exchange, "save_chunk")


async def saved(server: Server, exchange: Exchange) -> None:
    """`GET /v1/saved_chunks`: the files of the client's key."""
    await _send(exchange, await server.engine.ask("list_saved", space=namespace(server, exchange)))


async def load(server: Server, exchange: Exchange) -> None:
    """`POST /v1/chunks/{name}/load`: the chunk of a file."""
    replaced = bool((await _read(exchange, LoadRequest)).replace)
    await _ask(server, exchange, "load_chunk", replaced=replaced, namespace=exchange.namespace)


async def _ask(server: Server, exchange: Exchange, function: str, **arguments: Any) -> None:
    name = valid(exchange.scope["path_params"]["name"])
    with naming(None, "to" if "to" in arguments else None):
        made = await server.engine.ask(function, space=namespace(server, exchange), name=name, **arguments)
    await _send(exchange, made)


@contextmanager
def naming(source: str | None, result: str | None) -> Iterator[None]:
    """Tell clients which field is at fault: the one that names a chunk that is not there, or the one that names the result.

    Raises:
        ApiError: As the engine's error.
    """
    try:
        yield
    except UnknownChunkError as error:
        raise api_error(error, source) from None
    except (ChunkExistsError, ChunkLimitError) as error:
        raise api_error(error, result) from None


def _target(exchange: Exchange, to: str | None, *, replaced: bool) -> dict[str, Any]:
    """The name of the result: the chunk's own, if there is no other."""
    if to is None:
        return {"to": valid(exchange.scope["path_params"]["name"]), "replaced": True}
    return {"to": valid(to, "to"), "replaced": replaced}


async def _make(
    server: Server,
    exchange: Exchange,
    name: str,
    after: list[str],
    token_ids: bytes,
    *,
    replaced: bool,
    given: str,
    field: str = "name",
) -> None:
    """Run a prompt, which becomes a chunk. It shares steps with other requests, and ends with the connection.

    Errors name the field that the tokens were `given` by, and the `field` of the chunk's name.
    """
    space = namespace(server, exchange)
    with naming("after", None):
        before = (await server.engine.ask("chunk_reuse", space=space, names=after))["tokens"] if after else 0
    num_tokens = before + len(token_ids) // INT32.itemsize
    room(server, num_tokens, 1, given)
    keep = Keep(space, name, "prompt", replaced)
    (ended,) = await whole(server, exchange, [[*after, token_ids]], [ONE_TOKEN], 0, space=space, keep=keep, field=field)
    await _send(exchange, {**ended.kept, "usage": usage(num_tokens, 0, ended.num_cached)})


async def _tokens(server: Server, asked: CreateRequest) -> tuple[str, bytes]:
    """The field that a chunk's tokens are given by, and the tokens."""
    given = [field for field in ("text", "messages", "token_ids") if getattr(asked, field) is not None]
    if len(given) != 1:
        raise ApiError(400, "give one of text, messages and token_ids", param=given[1] if given else "text")
    if asked.token_ids is not None:
        return "token_ids", checked(server, asked.token_ids, "token_ids")
    if asked.text is not None:
        token_ids = await encoded(server, asked.text, "text", add_special_tokens=asked.after is None)
        if not token_ids:
            raise ApiError(400, "text is empty", param="text")
        return "text", token_ids
    most, body = require_engine(server).max_model_len, {"messages": asked.messages, "tools": asked.tools}
    if asked.chat_template_kwargs is not None:
        body["chat_template_kwargs"] = asked.chat_template_kwargs
    try:
        prompt = chat_prompt({**body, "add_generation_prompt": False})
        ids = await asyncio.to_thread(prompt.token_ids, server.tokenizer, most=most)
    except TooManyTokensError:
        raise too_long(f"the messages have more than {most} tokens", most, "messages") from None
    except InvalidParamError as error:
        raise ApiError(400, str(error), param=error.param) from None
    except InvalidRequestError as error:
        raise api_error(error, "messages") from None
    return "messages", np.asarray(ids, INT32).tobytes()


async def _send(exchange: Exchange, value: Any) -> None:
    await exchange.respond(200, msgspec.json.encode(value))
