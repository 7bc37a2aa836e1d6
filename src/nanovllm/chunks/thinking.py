"""Think blocks by token id: where they are, and a chunk without them."""

from collections.abc import Collection
from typing import Any, Literal

import numpy as np

from nanovllm.chunks.compose import MODES, dropped, run_after
from nanovllm.chunks.handles import cut, cut_live, released
from nanovllm.errors import InvalidRequestError
from nanovllm.models.model import Model
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.pool import Taken
from nanovllm.tokenizer.tokenizer import Tokenizer

Retain = Literal["all", "recompute", "shift", "gap"]


def check_retain(model: Model, retain: Any) -> None:
    """Check the option `retain`.

    Raises:
        InvalidRequestError: `retain` is neither "all" nor a mode of `drop`, or the model has no think tokens.
    """
    if retain == "all":
        return
    if retain not in MODES:
        raise InvalidRequestError(f"retain={retain!r} is not one of all, {', '.join(MODES)}")
    if model.tokenizer is None or model.tokenizer.think_token_ids is None:
        raise InvalidRequestError(f'retain={retain!r} drops think blocks, but {model.name} has no think tokens: use retain="all"')


def think_spans(tokenizer: Tokenizer, token_ids: np.ndarray, start: int = 0, ends: Collection[int] = ()) -> list[tuple[int, int]]:
    """The think blocks of the tokens from index `start` on.

    A block includes the white space after it, because chat templates leave both out of a conversation's history. A block that is not closed
    ends with the tokens. The first block may begin before `start`, if the last message of the prompt left it open.

    Args:
        tokenizer: The tokenizer; without think tokens there are no blocks.
        token_ids: int32 `[T]`, prompt and reply.
        start: The index of the reply's first token.
        ends: The tokens that end a message.

    Returns:
        The blocks as (begin, end), in order.
    """
    if tokenizer.think_token_ids is None:
        return []
    opening, closing = tokenizer.think_token_ids
    spans, begin = [], _left_open(tokenizer, token_ids[:start], ends)
    for at in (np.flatnonzero((token_ids[start:] == opening) | (token_ids[start:] == closing)) + start).tolist():
        if token_ids[at] == opening:
            # The prompt has words after its opening tag, and the reply opens a block: then the prompt's tag was quoted text.
            begin = at if begin is None or (begin < start and _behind_space(tokenizer, token_ids, begin + 1) < start) else begin
        elif begin is not None:
            spans.append((begin, _behind_space(tokenizer, token_ids, at + 1)))
            begin = None
    return spans if begin is None else [*spans, (begin, len(token_ids))]


def without_thinking(model: Model, state: EngineState, chunk: Chunk, start: int, retain: Retain, taken: Taken) -> tuple[EngineState, Chunk]:
    """Replace a chunk by one without the think blocks after token `start`, without the commit.

    A chunk cannot be empty: if nothing else would be left, its first block stays. Pages that are taken are noted in `taken`.
    """
    if retain == "all" or model.tokenizer is None:
        return state, chunk
    spans = think_spans(model.tokenizer, chunk.token_ids, start, model.config.eos_token_ids)
    kept = np.ones(len(chunk), bool)
    for begin, end in spans:
        kept[begin:end] = False
    if not kept.any():
        kept[: spans[0][1]] = True
        spans = spans[1:]
    if not spans:
        return state, chunk
    old = chunk
    if retain == "recompute":  # all tokens after the first block run in one prefill
        begin = spans[0][0]
        base = cut(chunk, begin, state.config.page_size) if begin else None
        tokens = chunk.tokens.truncate(begin).extend(chunk.token_ids[begin:][kept[begin:]])
        state, chunk = cut_live(state, chunk, begin) if len(tokens) == begin else run_after(model, state, base, tokens, taken)
        return released(state, old), chunk
    for begin, end in reversed(spans):
        state, chunk = dropped(model, state, old, begin, end, retain, taken)
        state, old = released(state, old), chunk
    return state, chunk


def _left_open(tokenizer: Tokenizer, prompt: np.ndarray, ends: Collection[int]) -> int | None:
    """The index at which the last message of a prompt opened a think block that it did not close, or None."""
    assert tokenizer.think_token_ids is not None
    opening, closing = tokenizer.think_token_ids
    marks = np.flatnonzero(np.isin(prompt, [opening, closing, *ends]))
    return int(marks[-1]) if len(marks) and prompt[marks[-1]] == opening else None


def _behind_space(tokenizer: Tokenizer, token_ids: np.ndarray, at: int) -> int:
    """The index of the first token from `at` on that is not white space."""
    while at < len(token_ids) and not tokenizer.decode([int(token_ids[at])], skip_special_tokens=False).strip():
        at += 1
    return at
