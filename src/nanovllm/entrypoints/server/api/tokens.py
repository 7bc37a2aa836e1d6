"""`/tokenize`, `/detokenize` and `/tokenizer_info`, with the fields of vLLM and those of llama.cpp."""

from typing import Any

import msgspec
import numpy as np

from nanovllm.entrypoints.server.api.prompts import INT32, checked, encoded
from nanovllm.entrypoints.server.app import Server, require_engine
from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.exchange import Exchange
from nanovllm.entrypoints.server.request_fields import convert


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `/tokenize`: `prompt` or `content`."""

    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `/detokenize`."""

    tokens: list[int]


async def tokenize(server: Server, exchange: Exchange) -> None:
    """Answer with the token ids of a text."""
    asked = convert(await exchange.json(), TokenizeRequest)
    text = asked.prompt if asked.prompt is not None else asked.content
    if text is None:
        raise ApiError(400, "prompt is missing", param="prompt")
    special = asked.add_special_tokens if asked.prompt is not None else bool(asked.add_special)
    ids = np.frombuffer(await encoded(server, text, "prompt", add_special_tokens=special is not False), INT32).tolist()
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": require_engine(server).max_model_len, "tokens": ids}
    assert server.tokenizer is not None
    if asked.return_token_strs:
        answer["token_strs"] = [server.tokenizer.backend.id_to_token(i) for i in ids]
    if asked.with_pieces:
        answer["tokens"] = [{"id": i, "piece": server.tokenizer.decode([i], skip_special_tokens=False)} for i in ids]
    await exchange.respond(200, msgspec.json.encode(answer))


async def detokenize(server: Server, exchange: Exchange) -> None:
    """Answer with the text of token ids."""
    asked = convert(await exchange.json(), DetokenizeRequest)
    if server.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer")
    ids = np.frombuffer(checked(server, asked.tokens, "tokens"), INT32)
    text = server.tokenizer.decode(ids, skip_special_tokens=False)
    await exchange.respond(200, msgspec.json.encode({"prompt": text, "content": text}))


async def tokenizer_info(server: Server, exchange: Exchange) -> None:
    """Answer with what lm-eval's remote tokenizer asks for."""
    if server.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer")
    special = server.tokenizer.special_tokens
    answer = {name: special.get(name) for name in ("eos_token", "bos_token", "pad_token", "unk_token")}
    await exchange.respond(200, msgspec.json.encode({**answer, "chat_template": server.tokenizer.templates.get("default")}))
