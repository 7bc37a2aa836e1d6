"""The fields `chunks` and `keep` of requests for replies: chunks before the prompt, and a chunk of prompt and reply."""

import re
import reprlib
from dataclasses import dataclass
from typing import Any

import msgspec

from nanovllm.entrypoints.server.admission import given_digest
from nanovllm.entrypoints.server.api.prompts import too_long
from nanovllm.entrypoints.server.app import Server, require_engine
from nanovllm.entrypoints.server.errors import ApiError, api_error
from nanovllm.entrypoints.server.exchange import Exchange
from nanovllm.entrypoints.server.request_fields import Sampled
from nanovllm.entrypoints.server.wire import Ended, Keep
from nanovllm.errors import UnknownChunkError

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MOST_PARTS = 64  # chunks in a row
CUT_SHORT = "chunks left no page of KV memory for the rest: delete chunks that are not needed (DELETE /v1/chunks/NAME), and ask again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """What a request says of chunks.

    Attributes:
        space: The namespace of the client's chunks.
        names: The chunks before the prompt.
        num_tokens: How many tokens they have.
        exact: Whether their KV is that of a whole prefill. Several chunks in a row never are.
        keep: What becomes a chunk when the reply ends.
    """

    space: str = ""
    names: tuple[str, ...] = ()
    num_tokens: int = 0
    exact: bool = True
    keep: Keep | None = None

    def parts(self, token_ids: bytes) -> list[bytes | str]:
        """The parts of a prompt that ends with these tokens."""
        return [*self.names, *([token_ids] if token_ids else [])]

    def told(self, ends: list[Ended], first: int = 0) -> dict[str, Any]:
        """The field `nanovllm` of the answer; empty if there is nothing to say. The ends are those of the choices from `first` on."""
        value: dict[str, Any] = {}
        if self.names:
            value |= {"chunks": list(self.names), "exact": self.exact}
        if self.keep is not None and ends:
            kept = ends[0].kept or {"error": "the reply failed"}
            value |= {"keep_error": kept["error"]} if "error" in kept else {"kept": kept}
        if short := [first + place for place, ended in enumerate(ends) if ended.out_of_pages]:
            value["cut_short"] = {"choices": short, "message": CUT_SHORT}
        return {"nanovllm": value} if value else {}

    def event(self, index: int, ended: Ended) -> str:
        """The same as JSON, for the last event of the choice `index`."""
        told = msgspec.json.encode(self.told([ended], index))[1:-1].decode()
        return f",{told}" if told else ""


def namespace(server: Server, exchange: Exchange) -> str:
    """The namespace of a client's chunks: the digest of its key; "" on a server without keys."""
    return given_digest(exchange).hex() if server.settings.api_keys else ""


def valid(name: Any, param: str = "name") -> str:
    """The name of a chunk.

    Raises:
        ApiError: It cannot be one.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ApiError(400, f"{param} is {reprlib.repr(name)}: names of chunks have 1 to 64 of the characters A-Z a-z 0-9 _ -", param=param)
    return name


def valid_names(names: list[str], param: str = "chunks") -> list[str]:
    """The names of chunks in a row.

    Raises:
        ApiError: One cannot be a name, or there are none or too many.
    """
    if not 1 <= len(names) <= MOST_PARTS:
        raise ApiError(400, f"{param} has {len(names)} names: it must have 1 to {MOST_PARTS}", param=param)
    return [valid(name, f"{param}[{place}]") for place, name in enumerate(names)]


async def reuse_of(server: Server, exchange: Exchange, asked: Sampled, num_rows: int) -> Reuse:
    """What a request says of chunks.

    Args:
        server: The server.
        exchange: The request.
        asked: Its fields.
        num_rows: How many replies it asks for.

    Raises:
        ApiError: A name is invalid, there is no such chunk, the chunks are too long, or `keep` is given for several replies.
    """
    if not asked.chunks and asked.keep is None:
        return Reuse()
    space, keep = namespace(server, exchange), None
    if asked.keep is not None:
        if num_rows != 1:
            raise ApiError(400, f"keep is for one reply, not for {num_rows}", param="keep")
        what = "all" if asked.keep_thinking else "reply"
        keep = Keep(space, valid(asked.keep, "keep"), what, bool(asked.keep_replace))
    if not asked.chunks:
        return Reuse(space=space, keep=keep)
    names = valid_names(asked.chunks)
    try:
        found = await server.engine.ask("chunk_reuse", space=space, names=names)
    except UnknownChunkError as error:
        raise api_error(error, "chunks") from None
    if found["tokens"] >= (most := require_engine(server).max_model_len):
        raise too_long(f"the chunks have {found['tokens']} tokens", most, "chunks")
    return Reuse(space=space, names=tuple(names), num_tokens=found["tokens"], exact=found["exact"], keep=keep)
