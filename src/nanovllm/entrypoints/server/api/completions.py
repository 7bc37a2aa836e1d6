"""`POST /v1/completions`, OpenAI's interface for plain texts."""

import time
import uuid
from itertools import chain
from json.encoder import encode_basestring_ascii as quoted  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

import msgspec
import numpy as np

from nanovllm.entrypoints.server.api.prompts import INT32, SHORT, checked, encoded, room, usage
from nanovllm.entrypoints.server.api.replies import StreamedReply, StreamedRow, whole
from nanovllm.entrypoints.server.app import Server, own_model
from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.exchange import Exchange
from nanovllm.entrypoints.server.request_fields import Sampled, read, sampling
from nanovllm.entrypoints.server.settings import MOST_CHOICES, MOST_LISTED, MOST_ROWS
from nanovllm.entrypoints.server.wire import Ended
from nanovllm.tokenizer.stream import TextStream

DEFAULT_TOKENS = 16  # OpenAI's


class CompletionRequest(Sampled, kw_only=True):
    """The body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = DEFAULT_TOKENS
    echo: bool | None = False
    best_of: int | None = None
    logprobs: int | None = None


async def completions(server: Server, exchange: Exchange) -> None:
    """Answer a request."""
    asked = read(await exchange.json(), CompletionRequest)
    model, n = own_model(server, asked.model), num_choices(asked.n)
    if asked.best_of not in (None, n):
        raise ApiError(400, f"best_of={asked.best_of}: only the value of n ({n}) is supported", param="best_of")
    prompts = await _prompts(server, asked, n)
    lengths = [len(ids) // INT32.itemsize for ids in prompts]
    rooms = [room(server, length, asked.max_tokens or DEFAULT_TOKENS, "prompt") for length in lengths]
    made = {most: sampling(asked, server.generation, most) for most in {*rooms}}
    options = [made[most] for most in rooms]
    rows = [[ids] for ids in prompts for _ in range(n)]
    params = [seeded(one, i) for one in options for i in range(n)]
    echoes = [_text(server, ids) if asked.echo else "" for ids in prompts]
    ident, created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
    if not asked.stream:
        ends = await whole(server, exchange, rows, params, asked.priority or 0)
        choices = [
            {"index": i, "text": echoes[i // n] + end.text, "logprobs": None, "finish_reason": end.finish_reason}
            for i, end in enumerate(ends)
        ]
        answer = {"id": ident, "object": "text_completion", "created": created, "model": model, "choices": choices}
        await exchange.respond(200, msgspec.json.encode({**answer, "usage": summed(lengths, ends)}))
        return
    stops = tuple(chain.from_iterable([[asked.stop] if isinstance(asked.stop, str) else asked.stop or ()]))
    frames = CompletionFrames(ident, created, model, echoes, lengths, n, asked)
    texts = [TextStream.of(server.tokenizer, stops) for _ in rows]
    await StreamedReply(server, exchange, frames, texts).run(rows, params, asked.priority or 0)


class CompletionFrames:
    """The events of a stream of `text_completion` objects."""

    def __init__(self, ident: str, created: int, model: str, echoes: list[str], lengths: list[int], n: int, asked: Sampled) -> None:
        self._before = f'data: {{"id":"{ident}","object":"text_completion","created":{created},"model":{quoted(model)},"choices":['
        self._echoes, self._lengths, self._n = echoes, lengths, n
        options = asked.stream_options
        self._usage = options is not None and options.include_usage
        self._continuous = options is not None and options.continuous_usage_stats
        self._after = ',"usage":null}\n\n' if self._usage else "}\n\n"

    def head(self, rows: int) -> bytes:
        """The prompts, where they were asked for."""
        if not any(self._echoes):
            return b""
        texts = [(i, self._echoes[i // self._n]) for i in range(rows)]
        return "".join([f"{self._before}{_choice(i, text)}]{self._after}" for i, text in texts]).encode()

    def piece(self, row: StreamedRow, text: str) -> bytes:
        """A piece of one row's text."""
        return f"{self._before}{_choice(row.index, text)}]{self._end(row, None)}".encode()

    def last(self, row: StreamedRow, text: str, ended: Ended) -> bytes:
        """The end of one row."""
        return f"{self._before}{_choice(row.index, text, quoted(ended.finish_reason))}]{self._end(row, ended)}".encode()

    def tail(self, rows: list[StreamedRow]) -> bytes:
        """The usage, if it was asked for."""
        if not self._usage:
            return b""
        ends = [row.ended for row in rows if row.ended is not None]
        return f'{self._before}],"usage":{msgspec.json.encode(summed(self._lengths, ends)).decode()}}}\n\n'.encode()

    def _end(self, row: StreamedRow, ended: Ended | None) -> str:
        if not self._continuous:
            return self._after
        count = row.num_tokens if ended is None else ended.num_tokens
        return f',"usage":{msgspec.json.encode(usage(self._lengths[row.index // self._n], count, 0)).decode()}}}\n\n'


def _choice(index: int, text: str, reason: str = "null") -> str:
    return f'{{"index":{index},"text":{quoted(text)},"logprobs":null,"finish_reason":{reason}}}'


def num_choices(n: int | None) -> int:
    """The number of replies to each prompt.

    Raises:
        ApiError: It is out of bounds.
    """
    count = 1 if n is None else n
    if not 1 <= count <= MOST_CHOICES:
        raise ApiError(400, f"n={count}: must be in [1, {MOST_CHOICES}]", param="n")
    return count


def seeded(options: dict[str, Any], choice: int) -> dict[str, Any]:
    """The options of one of several choices, whose seeds differ."""
    return {**options, "seed": (options["seed"] + choice) % (1 << 63)} if choice and "seed" in options else options


def summed(lengths: list[int], ends: list[Ended]) -> dict[str, Any]:
    """The usage of a whole answer. Each prompt counts once."""
    n = len(ends) // len(lengths) or 1
    return usage(sum(lengths), sum(end.num_tokens for end in ends), sum(end.num_cached for end in ends[::n]))


async def _prompts(server: Server, asked: CompletionRequest, n: int) -> list[bytes]:
    prompt, listed = asked.prompt, len(asked.logit_bias or ()) + len(asked.stop_token_ids or ())
    if isinstance(prompt, str):
        return [await encoded(server, prompt, "prompt")]
    if prompt and all(isinstance(one, int) for one in prompt):
        return [checked(server, prompt, "prompt")]  # pyright: ignore[reportArgumentType]
    if not prompt or len(prompt) > MOST_ROWS:
        raise ApiError(400, f"prompt has {len(prompt)} prompts: it must have 1 to {MOST_ROWS}", param="prompt")
    if len(prompt) * n > MOST_ROWS:
        raise ApiError(400, f"{len(prompt)} prompts with n={n} are more than {MOST_ROWS} replies", param="n")
    if len(prompt) * n * listed > MOST_LISTED:
        raise ApiError(400, f"{len(prompt)} prompts with n={n} and {listed} logit_bias and stop_token_ids are too many", param="prompt")
    found, many = list[bytes](), sum(len(one) for one in prompt if isinstance(one, str)) > SHORT
    for place, one in enumerate(prompt):
        name = f"prompt[{place}]"
        if isinstance(one, int):
            raise ApiError(400, "prompt mixes token ids with texts or lists", param="prompt")
        found.append(checked(server, one, name) if isinstance(one, list) else await encoded(server, one, name, of_many=many))
    return found


def _text(server: Server, ids: bytes) -> str:
    return "" if server.tokenizer is None else server.tokenizer.decode(np.frombuffer(ids, INT32))
