"""`/tokenize`, `/detokenize` and `/tokenizer_info`, with the fields of vLLM and those of llama.cpp."""

from typing import Any

import msgspec
import numpy as np

from nanovllm.entrypoints.server.api.chat_parts import prompt_ids
from nanovllm.entrypoints.server.api.prompts import INT32, checked, encoded
from nanovllm.entrypoints.server.app import Server, own_model, require_engine
from nanovllm.entrypoints.server.errors import ApiError, api_error
from nanovllm.entrypoints.server.exchange import Exchange
from nanovllm.entrypoints.server.messages import chat_prompt
from nanovllm.entrypoints.server.request_fields import convert
from nanovllm.errors import InvalidRequestError
from nanovllm.tokenizer.tokenizer import Tokenizer


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `/tokenize`: `prompt`, `content` or, with the fields of a chat request that concern its prompt, `messages`."""

    model: str | None = None
    messages: Any = None
    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[int]


async def tokenize(server: Server, exchange: Exchange) -> None:
    """Answer with the token ids of a text or a conversation."""
    body = await exchange.json()
    asked = convert(body, TokenizeRequest)
    own_model(server, asked.model)
    texts = {"prompt": asked.prompt, "content": asked.content, "messages": asked.messages}
    given = [name for name, value in texts.items() if value is not None]
    if len(given) != 1:
        raise ApiError(400, f"one of prompt, content and messages is needed; there are {len(given)}", param=(given or ["prompt"])[0])
    if asked.messages is not None:
        try:
            found = await prompt_ids(server, chat_prompt(body))
        except InvalidRequestError as error:
            raise api_error(error, "messages") from None
    else:
        special = asked.add_special_tokens is not False if asked.prompt is not None else bool(asked.add_special)
        found = await encoded(server, (asked.prompt or "") + (asked.content or ""), given[0], add_special_tokens=special)
    ids = np.frombuffer(found, INT32).tolist()
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": require_engine(server).max_model_len, "tokens": ids}
    assert server.tokenizer is not None
    if asked.return_token_strs:
        answer["token_strs"] = [server.tokenizer.backend.id_to_token(i) for i in ids]
    if asked.with_pieces:
        answer["tokens"] = [{"id": i, "piece": _piece(server.tokenizer, i)} for i in ids]
    await exchange.respond(200, msgspec.json.encode(answer))


def _piece(tokenizer: Tokenizer, token_id: int) -> str | list[int]:
    """What a token stands for. As in llama.cpp, bytes that are no text are a list."""
    piece = tokenizer.texts[0][token_id]
    if isinstance(piece, str):
        return piece
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return [*piece]


async def detokenize(server: Server, exchange: Exchange) -> None:
    """Answer with the text of token ids."""
    asked = convert(await exchange.json(), DetokenizeRequest)
    if server.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer")
    own_model(server, asked.model)
    ids = np.frombuffer(checked(server, asked.tokens, "tokens") if asked.tokens else b"", INT32)
    text = server.tokenizer.decode(ids, skip_special_tokens=False)
    await exchange.respond(200, msgspec.json.encode({"prompt": text, "content": text}))


async def tokenizer_info(server: Server, exchange: Exchange) -> None:
    """Answer with what lm-eval's remote tokenizer asks for."""
    if server.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer")
    special = server.tokenizer.special_tokens
    answer = {name: special.get(name) for name in ("eos_token", "bos_token", "pad_token", "unk_token")}
    await exchange.respond(200, msgspec.json.encode({**answer, "chat_template": server.tokenizer.templates.get("default")}))
