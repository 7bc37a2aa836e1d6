"""A conversation whose KV is kept from turn to turn."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from nanovllm.chunks.handles import detach, release, truncate
from nanovllm.chunks.thinking import Retain, think_spans, without_thinking
from nanovllm.engine.donation import commit_state, enter, guarded, require_live
from nanovllm.engine.mirrored import mirrored
from nanovllm.engine.requests import capacity, new_sequence, submit_many
from nanovllm.engine.resident import resident
from nanovllm.engine.step import step
from nanovllm.entrypoints.process import noted_interrupts
from nanovllm.errors import InvalidRequestError, NanoVLLMError, OutOfPagesError
from nanovllm.models.model import Model
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.request import RequestOutput
from nanovllm.tokenizer.messages import render
from nanovllm.tokenizer.stream import TextStream


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conversation:
    """The messages so far, and a chunk with the KV of the last turn.

    Attributes:
        messages: The messages, each with a role and its content.
        chunk: The KV of the last turn; None before the first.
        thinking: Whether the chat template asks for think blocks.
        retain: How think blocks are removed from the chunk, as a mode of `drop`. With "recompute" the next turn runs the answer again. With
            "all" the think blocks stay in the chunk, although the next prompt lacks them, while there is room.
    """

    messages: tuple[dict[str, str], ...] = ()
    chunk: Chunk | None = None
    thinking: bool = True
    retain: Retain = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The figures of one turn.

    Attributes:
        prompt: Prompt tokens.
        run: Prompt tokens that ran.
        reused: Prompt tokens whose KV was reused.
        reply: Tokens of the reply.
        first: Seconds to the first token.
        total: Seconds of the whole turn.
        finish_reason: "stop", "length", "stopped" (by Ctrl-C) or "error".
        error: The message of an engine error, or None.
    """

    prompt: int
    run: int
    reused: int
    reply: int
    first: float
    total: float
    finish_reason: str
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
    """Generate the reply to a conversation and pass it to `show` piece by piece.

    Ctrl-C ends the reply. So does an error of the engine, which the turn's figures then name. The partial reply stays in the conversation.

    Raises:
        InvalidRequestError: The conversation cannot be served; the state is unchanged.
    """
    most = model.config.max_position_embeddings
    tokens = np.asarray(render(model.tokenizer, asked.messages, enable_thinking=asked.thinking, most=most), np.int32)
    if len(tokens) >= capacity(state):
        raise InvalidRequestError(f"the conversation has {len(tokens)} tokens, but the engine holds {capacity(state)}: use /reset")
    new_sequence(model, enter(state), tokens, params)  # only raises errors; nothing is committed
    stream = TextStream.of(model.tokenizer, params.stop, params.skip_special_tokens)
    before, start = state.stats, time.perf_counter()
    token_ids: list[int] = []
    output: RequestOutput | None = None
    error: str | None = None
    with noted_interrupts(every=True) as came:
        # No exception may escape before `detach`, because the only live state would be lost.
        state, context = _continued(state, asked.chunk, tokens, _hidden(model, asked))
        prompt = sum(map(len, context)) if isinstance(context, tuple) else len(context)
        try:
            state, (request,) = submit_many(model, state, [context], [params], keep=True)
        except OutOfPagesError:  # the chunk finds no room to come back from host memory, so its tokens run again
            state, (request,) = submit_many(model, state, [tokens], [params], keep=True)
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
                output, error = out.output, None if out.error is None else str(out.error)
                if output is None:
                    stream, piece = stream.push(out.token_ids)
                    show(piece)
        state, chunk = detach(model, state, request)
        after = state.stats
        if chunk is not None and asked.retain in ("shift", "gap"):
            state, chunk = answer_of(model, state, chunk, min(len(tokens), len(chunk)), asked.retain)
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


@mirrored
def answer_of(model: Model, state: EngineState, chunk: Chunk, start: int, retain: Retain) -> tuple[EngineState, Chunk]:
    """The conversation's chunk without the think blocks of its last reply, which begins at token `start`.

    If pages are short, the chunk is returned unchanged, and the next turn runs the answer again.
    """
    try:
        entered = resident(enter(state), chunk)
        with guarded(entered) as taken:
            after, kept = without_thinking(model, entered, require_live(entered, chunk), start, retain, taken)
            return commit_state(after), kept
    except NanoVLLMError:
        return state, chunk


def _hidden(model: Model, asked: Conversation) -> np.ndarray | None:
    """A mask of the chunk's tokens that are retained think blocks and that the next prompt lacks, or None."""
    if asked.chunk is None or asked.retain != "all" or model.tokenizer is None:
        return None
    mask = np.zeros(len(asked.chunk), bool)
    for begin, end in think_spans(model.tokenizer, asked.chunk.token_ids):
        mask[begin:end] = True
    return mask


def _continued(
    state: EngineState, chunk: Chunk | None, tokens: np.ndarray, hidden: np.ndarray | None = None
) -> tuple[EngineState, tuple[Chunk, np.ndarray] | np.ndarray]:
    """The prompt as a context over the part of the chunk that it shares. The old chunk is released or replaced.

    Args:
        hidden: A mask of the chunk's tokens that may stay in the context although the prompt lacks them.
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
    """How many tokens of a chunk fit before the rest of a prompt, and how many of the prompt's tokens they replace."""
    seen = np.arange(len(token_ids)) if hidden is None else np.flatnonzero(~hidden)
    both = min(len(seen), len(tokens))
    differ = np.flatnonzero(token_ids[seen[:both]] != tokens[:both])
    shared = int(differ[0]) if len(differ) else both
    # Keep no hidden tokens at the end, because the prompt may continue with another form of the same text.
    return (int(seen[shared - 1]) + 1 if shared else 0), shared
