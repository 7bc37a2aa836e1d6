"""A conversation whose KV stays from turn to turn."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from nanovllm.chunks.handles import detach, release, truncate
from nanovllm.chunks.thinking import Retain, think_spans, without_thinking
from nanovllm.engine.donation import commit_state, enter, guarded
from nanovllm.engine.requests import capacity, new_sequence, submit_many
from nanovllm.engine.step import step
from nanovllm.entrypoints.process import noted_interrupts
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.models.model import Model
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.request import RequestOutput
from nanovllm.tokenizer.messages import render
from nanovllm.tokenizer.stream import TextStream


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conversation:
    """The messages so far, and a chunk with the KV of what the last turn ran (None before the first).

    `retain` says how an answer is kept without the thinking before it (see `drop`): with `recompute`, the next turn runs it again.
    With `all` the thinking stays in the chunk, though the messages' prompt has none, as long as there is room for it.
    """

    messages: tuple[dict[str, str], ...] = ()
    chunk: Chunk | None = None
    thinking: bool = True
    retain: Retain = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn in figures: prompt tokens, those of them run and reused, tokens of the reply, seconds to the first and of all."""

    prompt: int
    run: int
    reused: int
    reply: int
    first: float
    total: float
    finish_reason: str  # "stop", "length", "stopped" by Ctrl-C, or "error"
    error: str | None = None

    def __str__(self) -> str:
        speed = f", {(self.reply - 1) / (self.total - self.first):.0f} tokens/s" if self.reply > 1 and self.total > self.first else ""
        return (
            f"{self.prompt} prompt tokens: {self.run} run, {self.reused} reused; {self.reply} reply tokens ({self.finish_reason}), "
            f"{self.first:.2f} s to the first{speed}"
        )


def turn(
    model: Model, state: EngineState, asked: Conversation, params: SamplingParams, show: Callable[[str], None]
) -> tuple[EngineState, Conversation, Turn]:
    """The reply to a conversation, which `show` gets piece by piece. Ctrl-C ends it, and so does an error of the engine, which the turn
    then names; what there is of the reply stays in the conversation.

    Raises `InvalidRequestError` for a conversation that cannot be served, before the state changes.
    """
    tokens = np.asarray(render(model.tokenizer, asked.messages, enable_thinking=asked.thinking), np.int32)
    if len(tokens) >= capacity(state):
        raise InvalidRequestError(f"the conversation has {len(tokens)} tokens and the engine holds {capacity(state)}: /reset starts anew")
    new_sequence(model, enter(state), tokens, params)  # for its errors alone: nothing is committed
    stream, before, start = TextStream.of(model.tokenizer, params.stop), state.stats, time.perf_counter()
    token_ids: list[int] = []
    output: RequestOutput | None = None
    error: str | None = None
    with noted_interrupts(every=True) as came:
        # No exception leaves between here and `detach`, or the only live state would be lost with it.
        state, context = _continued(state, asked.chunk, tokens, _hidden(model, asked))
        prompt = sum(map(len, context)) if isinstance(context, tuple) else len(context)
        state, (request,) = submit_many(model, state, [context], [params], keep=True)
        if isinstance(context, tuple):
            state = release(state, context[0])
        first = start
        while output is None and error is None and not came:
            try:
                state, outputs = step(model, state)
            except NanoVLLMError as failure:
                error, outputs = str(failure), []
            for out in outputs:
                first = first if token_ids else time.perf_counter()
                token_ids.extend(out.token_ids)
                output = out.output
                if output is None:
                    stream, piece = stream.push(out.token_ids)
                    show(piece)
        state, chunk = detach(model, state, request)
        after = state.stats
        if chunk is not None and asked.retain in ("shift", "gap"):
            state, chunk = _answer(model, state, chunk, min(len(tokens), len(chunk)), asked.retain)
    if output is not None:
        reply, reason = output.text, output.finish_reason
        show(stream.end(reply))
    else:
        reply = "" if model.tokenizer is None else model.tokenizer.decode(token_ids)
        reason = "stopped" if error is None else "error"
    figures = Turn(
        prompt=prompt,
        run=after.prefill_tokens - before.prefill_tokens,
        reused=after.reused_tokens - before.reused_tokens,
        reply=len(token_ids),
        first=first - start,
        total=time.perf_counter() - start,
        finish_reason=reason,
        error=error,
    )
    return state, replace(asked, messages=(*asked.messages, {"role": "assistant", "content": reply}), chunk=chunk), figures


def _answer(model: Model, state: EngineState, chunk: Chunk, start: int, retain: Retain) -> tuple[EngineState, Chunk]:
    """The conversation's chunk without the think blocks of its last reply, which begins at token `start`.

    As it is where pages are short: the next turn then runs the answer again.
    """
    try:
        with guarded(state) as taken:
            after, kept = without_thinking(model, enter(state), chunk, start, retain, taken)
            return commit_state(after), kept
    except NanoVLLMError:
        return state, chunk


def _hidden(model: Model, asked: Conversation) -> np.ndarray | None:
    """Which tokens of the conversation's chunk are thinking to be kept, where the messages' prompt has none."""
    if asked.chunk is None or asked.retain != "all" or model.tokenizer is None:
        return None
    hidden = np.zeros(len(asked.chunk), bool)
    for begin, end in think_spans(model.tokenizer, asked.chunk.token_ids):
        hidden[begin:end] = True
    return hidden


def _continued(
    state: EngineState, chunk: Chunk | None, tokens: np.ndarray, hidden: np.ndarray | None = None
) -> tuple[EngineState, tuple[Chunk, np.ndarray] | np.ndarray]:
    """The prompt as a context over what the chunk has of it; the chunk goes, a shorter one takes its place where it has other tokens.

    `hidden` tokens of the chunk may stand in the context although the prompt lacks them.
    """
    if chunk is None:
        return state, tokens
    room = capacity(state, chunk)
    heads = [_head(chunk.token_ids, tokens, left_out) for left_out in ([None] if hidden is None else [None, hidden])]
    fitting = [(kept, shared) for kept, shared in heads if kept + len(tokens) - shared < room]
    kept, shared = max(fitting, default=(0, 0))
    if kept == len(chunk):
        return state, (chunk, tokens[shared:])
    if not kept:  # or its gaps leave too few positions
        return release(state, chunk), tokens
    state, head = truncate(state, chunk, kept)
    return release(state, chunk), (head, tokens[shared:])


def _head(token_ids: np.ndarray, tokens: np.ndarray, hidden: np.ndarray | None) -> tuple[int, int]:
    """How much of a chunk can stand before the rest of a prompt, and how many of the prompt's tokens that spares."""
    seen = np.arange(len(token_ids)) if hidden is None else np.flatnonzero(~hidden)
    both = min(len(seen), len(tokens))
    differ = np.flatnonzero(token_ids[seen[:both]] != tokens[:both])
    shared = int(differ[0]) if len(differ) else both
    # No hidden tokens at the end: what follows them may be the prompt's own form of the same.
    return (int(seen[shared - 1]) + 1 if shared else 0), shared
