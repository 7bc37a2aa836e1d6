"""Log-probabilities in answers: how many, those of prompts, and OpenAI's objects."""

import asyncio
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from json.encoder import encode_basestring_ascii as quoted  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any, NamedTuple

import msgspec
import numpy as np

from nanovllm.entrypoints.server.api.prompts import INT32
from nanovllm.entrypoints.server.app import Server, require_engine
from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.exchange import ClientGoneError, Exchange
from nanovllm.entrypoints.server.request_fields import Sampled
from nanovllm.entrypoints.server.row_logprobs import Listed, RowLogprobs
from nanovllm.entrypoints.server.settings import MOST_LOGPROBS
from nanovllm.entrypoints.server.text_places import TextPlaces
from nanovllm.entrypoints.server.wire import Ended, Scored
from nanovllm.sampling.params import MAX_LOGPROBS
from nanovllm.tokenizer.tokenizer import Tokenizer

LEAST = -9999.0  # what OpenAI writes for a token that is very improbable. JSON has no infinity
MOST_AT_ONCE = 2048  # tokens of prompts that are scored between two steps, unless one prompt has more
MANY = 20_000  # log-probabilities whose JSON is made in a thread


def num_top(asked: int, param: str) -> int:
    """How many of the most probable tokens a request asks for in the place of each token.

    Raises:
        ApiError: They are too many, or less than none.
    """
    if not 0 <= asked <= MAX_LOGPROBS:
        raise ApiError(400, f"{param}={asked}: must be in [0, {MAX_LOGPROBS}]", param=param)
    return asked


def require_listable(num_tokens: int, top: int, param: str) -> None:
    """Refuse a request whose answer would list too much.

    Args:
        num_tokens: The most tokens that the answer may list.
        top: How many log-probabilities each has besides its own.
        param: The field of the request that errors name.

    Raises:
        ApiError: It would.
    """
    if num_tokens * (1 + top) > MOST_LOGPROBS:
        problem = f"up to {num_tokens} tokens with {1 + top} log-probabilities each are more than {MOST_LOGPROBS}: ask for fewer tokens"
        raise ApiError(400, problem, param=param)


def stop_ids(server: Server, asked: Sampled) -> frozenset[int]:
    """The tokens that end a reply."""
    return frozenset((*(() if asked.ignore_eos else require_engine(server).end_ids), *(asked.stop_token_ids or ())))


class Follower(NamedTuple):
    """The token that follows a prompt in a greedy reply, and its log-probabilities."""

    token_id: int
    scored: Scored


async def prompt_scores(
    server: Server, exchange: Exchange, prompts: Seq[bytes], top: int, *, following: bool = False
) -> tuple[list[Scored | None], list[Follower] | None]:
    """Score the tokens of prompts but their first, few prompts at a time, so that other requests go on meanwhile.

    Args:
        server: Its engine scores.
        exchange: The request.
        prompts: Their int32 token ids.
        top: How many of the most probable tokens are reported in the place of each token.
        following: Whether the token that follows each prompt is asked for.

    Returns:
        The log-probabilities of each prompt, or None for a prompt of one token that is not scored. The followers, if they were asked for
        and are certain.

    Raises:
        ClientGoneError: The client has gone.
        NanoVLLMError: The engine fails, or has no room.
    """
    found, followers, name = dict[int, Scored](), dict[int, Follower](), "score_and_follow" if following else "score_prompts"
    left = [i for i, ids in enumerate(prompts) if following or len(ids) > INT32.itemsize]
    gone = asyncio.ensure_future(exchange.disconnected())
    try:
        while left:
            count, size = 0, 0
            while count < len(left) and (not count or size + len(prompts[left[count]]) <= MOST_AT_ONCE * INT32.itemsize):
                size += len(prompts[left[count]])
                count += 1
            asked, left = left[:count], left[count:]
            each = await server.engine.ask(name, prompts=[prompts[i] for i in asked], top=top, namespace=exchange.namespace)
            if following:
                followers.update(zip(asked, (Follower(token_id, Scored(*own)) for _, token_id, own in each), strict=True))
                each = [one for one, _, _ in each]
            found.update(zip(asked, (Scored(*one) for one in each), strict=True))
            if gone.done():
                raise ClientGoneError
    finally:
        gone.cancel()
    certain = following and all(follower.token_id >= 0 for follower in followers.values())
    return [found.get(i) for i in range(len(prompts))], [followers[i] for i in range(len(prompts))] if certain else None


def prompt_entries(places: TextPlaces, ids: bytes, scored: Scored | None) -> list[Listed]:
    """The tokens of a prompt. The first has no log-probability."""
    first, *rest = np.frombuffer(ids, INT32).tolist()
    entry, row = Listed(first, places.push(first), None, []), RowLogprobs(places)
    row.push(rest)
    row.add(scored)
    return [entry, *row.take_all()]


async def listed(
    form: Callable[[list[Listed]], str], rows: Seq[RowLogprobs], ends: Seq[Ended], top: int, before: Seq[list[Listed]] | None = None
) -> list[msgspec.Raw]:
    """The log-probabilities of whole replies.

    Args:
        form: Makes the object of one reply.
        rows: The tokens of each reply are added to these.
        ends: The replies.
        top: How many log-probabilities a token has besides its own.
        before: The tokens of each reply's prompt, if they are listed too.
    """
    prompts = [[]] * len(ends) if before is None else before

    def make() -> list[msgspec.Raw]:
        found = list[msgspec.Raw]()
        for row, ended, prompt in zip(rows, ends, prompts, strict=True):
            row.end(ended)
            found.append(msgspec.Raw(form([*prompt, *row.take_all()])))
        return found

    count = sum(ended.num_tokens for ended in ends) + sum(map(len, prompts))
    return await asyncio.to_thread(make) if count * (1 + top) > MANY else make()


class TokenForms:
    """The objects of one answer. Each token is spelled once.

    Args:
        tokenizer: Spells tokens. None: their ids are told.
    """

    __slots__ = ("_named", "_spelled", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._named, self._spelled = dict[int, str](), dict[int, str]()

    def completion(self, entries: Iterable[Listed]) -> str:
        """The `logprobs` of a completion. `top_logprobs` includes the token itself; of tokens with one text it has the most probable."""
        entries, named = [*entries], self._name
        tokens, values, tops = list[str](), list[str](), list[str]()
        for entry in entries:
            name = named(entry.token_id)
            tokens.append(name)
            if entry.logprob is None:
                values.append("null")
                tops.append("null")
                continue
            value, top = _number(entry.logprob), dict[str, str]()
            for token_id, other in entry.top:
                top.setdefault(named(token_id), _number(other))
            top.setdefault(name, value)
            values.append(value)
            tops.append("{" + ",".join([f"{key}:{other}" for key, other in top.items()]) + "}")
        places = ",".join([str(entry.place) for entry in entries])
        lists = f'"token_logprobs":[{",".join(values)}],"top_logprobs":[{",".join(tops)}]'
        return f'{{"tokens":[{",".join(tokens)}],{lists},"text_offset":[{places}]}}'

    def chat(self, entries: Iterable[Listed]) -> str:
        """The `logprobs` of a choice of a chat completion."""
        return f'{{"content":[{",".join(self.each(entries))}],"refusal":null}}'

    def each(self, entries: Iterable[Listed]) -> list[str]:
        """The object of each token, in chats and in responses."""
        content, spelled = list[str](), self._spell
        for entry in entries:
            top = [f'{{{spelled(token_id)},"logprob":{_number(value)}}}' for token_id, value in entry.top]
            own = LEAST if entry.logprob is None else entry.logprob
            content.append(f'{{{spelled(entry.token_id)},"logprob":{_number(own)},"top_logprobs":[{",".join(top)}]}}')
        return content

    def _name(self, token_id: int) -> str:
        """The text of a token as JSON. Bytes that are no text are written as OpenAI writes them, so that different tokens differ."""
        if (name := self._named.get(token_id)) is None:
            data = self._bytes(token_id)
            try:
                name = quoted(data.decode())
            except UnicodeDecodeError:
                name = quoted("bytes:" + "".join([f"\\x{byte:02x}" for byte in data]))
            self._named[token_id] = name
        return name

    def _spell(self, token_id: int) -> str:
        """The fields `token` and `bytes` of a token."""
        if (fields := self._spelled.get(token_id)) is None:
            data = self._bytes(token_id)
            fields = f'"token":{quoted(data.decode(errors="replace"))},"bytes":[{",".join(map(str, data))}]'
            self._spelled[token_id] = fields
        return fields

    def _bytes(self, token_id: int) -> bytes:
        if self._tokenizer is None:
            return b"token_id:%d" % token_id
        texts = self._tokenizer.texts[0]
        text: Any = texts[token_id] if texts.spelling != "other" else self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text if isinstance(text, bytes) else text.encode()


def _number(value: float) -> str:
    return repr(value if value > LEAST else LEAST)
