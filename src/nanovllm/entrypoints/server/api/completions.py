"""`POST /v1/completions`, OpenAI's interface for plain texts."""

import time
from json.encoder import encode_basestring_ascii as quoted  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

import msgspec
import numpy as np

from nanovllm.entrypoints.server.api.best_of import best, num_candidates, scoring
from nanovllm.entrypoints.server.api.chunk_reuse import Reuse, reuse_of
from nanovllm.entrypoints.server.api.logprobs import (
    Follower,
    TokenForms,
    listed,
    num_top,
    prompt_entries,
    prompt_scores,
    require_listable,
    stop_ids,
)
from nanovllm.entrypoints.server.api.prompts import INT32, SHORT, checked, encoded, kept_tokens, last_tokens, room, usage
from nanovllm.entrypoints.server.api.replies import NOTHING, StreamedReply, StreamedRow, whole, with_stops
from nanovllm.entrypoints.server.app import Server, own_model
from nanovllm.entrypoints.server.constraints import forced, form_of
from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.exchange import Exchange, unique
from nanovllm.entrypoints.server.request_fields import Sampled, read, sampling
from nanovllm.entrypoints.server.row_logprobs import Listed, RowLogprobs
from nanovllm.entrypoints.server.settings import MOST_CHOICES, MOST_LISTED, MOST_ROWS
from nanovllm.entrypoints.server.text_places import TextPlaces
from nanovllm.entrypoints.server.wire import Ended
from nanovllm.tokenizer.stream import TextStream

DEFAULT_TOKENS = 16  # OpenAI's
# Options that change no greedy reply of one token
HARMLESS = frozenset({"temperature", "max_tokens", "logprobs", "seed", "top_p", "top_k", "min_p", "ignore_eos", "skip_special_tokens"})


class CompletionRequest(Sampled, kw_only=True):
    """The body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = DEFAULT_TOKENS
    add_special_tokens: bool | None = None
    echo: bool | None = False
    best_of: int | None = None
    logprobs: int | None = None


async def completions(server: Server, exchange: Exchange) -> None:
    """Answer a request."""
    body = await exchange.json()
    asked = read(body, CompletionRequest)
    exchange.salt(asked.cache_salt)
    top = None if asked.logprobs is None else num_top(asked.logprobs, "logprobs")
    form = form_of(body)
    model, n = own_model(server, asked.model), num_choices(asked.n)
    count = num_candidates(asked.best_of, n, stream=bool(asked.stream))
    named = await _prompts(server, asked, count, "n" if count == n else "best_of")
    prompts = [ids for _, ids in named]
    reuse = await reuse_of(server, exchange, asked, len(prompts) * count)
    lengths = [reuse.num_tokens + len(ids) // INT32.itemsize for ids in prompts]
    most = DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens
    more = await forced(server, form)
    least = 0 if asked.echo else 1
    rooms = [room(server, length, most, name, least=least) for (name, _), length in zip(named, lengths, strict=True)]
    if count > n:
        more = scoring(more)
        require_listable(count * sum(rooms), 0, "best_of")
    if top is not None:
        more["logprobs"] = top
        require_listable(count * (sum(rooms) + (sum(lengths) if asked.echo else 0)), top, "logprobs")
    _require_alone(asked, scored=top is not None, nothing=most == 0)
    made = {longest: sampling(asked, server.generation, longest or 1, **more) for longest in {*rooms}}
    options = [made[longest] for longest in rooms]
    rows = [reuse.parts(ids) for ids in prompts for _ in range(count)]
    params = [seeded(one, i) for one in options for i in range(count)]
    echoes = [_text(server, ids, asked) if asked.echo else "" for ids in prompts]
    scored, ends = [[]] * len(prompts), None if most else [NOTHING] * len(rows)
    if top is not None and asked.echo:
        following = bool(most) and asked.keep is None and all(follows_at_once(one) for one in options)
        each, followers = await prompt_scores(server, exchange, prompts, top, following=following)
        if followers is not None:  # these are the replies
            ends = [_end(server, asked, one) for one in followers for _ in range(count)]
        scored = [prompt_entries(places_of(server, asked), ids, one) for ids, one in zip(prompts, each, strict=True)]
    logprobs = None
    if top is not None:
        ends_with, texts = stop_ids(server, asked), [echo for echo in echoes for _ in range(n)]
        logprobs = [RowLogprobs(places_of(server, asked), ends_with, len(text)) for text in texts]
    forms = TokenForms(server.tokenizer)
    shown_ids = [np.frombuffer(ids, INT32).tolist() for ids in prompts] if asked.return_token_ids else None
    ident, created = f"cmpl-{unique()}", int(time.time())
    if not asked.stream:
        if ends is None:
            ends = await whole(server, exchange, rows, params, asked.priority or 0, space=reuse.space, keep=reuse.keep)
            if keeps_stop(asked):
                ends = with_stops(text_of(server, asked), ends)
        used, ends = summed(lengths, ends), best(ends, count, n)
        choices: list[dict[str, Any]] = [
            {"index": i, "text": echoes[i // n] + end.text, "logprobs": None, "finish_reason": end.finish_reason}
            for i, end in enumerate(ends)
        ]
        if logprobs is not None:
            objects = await listed(forms.completion, logprobs, ends, top or 0, [scored[i // n] for i in range(len(ends))])
            for choice, one in zip(choices, objects, strict=True):
                choice["logprobs"] = one
        if shown_ids is not None:
            for i, end in enumerate(ends):
                choices[i] |= {"prompt_token_ids": shown_ids[i // n], "token_ids": np.frombuffer(end.token_ids, INT32).tolist()}
        answer = {"id": ident, "object": "text_completion", "created": created, "model": model, "choices": choices}
        await exchange.respond(200, msgspec.json.encode({**answer, "usage": used, **reuse.told(ends)}))
        return
    of_prompts = scored if asked.echo and top is not None else None
    frames = CompletionFrames(ident, created, model, echoes, shown_ids, lengths, n, asked, reuse, forms, of_prompts)
    texts = [text_of(server, asked)] * len(rows)
    told, keeps = shown_ids is not None, keeps_stop(asked)
    how: Any = {"tells_ids": told, "keeps_stop": keeps, "logprobs": logprobs, "interval": asked.stream_interval}
    reply = StreamedReply(server, exchange, frames, texts, **how)
    if ends is not None:
        await reply.run_known(ends)
        return
    await reply.run(rows, params, asked.priority or 0, space=reuse.space, keep=reuse.keep)


class CompletionFrames:
    """The events of a stream of `text_completion` objects."""

    def __init__(
        self,
        ident: str,
        created: int,
        model: str,
        echoes: list[str],
        prompt_ids: list[list[int]] | None,
        lengths: list[int],
        n: int,
        asked: Sampled,
        reuse: Reuse,
        forms: TokenForms,
        scored: list[list[Listed]] | None,
    ) -> None:
        self._forms, self._scored = forms, scored
        self._reuse = reuse
        self._before = f'data: {{"id":"{ident}","object":"text_completion","created":{created},"model":{quoted(model)},"choices":['
        self._echoes, self._prompt_ids, self._lengths, self._n = echoes, prompt_ids, lengths, n
        self._usage, self._continuous = asks_usage(asked)
        self._after = ',"usage":null}\n\n' if self._usage else "}\n\n"

    def head(self, rows: int) -> bytes:
        """The prompts, where they were asked for."""
        if not any(self._echoes) and self._prompt_ids is None:
            return b""
        parts = []
        for i in range(rows):
            logprobs = "null" if self._scored is None else self._forms.completion(self._scored[i // self._n])
            ids = "" if self._prompt_ids is None else f',"prompt_token_ids":{self._prompt_ids[i // self._n]},"token_ids":[]'
            parts.append(f"{self._before}{_choice(i, self._echoes[i // self._n], more=ids, logprobs=logprobs)}]{self._end(i, 0)}")
        return "".join(parts).encode()

    def piece(self, row: StreamedRow, text: str) -> bytes:
        """A piece of one row's text."""
        if row.logprobs is None:
            choice = _choice(row.index, text, more=row.told_ids())
        else:
            choice = _choice(row.index, text, more=row.told_ids(), logprobs=self._listed(row.logprobs.take(row.text.num_shown)))
        return f"{self._before}{choice}]{self._end(row.index, row.num_tokens)}".encode()

    def last(self, row: StreamedRow, text: str, ended: Ended) -> bytes:
        """The end of one row."""
        logprobs = "null" if row.logprobs is None else self._listed(row.logprobs.take_all())
        choice = _choice(row.index, text, quoted(ended.finish_reason), row.told_ids(), logprobs)
        return f"{self._before}{choice}]{self._reuse.event(row.index, ended)}{self._end(row.index, ended.num_tokens)}".encode()

    def tail(self, rows: list[StreamedRow]) -> bytes:
        """The usage, if it was asked for."""
        if not self._usage:
            return b""
        ends = [row.ended for row in rows if row.ended is not None]
        return f'{self._before}],"usage":{msgspec.json.encode(summed(self._lengths, ends)).decode()}}}\n\n'.encode()

    def _listed(self, entries: list[Listed]) -> str:
        return self._forms.completion(entries) if entries else "null"

    def _end(self, index: int, count: int) -> str:
        if not self._continuous:
            return self._after
        return f',"usage":{msgspec.json.encode(usage(self._lengths[index // self._n], count, 0)).decode()}}}\n\n'


def _choice(index: int, text: str, reason: str = "null", more: str = "", logprobs: str = "null") -> str:
    return f'{{"index":{index},"text":{quoted(text)},"logprobs":{logprobs},"finish_reason":{reason}{more}}}'


def _require_alone(asked: CompletionRequest, *, scored: bool, nothing: bool) -> None:
    """Refuse chunks where the prompt is scored, or nothing is generated.

    Raises:
        ApiError: The request names chunks.
    """
    if asked.chunks and asked.echo and scored:
        raise ApiError(400, "chunks are not supported with echo and logprobs: give the whole prompt", param="chunks")
    if nothing and (asked.chunks or asked.keep is not None):
        raise ApiError(400, "max_tokens=0 is not supported with chunks or keep", param="max_tokens")


def follows_at_once(options: dict[str, Any]) -> bool:
    """Whether a reply with these options is the most probable token alone."""
    return options.get("temperature") == 0 and options.get("max_tokens") == 1 and options.keys() <= HARMLESS


def _end(server: Server, asked: Sampled, follower: Follower) -> Ended:
    """The end of a reply of one token."""
    stopped = follower.token_id in stop_ids(server, asked)
    token_ids = np.array([follower.token_id], INT32).tobytes()
    text = "" if stopped else _text(server, token_ids, asked)
    return Ended(0, "stop" if stopped else "length", text, 0, token_ids, 1, scored=follower.scored)


def asks_usage(asked: Sampled) -> tuple[bool, bool]:
    """Whether a stream ends with its usage, and whether each event has it."""
    options = asked.stream_options
    usage = options is not None and bool(options.include_usage)
    return usage, usage and options is not None and bool(options.continuous_usage_stats)


def text_of(server: Server, asked: Sampled) -> TextStream:
    """The text of a reply before its first token."""
    stops = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    return TextStream.of(server.tokenizer, stops, asked.skip_special_tokens is not False)


def places_of(server: Server, asked: Sampled) -> TextPlaces:
    """The places of tokens in a text of a request before its first token."""
    return TextPlaces(server.tokenizer, asked.skip_special_tokens is not False)


def keeps_stop(asked: Sampled) -> bool:
    """Whether the stop string that ends a reply stays in its text."""
    return bool(asked.include_stop_str_in_output and asked.stop)


def num_choices(n: int | None) -> int:
    """The number of replies to each prompt.

    Raises:
        ApiError: It is out of bounds.
    """
    count = 1 if n is None else n
    if not 1 <= count <= MOST_CHOICES:
        raise ApiError(400, f"n={count}: must be in [1, {MOST_CHOICES}]", param="n")
    return count


def require_rows(server: Server, count: int, param: str) -> None:
    """Refuse more replies than may wait at the same time: they would be refused however often the client came again.

    Raises:
        ApiError: There are more. It names the field `param`.
    """
    most = server.settings.max_waiting
    if most is not None and count > most:
        raise ApiError(400, f"{param}: {count} replies of one request are more than the {most} that may wait (--max-waiting)", param=param)


def seeded(options: dict[str, Any], choice: int) -> dict[str, Any]:
    """The options of one of several choices, whose seeds differ."""
    return {**options, "seed": (options["seed"] + choice) % (1 << 63)} if choice and "seed" in options else options


def summed(lengths: list[int], ends: list[Ended]) -> dict[str, Any]:
    """The usage of a whole answer. Each prompt counts once."""
    n = len(ends) // len(lengths) or 1
    return usage(sum(lengths), sum(end.num_tokens for end in ends), sum(end.num_cached for end in ends[::n]))


async def _prompts(server: Server, asked: CompletionRequest, n: int, param: str) -> list[tuple[str, bytes]]:
    """Each prompt's place in the request, and its token ids. `n` replies run to each, as the field `param` says."""
    require_rows(server, n, param)
    prompt, listed = asked.prompt, sum(map(len, (asked.logit_bias or (), asked.stop_token_ids or (), asked.bad_words or ())))
    kept = kept_tokens(server, asked, DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens)
    special = asked.add_special_tokens is not False and not asked.chunks
    if isinstance(prompt, str):
        return [("prompt", await encoded(server, prompt, "prompt", add_special_tokens=special, kept=kept))]
    if {*map(type, prompt)} == {int}:
        return [("prompt", last_tokens(checked(server, prompt, "prompt"), kept))]  # pyright: ignore[reportArgumentType]
    if not prompt or len(prompt) > MOST_ROWS:
        raise ApiError(400, f"prompt has {len(prompt)} prompts: it must have 1 to {MOST_ROWS}", param="prompt")
    if len(prompt) * n > MOST_ROWS:
        raise ApiError(400, f"{len(prompt)} prompts with {param}={n} are more than {MOST_ROWS} replies", param=param)
    require_rows(server, len(prompt) * n, "prompt")
    if len(prompt) * n * listed > MOST_LISTED:
        problem = f"{len(prompt)} prompts with {param}={n} and {listed} logit_bias, stop_token_ids and bad_words are too many"
        raise ApiError(400, problem, param="prompt")
    found, options = list[tuple[str, bytes]](), {"add_special_tokens": special, "kept": kept}
    many = sum(len(one) for one in prompt if isinstance(one, str)) > SHORT
    for place, one in enumerate(prompt):
        name = f"prompt[{place}]"
        if isinstance(one, int):
            raise ApiError(400, "prompt mixes token ids with texts or lists", param="prompt")
        ids = checked(server, one, name) if isinstance(one, list) else await encoded(server, one, name, of_many=many, **options)
        found.append((name, last_tokens(ids, kept)))
    return found


def _text(server: Server, ids: bytes, asked: Sampled) -> str:
    return "" if server.tokenizer is None else server.tokenizer.decode(np.frombuffer(ids, INT32), asked.skip_special_tokens is not False)
